"""Every architecture by name: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dlx.names import lookup

from .model import Tacotron2, Tacotron2Config
from .waveglow import WaveGlow, WaveGlowConfig

MEAN = -5.5  # of speech's log-mel spectrograms, about: where a voice begins
SYMBOLS = 148  # of the published English table
COMPACT = {"encoder": 256, "prenet": 128, "rnn": 384, "postnet": 256, "conv_dropout": 0.1}
SMALL = {"channels": 64, "upsample_groups": 80, "condition": 128}


@dataclass(frozen=True)
class Architecture:
    """``parameters`` counts an acoustic model of 148 symbols."""

    config: Tacotron2Config | WaveGlowConfig
    parameters: int


ARCHITECTURES: dict[str, Architecture] = {
    # fmt: off
    "tacotron2": Architecture(Tacotron2Config(), 28_193_153),
    "tacotron2_compact": Architecture(Tacotron2Config(**COMPACT), 5_534_977),
    "waveglow": Architecture(WaveGlowConfig(), 87_879_272),
    "waveglow_512": Architecture(WaveGlowConfig(channels=512), 268_294_760),
    "waveglow_compact": Architecture(WaveGlowConfig(**SMALL), 4_914_792),
    # fmt: on
}


def of_kind(name: str, kind: type) -> Tacotron2Config | WaveGlowConfig:
    """The configuration of that name; a ValueError suggests the nearest of the same kind."""
    known = {known: entry.config for known, entry in ARCHITECTURES.items() if isinstance(entry.config, kind)}
    return lookup(known, name, "architecture")


def build(name: str, num_symbols: int = SYMBOLS) -> Tacotron2 | WaveGlow:
    """A model with freshly initialised weights; ``num_symbols`` is for acoustic models.

    Raises ValueError for an unknown name, suggesting the nearest, and for fewer than two symbols.
    """
    config = lookup(ARCHITECTURES, name, "architecture").config
    if isinstance(config, WaveGlowConfig):
        return WaveGlow(config)
    if num_symbols < 2:
        raise ValueError(f"num_symbols must be at least 2, got {num_symbols}")
    model = Tacotron2(replace(config, num_symbols=num_symbols))
    nn.init.constant_(model.decoder.mel.bias, MEAN)
    return model


def recognise(state_dict: Mapping[str, Tensor], num_symbols: int = SYMBOLS) -> str | None:
    """The architecture that has tensors of these names and shapes, if one does."""
    for name in ARCHITECTURES:
        with torch.device("meta"):
            model: nn.Module = build(name, num_symbols)
        own = {key: value.shape for key, value in model.state_dict().items() if not key.endswith("num_batches_tracked")}
        if all(key in state_dict and state_dict[key].shape == shape for key, shape in own.items()):
            return name
    return None
