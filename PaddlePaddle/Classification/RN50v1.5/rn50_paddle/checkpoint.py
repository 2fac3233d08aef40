"""Checkpoints that a kill at any moment leaves whole: folders `step_00000123`, written aside and renamed.

    model.safetensors        parameters and running statistics by name
    optimizer.safetensors    momentum by parameter name, sparsity masks, loss scale
    meta.json                step, hashes of the two, what the model is

Nothing in them is a pickle. `scores.json` beside them names the best of a run, which is kept besides the newest ones.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dlx.files import atomic_path, atomic_write, sha256
from dlx.runlog import strict

_NAME = re.compile(r"step_(\d{8})")
_FILES = ("model.safetensors", "optimizer.safetensors")
SCORES = "scores.json"


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs to something else."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    path: Path
    step: int
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: the `keep` newest, and the best."""

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory, self.keep = Path(directory), keep

    def list(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(path for path in found if _NAME.fullmatch(path.name))

    def best(self) -> Path | None:
        name = self._scores().get("best")
        path = self.directory / name if name else None
        return path if path is not None and path.is_dir() else None

    def best_score(self) -> float | None:
        return self._scores().get("score")

    def owes_evaluation(self, step: int) -> bool:
        """Whether the checkpoint of this step was saved and a kill came before its score."""
        return self._scores().get("evaluated") != step

    def _scores(self) -> dict[str, Any]:
        path = self.directory / SCORES
        return json.loads(path.read_text()) if path.is_file() else {}

    def save(
        self, step: int, model: dict[str, np.ndarray], optimizer: dict[str, np.ndarray], meta: dict[str, Any]
    ) -> Path:
        """Write a checkpoint; the older ones go only when it is complete."""
        target = self.directory / f"step_{step:08d}"
        for leftover in self.directory.glob(".step_*.tmp"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
        with atomic_path(target) as temporary:
            temporary.mkdir()
            for name, values in zip(_FILES, (model, optimizer), strict=True):
                save_file({key: np.ascontiguousarray(value) for key, value in values.items()}, temporary / name)
            content = {"step": step, **meta, "sha256": {name: sha256(temporary / name) for name in _FILES}}
            (temporary / "meta.json").write_text(json.dumps(strict(content), indent=1))
        self.tidy()
        return target

    def score(self, path: Path, step: int, score: float) -> None:
        """Note the score of a checkpoint, more is better; the best one is kept."""
        scores = self._scores() | {"evaluated": step}
        if scores.get("score") is None or score > scores["score"]:
            scores |= {"best": path.name, "score": score}
        atomic_write(self.directory / SCORES, json.dumps(scores) + "\n")
        self.tidy()

    def tidy(self) -> None:
        for path in self.list()[: -self.keep]:
            if path != self.best():
                shutil.rmtree(path)

    def newest(self) -> Loaded | None:
        """The newest checkpoint; where it is damaged, the one before it."""
        faults = []
        for path in reversed(self.list()):
            try:
                return load(path)
            except CheckpointError as error:
                faults.append(str(error))
                print(f"passed over: {error}")
        if faults:
            raise CheckpointError(f"no checkpoint of {self.directory} can be read: {faults[0]}")
        return None


def load(path: str | Path) -> Loaded:
    """Read one checkpoint and check its hashes."""
    path = Path(path)
    try:
        meta = json.loads((path / "meta.json").read_text())
        for name, expected in meta["sha256"].items():
            if sha256(path / name) != expected:
                raise CheckpointError(f"{path / name}: damaged, its SHA-256 is not that of meta.json")
        model, optimizer = (load_file(path / name) for name in _FILES)
    except CheckpointError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint: {error}") from None
    return Loaded(path, int(meta["step"]), model, optimizer, meta)


def find(source: str | Path) -> Path:
    """The checkpoint that a name means: itself, or the best (else the newest) of a run's folder."""
    path = Path(source)
    if (path / "meta.json").is_file():
        return path
    store = Checkpoints(path / "checkpoints")
    chosen = store.best() or next(reversed(store.list()), None)
    if chosen is None:
        raise CheckpointError(f"{source}: neither a checkpoint nor a run's folder with one")
    return chosen
