"""Acoustic models and vocoders with weights: from a card, a run's folder, a checkpoint or a plain file.

What a model needs to be used (architecture, symbols and cleaner, meaning of the spectrograms) travels with its weights:
in the card of published weights, in the metadata of a checkpoint. A bare file is recognised by its tensors and taken to
be of the published English symbols and 22,050 Hz spectrograms.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlx import checkpoint as checkpoints
from dlx import weights
from dlx.names import lookup
from dlx.speech import fast_vocoder
from dlx.speech import vocoder as vocoders
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.symbols import LETTERS, PUNCTUATION, SymbolTable

from . import registry
from .convert import PREFIXES, to_canonical
from .model import Tacotron2, Tacotron2Config
from .vocoding import SIGMA, STRENGTH, WaveGlowVocoder
from .waveglow import WaveGlow

NEEDED = ("arch", "preprocessing")
# The 38 characters of torchaudio's character models.
CHARACTERS = SymbolTable(("_", "-", *PUNCTUATION, *LETTERS[26:]), "characters")
KNOWN_TABLES = {len(table): table for table in (SymbolTable.english(), CHARACTERS)}


@dataclass
class Found:
    """Weights with what is known of them; ``front_end`` is None for a vocoder."""

    model: Tacotron2 | WaveGlow
    arch: str
    mel: MelConfig
    front_end: FrontEnd | None
    source: str
    extra: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The metadata that a checkpoint or an exported model carries."""
        return describe(self.arch, self.mel, self.front_end)


def describe(arch: str, mel: MelConfig, front_end: FrontEnd | None = None) -> dict[str, Any]:
    """What `load` wants to find in a checkpoint's metadata; an acoustic model needs its front end."""
    preprocessing = {"mel": mel.to_dict()}
    if front_end is not None:
        preprocessing["front_end"] = front_end.to_dict()
    return {"arch": arch, "preprocessing": preprocessing}


def load(
    source: str | os.PathLike[str],
    *,
    arch: str | None = None,
    device: str | torch.device = "cpu",
    averaged: bool = True,
) -> Found:
    """A model in evaluation mode from a card's name, a run or checkpoint folder, or a file. ``averaged`` prefers EMA.

    Raises ValueError when the source is none of these or holds no such model, and when its tensors do not fit the
    architecture (naming each).
    """
    path = Path(source)
    if path.is_dir():
        found = _assemble(*checkpoints.load_weights(path, averaged))
    elif str(source) in weights.cards():
        raw = weights.card(str(source)).raw
        found = _assemble(raw, weights.load_state_dict(weights.resolve(str(source))), str(source))
        found.extra = raw
    elif path.is_file():
        found = _from_file(path, arch)
    else:
        known = ", ".join(name for name, card in weights.cards().items() if card.arch in registry.ARCHITECTURES)
        raise ValueError(
            f"{source}: no folder, no file, and no name of published weights ({known or 'there are none'})"
        )
    if arch not in (None, found.arch):
        raise ValueError(f"{source} holds a {found.arch}, not a {arch}")
    found.model.to(device).eval()
    return found


def load_voice(source: str | os.PathLike[str], **options: Any) -> Found:
    """`load`, and a ValueError if it is no acoustic model."""
    found = load(source, **options)
    if not isinstance(found.model, Tacotron2):
        raise ValueError(f"{source} holds a {found.arch}, which is a vocoder, not a Tacotron 2")
    return found


def load_vocoder(
    source: str | os.PathLike[str],
    *,
    mel: MelConfig | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    sigma: float = SIGMA,
    strength: float = STRENGTH,
    seed: int = 0,
) -> vocoders.Vocoder:
    """ "griffin-lim", a HiFi-GAN (card or file), or a WaveGlow (card, run, checkpoint or file), ready to be used.

    ``mel``: what Griffin-Lim shall read, and what a file that does not say it reads. The last three are WaveGlow's.
    """
    path = Path(source)
    if not path.exists():
        cards = weights.cards()
        is_ours = str(source) in cards and cards[str(source)].arch in registry.ARCHITECTURES
    else:
        is_ours = path.is_dir() or "upsample.weight" in weights.strip_prefixes(vocoders.load_state(path), PREFIXES)
    if not is_ours:
        return fast_vocoder.optimize(vocoders.load(source, device=device, mel=mel), dtype)
    found = load(source, device=device)
    if not isinstance(found.model, WaveGlow):
        raise ValueError(f"{source} holds a {found.arch}, which is no vocoder")
    return WaveGlowVocoder(found.model, found.mel, sigma, strength, seed, dtype)


def _assemble(metadata: Mapping[str, Any], state_dict: Mapping[str, Tensor], source: str) -> Found:
    lacking = [key for key in NEEDED if key not in metadata]
    if lacking:
        raise ValueError(f"{source}: it does not say its {', '.join(lacking)}, so it is none of this task's models")
    preprocessing = metadata["preprocessing"]
    mel = MelConfig.from_dict(preprocessing["mel"])
    front_end = FrontEnd.from_dict(preprocessing["front_end"]) if "front_end" in preprocessing else None
    model = registry.build(metadata["arch"], len(front_end.symbols) if front_end else registry.SYMBOLS)
    if isinstance(model, Tacotron2) and front_end is None:
        raise ValueError(f"{source}: it does not say which symbols it reads (preprocessing.front_end)")
    weights.load_into(model, to_canonical(state_dict))
    return Found(model, metadata["arch"], mel, front_end, source)


def _from_file(path: Path, arch: str | None) -> Found:
    state_dict = to_canonical(weights.load_state_dict(path))
    embedding = state_dict.get("encoder.embedding.weight")
    rows = registry.SYMBOLS if embedding is None else len(embedding)
    arch = arch or registry.recognise(state_dict, rows)
    if arch is None:
        default = "tacotron2" if embedding is not None else "waveglow"
        if embedding is None and "upsample.weight" not in state_dict:
            raise ValueError(f"{path}: neither a Tacotron 2 nor a WaveGlow among its {len(state_dict)} tensors")
        arch = default  # its strict load will say what differs
    front_end = None
    if isinstance(lookup(registry.ARCHITECTURES, arch, "architecture").config, Tacotron2Config):
        if rows not in KNOWN_TABLES:
            raise ValueError(f"{path}: which {rows} symbols it reads is not known; a run or a card would say it")
        front_end = FrontEnd(KNOWN_TABLES[rows], "english")
    return _assemble(describe(arch, MelConfig(), front_end), state_dict, str(path))
