"""Detectors with weights: from a card of the registry, a run's folder, a checkpoint or a plain file.

What a detector needs to be used (architecture, classes, category ids, preprocessing) travels with its weights: in the
card of published weights, in the metadata of a checkpoint. Only a bare state dict needs ``arch`` from the caller.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlx import checkpoint as checkpoints
from dlx import weights

from . import registry
from .anchors import PER_CELL
from .convert import backbone_tensors, to_canonical, transfer
from .detect import DetectionModel
from .model import SSD
from .preprocessing import Preprocessing

NEEDED = ("arch", "classes", "category_ids", "preprocessing")


@dataclass
class Detector:
    """A model in evaluation mode with everything needed to use it; label i is ``classes[i - 1]``."""

    model: SSD
    arch: str
    classes: list[str]
    category_ids: list[int]
    preprocessing: Preprocessing
    source: str
    extra: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The metadata that a checkpoint or an exported model carries."""
        return describe(self.arch, self.classes, self.category_ids, self.preprocessing)

    def detection_model(self, **options: Any) -> DetectionModel:
        """Model and suppression together; ``options`` of ``detect.Detect``."""
        return DetectionModel(self.model, self.preprocessing.size, **options)


def describe(arch: str, classes: list[str], category_ids: list[int], preprocessing: Preprocessing) -> dict[str, Any]:
    """What ``load`` wants to find in a checkpoint's metadata."""
    return {
        "arch": arch,
        "classes": list(classes),
        "category_ids": [int(number) for number in category_ids],
        "preprocessing": preprocessing.to_dict(),
    }


@functools.cache
def coco_categories() -> tuple[tuple[int, str], ...]:
    """The 80 categories of COCO as (category id, name), in the order of labels."""
    lines = Path(__file__).with_name("coco_classes.txt").read_text(encoding="utf-8").splitlines()
    return tuple((int(number), name) for number, _, name in (line.partition(" ") for line in lines))


def name_classes(count: int) -> tuple[list[str], list[int]]:
    """Names and category ids for a model that does not say them: COCO's where the number fits."""
    if count == len(coco_categories()):
        return [name for _, name in coco_categories()], [number for number, _ in coco_categories()]
    return [f"class_{index}" for index in range(1, count + 1)], list(range(1, count + 1))


def load(
    source: str | os.PathLike[str],
    *,
    arch: str | None = None,
    device: str | torch.device = "cpu",
    averaged: bool = True,
) -> Detector:
    """A detector from a card's name, a run or checkpoint folder, or a file. ``averaged`` prefers EMA weights.

    Raises ValueError when the source is none of these, when a bare file comes without ``arch``, or when its tensors
    do not fit the architecture (naming each).
    """
    path = Path(source)
    if path.is_dir():
        found = _from_folder(path, averaged)
    elif str(source) in weights.cards():
        found = _from_card(str(source))
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


def _assemble(metadata: Mapping[str, Any], state_dict: Mapping[str, Tensor], source: str) -> Detector:
    lacking = [key for key in NEEDED if key not in metadata]
    if lacking:
        raise ValueError(f"{source}: it does not say its {', '.join(lacking)}, so it is no detector's")
    classes, category_ids = list(metadata["classes"]), [int(number) for number in metadata["category_ids"]]
    if len(classes) != len(category_ids):
        raise ValueError(f"{source}: {len(classes)} classes, but {len(category_ids)} category_ids")
    model = registry.build(metadata["arch"], len(classes))
    weights.load_into(model, to_canonical(state_dict))
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    return Detector(model, metadata["arch"], classes, category_ids, preprocessing, source)


def _from_folder(path: Path, averaged: bool) -> Detector:
    if not (path / "meta.json").is_file():
        inside = path / "checkpoints"
        store = checkpoints.Checkpoints(inside if inside.is_dir() else path)
        chosen = store.best() or store.latest()
        if chosen is None:
            raise ValueError(f"{path}: there is no checkpoint in this folder")
        path = chosen
    loaded = checkpoints.load(path)
    name = "ema" if averaged and "ema" in loaded.model else "model"
    return _assemble(loaded.metadata, loaded.model[name], str(path))


def _from_card(name: str) -> Detector:
    raw = weights.card(name).raw
    metadata = {"classes": raw.get("class_names")} | {key: raw[key] for key in NEEDED if key in raw}
    if metadata["classes"] is None:
        raise ValueError(f"weights {name}: the card is not one of a detector (it lacks class_names)")
    found = _assemble(metadata, weights.load_state_dict(weights.resolve(name)), name)
    found.extra = raw
    return found


def _from_file(path: Path, arch: str | None) -> Detector:
    if arch is None:
        raise ValueError(f"{path}: a bare weights file does not say what it is; give --arch")
    state_dict = to_canonical(weights.load_state_dict(path))
    bias = state_dict.get("heads.0.bias")
    if bias is None:
        raise ValueError(f"{path}: no head of a detector (heads.0.bias) among its {len(state_dict)} tensors")
    classes, category_ids = name_classes(len(bias) // PER_CELL[0] - 5)
    return _assemble(describe(arch, classes, category_ids, Preprocessing()), state_dict, str(path))


def start_from(model: SSD, source: str | os.PathLike[str], arch: str | None = None) -> Detector:
    """Copy into ``model`` what a trained detector of other classes knows; returns that detector.

    Raises ValueError when its architecture is another.
    """
    found = load(source, arch=arch)
    transfer(model, found.model.state_dict())
    return found


def load_backbone(model: SSD, path: str | os.PathLike[str]) -> weights.LoadReport:
    """Copy a classifier's weights into the backbone: a file (see `convert.backbone_tensors`) or a card's name."""
    if str(path) in weights.cards():
        path = weights.resolve(str(path))
    return weights.load_into(model.backbone, backbone_tensors(weights.load_state_dict(path)))
