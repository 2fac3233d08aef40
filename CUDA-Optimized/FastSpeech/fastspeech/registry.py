"""Every architecture by name: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlx.names import lookup

from .model import FastSpeech, FastSpeechConfig

SYMBOLS = 148  # of the published English table
COMPACT = {"channels": 256, "feed_forward": 512, "encoder_blocks": 3, "decoder_blocks": 3}


@dataclass(frozen=True)
class Architecture:
    """`parameters`: with 148 symbols."""

    config: FastSpeechConfig
    parameters: int


ARCHITECTURES: dict[str, Architecture] = {
    # fmt: off
    "fastspeech": Architecture(FastSpeechConfig(), 45_458_257),
    "fastspeech_compact": Architecture(FastSpeechConfig(**COMPACT), 5_973_073),
    # fmt: on
}


def build(name: str, num_symbols: int = SYMBOLS) -> FastSpeech:
    """A model with fresh weights. ValueError for an unknown name, suggesting the nearest."""
    return FastSpeech(replace(lookup(ARCHITECTURES, name, "architecture").config, num_symbols=num_symbols))


def recognise(state_dict: Mapping[str, Tensor]) -> str | None:
    """The architecture that has tensors of these names and shapes, if one does."""
    rows = len(state_dict.get("embedding.weight", ()))
    for name in ARCHITECTURES if rows > 1 else ():
        with torch.device("meta"):
            own = {key: value.shape for key, value in build(name, rows).state_dict().items()}
        if own == {key: value.shape for key, value in state_dict.items()}:
            return name
    return None
