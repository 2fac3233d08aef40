"""Models with weights: from a card of the registry, a run's folder, a checkpoint or a plain file.

What a model needs to be used (architecture, classes, preprocessing) travels with its weights: in the card of published
weights, in the metadata of a checkpoint. Only a bare state dict needs ``arch`` from the caller.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlx import checkpoint as checkpoints
from dlx import weights
from dlx.vision import Preprocessing

from . import quantizers, registry
from .convert import published_eps, to_canonical
from .folder import imagenet_labels

HEADS = ("fc.weight", "classifier.fc.weight", "classifier.1.weight")


@dataclass
class Classifier:
    """A model in evaluation mode with everything needed to use it."""

    model: nn.Module
    arch: str
    preprocessing: Preprocessing
    classes: list[str]
    source: str
    extra: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The metadata that a checkpoint or an exported model carries."""
        return {"arch": self.arch, "classes": self.classes, "preprocessing": self.preprocessing.to_dict()}


def default_preprocessing(arch: str, image_size: int | None = None, channels: int = 3, **options: Any) -> Preprocessing:
    """Resize and crop as in training's evaluation; ImageNet statistics for colour, (0.5, 0.5) for grey."""
    size = image_size or registry.architecture(arch).image_size
    if channels == 1:
        options = {"mean": (0.5,), "std": (0.5,)} | options
    return Preprocessing(resize=size + 32 if size >= 64 else size, crop=size, channels=channels, **options)


def load(
    source: str | os.PathLike[str],
    *,
    arch: str | None = None,
    device: str | torch.device = "cpu",
    averaged: bool = True,
    preprocessing: Preprocessing | None = None,
) -> Classifier:
    """A classifier from a card's name, a run or checkpoint folder, or a file. ``averaged`` prefers EMA weights.

    Raises ValueError when the source is none of these, when a bare file comes without ``arch``, or when its tensors
    do not fit the architecture (naming each).
    """
    path = Path(source)
    if path.is_dir():
        found = _from_checkpoint(path, averaged)
    elif str(source) in weights.cards():
        found = _from_card(str(source))
    elif path.is_file():
        found = _from_file(path, arch)
    else:
        known = ", ".join(sorted(weights.cards())) or "none"
        raise ValueError(f"{source}: neither a folder, a file, nor the name of published weights (known: {known})")
    if arch is not None and found.arch != arch:
        raise ValueError(f"{source} holds a {found.arch}, not a {arch}")
    if preprocessing is not None:
        found.preprocessing = preprocessing
    found.model.to(device).eval()
    return found


def load_published(model: nn.Module, state_dict: Mapping[str, Tensor], arch: str) -> None:
    """Load tensors of any known layout, strictly, with the batch-norm epsilon they were trained with."""
    weights.load_into(model, to_canonical(state_dict, arch))
    eps = published_eps(state_dict, arch)
    for module in model.modules():
        if eps is not None and isinstance(module, nn.BatchNorm2d):
            module.eps = eps


def build_from(metadata: dict[str, Any]) -> nn.Module:
    """A model with fresh weights from a checkpoint's metadata."""
    channels = metadata["preprocessing"].get("channels", 3)
    model = registry.build(metadata["arch"], len(metadata["classes"]), in_channels=channels)
    if "quantization" in metadata:
        model = quantizers.quantize(model, quantizers.Scheme(**metadata["quantization"]))
    return model


def _from_checkpoint(path: Path, averaged: bool) -> Classifier:
    if not (path / "meta.json").is_file():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = checkpoints.Checkpoints(folder)
        best = found.best() or found.latest()
        if best is None:
            raise ValueError(f"{path}: no checkpoint in this folder")
        path = best
    loaded = checkpoints.load(path)
    metadata = loaded.metadata
    for key in ("arch", "classes", "preprocessing"):
        if key not in metadata:
            raise ValueError(f"{path}: the checkpoint's metadata lacks {key!r}; it is not one of an image classifier")
    model = build_from(metadata)
    name = "ema" if averaged and "ema" in loaded.model else "model"
    weights.load_into(model, loaded.model[name])
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    return Classifier(model, metadata["arch"], preprocessing, list(metadata["classes"]), str(path))


def _from_card(name: str) -> Classifier:
    card = weights.card(name)
    raw = card.raw
    classes = raw["class_names"] if "class_names" in raw else imagenet_labels()
    preprocessing = Preprocessing.from_dict(raw["preprocessing"])
    model = registry.build(raw["arch"], len(classes), in_channels=preprocessing.channels)
    load_published(model, weights.load_state_dict(weights.resolve(name)), raw["arch"])
    return Classifier(model, raw["arch"], preprocessing, classes, name, raw)


def _from_file(path: Path, arch: str | None) -> Classifier:
    if arch is None:
        raise ValueError(f"{path}: a bare weights file does not say what it is; give --arch")
    published = weights.load_state_dict(path)
    state_dict = to_canonical(published, arch)
    head = next((value for key, value in state_dict.items() if key in HEADS), None)
    if head is None:
        raise ValueError(f"{path}: no classifier weight ({', '.join(HEADS)}) among its {len(state_dict)} tensors")
    classes = imagenet_labels()
    if len(head) != len(classes):
        classes = [f"class_{index}" for index in range(len(head))]
    channels = _input_channels(state_dict, arch)
    model = registry.build(arch, len(head), in_channels=channels)
    weights.load_into(model, state_dict)
    return Classifier(model, arch, default_preprocessing(arch, channels=channels), classes, str(path))


def _input_channels(state_dict: dict[str, torch.Tensor], arch: str) -> int:
    """1 where the first convolution takes grey pictures, else 3."""
    with torch.device("meta"):
        stem = next(name for name, value in registry.build(arch).state_dict().items() if value.dim() == 4)
    return 1 if stem in state_dict and state_dict[stem].shape[1:2] == (1,) else 3
