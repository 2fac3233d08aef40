"""Checkpoints of `tf.train.Checkpoint`, which runs nobody's code when it is read, with a JSON file that says of what.

RUN/checkpoints/last and RUN/checkpoints/best are folders, each replaced as a whole: `state.json` and the tensors of
`weights` (model, and in `last` optimizer).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from dlx.files import atomic_path

from .model import build_model

STATE, WEIGHTS = "state.json", "weights"
KEYS = ("arch", "classes", "image_size", "progress")


@dataclass
class Detector:
    """A network with weights and all that is needed to use it."""

    model: keras.Model
    arch: str
    classes: list[str]
    image_size: int
    source: str

    def describe(self) -> dict[str, Any]:
        return {"arch": self.arch, "classes": self.classes, "image_size": self.image_size}


def save(folder: Path, state: dict[str, Any], **parts: Any) -> None:
    """Write a checkpoint folder of these objects (`model`, `optimizer`), whole or not at all."""
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        tf.train.Checkpoint(**parts).write(str(temporary / WEIGHTS))
        (temporary / STATE).write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint folder. ValueError for what is none."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: not a checkpoint: {error}") from None
    missing = [key for key in KEYS if not isinstance(state, dict) or key not in state]
    if missing:
        raise ValueError(f"{folder / STATE}: lacks {', '.join(missing)}")
    return state


def restore(folder: Path, **parts: Any) -> None:
    """Set the variables of these objects, all of which must be in the checkpoint, in their shapes."""
    try:
        status = tf.train.Checkpoint(**parts).read(str(folder / WEIGHTS))
        status.assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError, tf.errors.OpError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{folder}: its tensors do not fit: {lines[0]}") from None


def find(source: str | os.PathLike[str]) -> Path:
    """The checkpoint that a run's folder (its best, else its last) or a checkpoint's folder stands for."""
    path = Path(source)
    for candidate in (path, path / "checkpoints" / "best", path / "checkpoints" / "last"):
        if (candidate / STATE).is_file():
            return candidate
    raise ValueError(f"{path}: no checkpoint here")


def load(source: str | os.PathLike[str], dtype: str | None = None) -> Detector:
    """A detector from a run or a checkpoint. `dtype`: see `model.build_model`."""
    folder = find(source)
    state = read_state(folder)
    model = build_model(state["arch"], len(state["classes"]), state["image_size"], dtype)
    restore(folder, model=model)
    return Detector(model, state["arch"], list(state["classes"]), state["image_size"], str(folder))
