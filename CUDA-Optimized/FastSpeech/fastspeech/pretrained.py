"""Voices with weights: from a card, a run's folder, a checkpoint or a plain file, ours or NVIDIA's.

What a voice needs to be used (architecture, symbols and cleaner, meaning of the spectrograms, whether texts are led in)
travels with its weights: in the card of published weights, in the metadata of a checkpoint.
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
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig

from . import registry
from .convert import to_canonical
from .model import FastSpeech

NEEDED = ("arch", "preprocessing")


@dataclass
class Found:
    """A voice with what is known of it. `leads`: its texts begin with a space, see `data`. `extra`: its card, or of a
    run the options that it was "trained" with."""

    model: FastSpeech
    arch: str
    mel: MelConfig
    front_end: FrontEnd
    source: str
    leads: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The metadata that a checkpoint or an exported model carries."""
        return describe(self.arch, self.mel, self.front_end, self.leads)


def describe(arch: str, mel: MelConfig, front_end: FrontEnd, leads: bool = True) -> dict[str, Any]:
    """What `load` wants to find in a checkpoint's metadata."""
    meaning = {"mel": mel.to_dict(), "front_end": front_end.to_dict(), "leads": leads}
    return {"arch": arch, "preprocessing": meaning}


def load(
    source: str | os.PathLike[str],
    *,
    arch: str | None = None,
    device: str | torch.device = "cpu",
    averaged: bool = True,
) -> Found:
    """A voice in evaluation mode from a card's name, a run or checkpoint folder, or a file. `averaged` prefers EMA.

    A bare file is taken to be of the published English symbols and 22,050 Hz spectrograms. ValueError when the source
    is none of these, holds no FastSpeech, or its tensors do not fit the architecture (naming each).
    """
    path = Path(source)
    if path.is_dir():
        metadata, state_dict, name = checkpoints.load_weights(path, averaged)
        found = _assemble(metadata, state_dict, name)
        found.extra = {"trained": metadata.get("config", {})}
    elif str(source) in weights.cards():
        raw = weights.card(str(source)).raw
        found = _assemble(raw, weights.load_state_dict(weights.resolve(str(source))), str(source))
        found.extra = raw
    elif path.is_file():
        found = _from_file(path, arch)
    else:
        known = ", ".join(name for name, card in weights.cards().items() if card.arch in registry.ARCHITECTURES)
        raise ValueError(f"{source}: no folder, no file, and no name of published weights ({known or 'none yet'})")
    if arch not in (None, found.arch):
        raise ValueError(f"{source} holds a {found.arch}, not a {arch}")
    found.model.to(device).eval()
    return found


def _assemble(metadata: Mapping[str, Any], state_dict: Mapping[str, Tensor], source: str) -> Found:
    lacking = [key for key in NEEDED if key not in metadata]
    if lacking or metadata["arch"] not in registry.ARCHITECTURES:
        reason = f"does not say its {', '.join(lacking)}" if lacking else f"is a {metadata['arch']}"
        raise ValueError(f"{source}: it {reason}, so it is none of this task's voices")
    meaning = metadata["preprocessing"]
    front_end = FrontEnd.from_dict(meaning["front_end"])
    model = registry.build(metadata["arch"], len(front_end.symbols))
    weights.load_into(model, to_canonical(state_dict))
    mel = MelConfig.from_dict(meaning["mel"])
    return Found(model, metadata["arch"], mel, front_end, source, meaning.get("leads", True))


def _from_file(path: Path, arch: str | None) -> Found:
    """Published files come without a lead: their texts begin with the first letter, and end without a mark."""
    state_dict = to_canonical(weights.load_state_dict(path))
    if "embedding.weight" not in state_dict:
        raise ValueError(f"{path}: no FastSpeech among its {len(state_dict)} tensors")
    arch = arch or registry.recognise(state_dict) or "fastspeech"  # its strict load will say what differs
    return _assemble(describe(arch, MelConfig(), FrontEnd(punctuation=False), False), state_dict, str(path))
