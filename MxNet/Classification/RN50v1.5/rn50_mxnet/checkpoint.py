"""Checkpoints: written whole or not at all, of plain tensors and JSON, so that reading one runs nobody's code.

A checkpoint is a folder: `model.safetensors` (float32, by PyTorch's names: see `blocks`), `state.json` (architecture,
classes, preprocessing, where training was, hashes), and in a run's `last` also `trainer.safetensors` (momentum).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dlx.files import atomic_path, sha256
from dlx.vision import Preprocessing

from . import registry
from .blocks import set_weights
from .data import default_resize

WEIGHTS, TRAINER, STATE = "model.safetensors", "trainer.safetensors", "state.json"
KEYS = ("arch", "classes", "preprocessing")
ENDINGS = ("", ".new", ".before")  # of a checkpoint's name: in its place, about to come there, about to go


@dataclass
class Classifier:
    """A network with weights and all that is needed to use it."""

    network: HybridBlock
    arch: str
    classes: list[str]
    preprocessing: Preprocessing
    source: str
    weights: dict[str, np.ndarray]

    def describe(self) -> dict[str, Any]:
        """What a checkpoint or an exported model carries beside the weights."""
        return {"arch": self.arch, "classes": self.classes, "preprocessing": self.preprocessing.to_dict()}

    def rebuild(self, fused: bool = False) -> HybridBlock:
        """The same network again, with separate or fused norms."""
        network = build(self.arch, len(self.classes), self.preprocessing.channels, self.weights, fused=fused)
        set_weights(network, self.weights, self.source)
        return network


def build(arch: str, num_classes: int, channels: int, weights: dict[str, np.ndarray], **options: Any) -> HybridBlock:
    """A network with the depths that ``weights`` have, which tests make smaller than the architecture's."""
    config = registry.architecture(arch).config
    depths = None
    if config is not None:
        blocks = {tuple(name.split(".")[:2]) for name in weights if name.startswith("layer")}
        depths = tuple(sum(stage == f"layer{i + 1}" for stage, _ in blocks) for i in range(len(config.depths)))
        depths = depths if min(depths) > 0 else None
    return registry.build(arch, num_classes, channels, depths=depths, **options)


def preprocessing_for(arch: str, channels: int, image_size: int | None = None, resize: int | None = None):
    """Resize and crop as in evaluation; ImageNet's statistics for colour, (0.5, 0.5) for grey."""
    size = image_size or registry.architecture(arch).image_size
    grey = {"mean": (0.5,), "std": (0.5,)} if channels == 1 else {}
    return Preprocessing(resize=resize or default_resize(size), crop=size, channels=channels, **grey)


@dataclass
class Progress:
    """Where training was: ``batch`` batches of ``epoch`` are done; ``best`` is the best top-1 so far, in percent."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = -1.0
    config: dict[str, Any] = field(default_factory=dict)


def save(
    path: Path,
    weights: dict[str, np.ndarray],
    described: dict[str, Any],
    progress: Progress,
    trainer: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a checkpoint folder, replacing one that is there; a kill at any moment leaves one that `whole` finds."""
    for leftover in path.parent.glob(f".{path.name}*.tmp"):  # of a process that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    fresh, before = (path.with_name(path.name + ending) for ending in ENDINGS[1:])
    with atomic_path(fresh) as temporary:
        temporary.mkdir()
        save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, temporary / WEIGHTS)
        if trainer is not None:
            save_file({name: np.ascontiguousarray(value) for name, value in trainer.items()}, temporary / TRAINER)
        hashes = {file.name: sha256(file) for file in sorted(temporary.iterdir())}
        content = described | {"progress": vars(progress), "sha256": hashes}
        (temporary / STATE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(before, ignore_errors=True)
    if path.is_dir():  # a folder cannot be renamed over another one
        path.rename(before)
    fresh.rename(path)
    shutil.rmtree(before, ignore_errors=True)


def whole(path: Path) -> Path | None:
    """Where the checkpoint called ``path`` is: there, or where a kill in the middle of a save has left it."""
    places = (path.with_name(path.name + ending) for ending in ENDINGS)
    return next((place for place in places if (place / STATE).is_file()), None)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, float32. ValueError where it is none."""
    try:
        return {name: value.astype(np.float32) for name, value in load_file(path).items()}
    except (SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint folder. ValueError names the key that it lacks, or the file that is damaged."""
    try:
        content = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a checkpoint: {error}") from None
    for key in KEYS:
        if key not in content:
            raise ValueError(f"{path / STATE}: lacks {key!r}")
    for name, expected in content.get("sha256", {}).items():
        if (path / name).is_file() and sha256(path / name) != expected:
            raise ValueError(f"{path / name}: damaged, its SHA-256 is not that of {STATE}")
    return content


def find(source: str | os.PathLike[str]) -> Path:
    """The checkpoint that a run's folder (its best, else its last) or a checkpoint's folder stands for."""
    run = Path(source)
    places = [run, *(run / "checkpoints" / name for name in ("best", "last"))]
    found = [place for place in map(whole, places) if place is not None]
    if not found:
        raise ValueError(f"{run}: no checkpoint here")
    return found[0]


def load(source: str | os.PathLike[str], arch: str | None = None, ctx: mx.Context | None = None) -> Classifier:
    """A classifier from a run, a checkpoint, or a .safetensors file in PyTorch's layout (``arch`` says what it is)."""
    path = Path(source)
    if path.is_file():
        if arch is None:
            raise ValueError(f"{path}: a bare weights file does not say what it is; give --arch")
        weights = read_tensors(path)
        if "fc.weight" not in weights or "conv1.weight" not in weights:
            raise ValueError(f"{path}: no conv1.weight and fc.weight among its {len(weights)} tensors")
        channels = weights["conv1.weight"].shape[1]
        classes = [f"class_{number}" for number in range(len(weights["fc.weight"]))]
        preprocessing = preprocessing_for(arch, channels)
    else:
        path = find(path)
        state = read_state(path)
        weights = read_tensors(path / WEIGHTS)
        if arch is not None and arch != state["arch"]:
            raise ValueError(f"{path} holds a {state['arch']}, not a {arch}")
        arch, classes = state["arch"], list(state["classes"])
        preprocessing = Preprocessing.from_dict(state["preprocessing"])
    network = build(arch, len(classes), preprocessing.channels, weights, ctx=ctx)
    set_weights(network, weights, str(path))
    return Classifier(network, arch, classes, preprocessing, str(path), weights)
