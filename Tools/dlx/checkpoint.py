"""Checkpoints that survive a kill at any moment and continue a run as if it had never stopped.

    checkpoints = Checkpoints(output_dir / "checkpoints", keep=3)
    loaded = checkpoints.resume("auto")                       # None: start fresh
    with StopSignal() as stop:
        for step in ...:
            ...
            if stop.requested or step % 1000 == 0:
                checkpoints.save(step, model={"model": unwrap(model).state_dict()},
                                 state={"optimizer": optimizer.state_dict(), "rng": rng_state()}, metadata={...})

A checkpoint is a folder `step_00000123` with `model.safetensors` (one file per entry of `model`), `state.pt` (loadable
with weights_only) and `meta.json` (step, sizes and SHA-256 of the others). It is written under a temporary name,
flushed and renamed, so a folder of that name is complete; the hashes find what a disk damages later.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .dist import World
from .files import atomic_path, atomic_write, lock, sha256
from .runlog import strict
from .tensors import (
    CheckpointError,
    load_tensors,
    load_torch,
    portable,
    restored,
    save_tensors,
    split_state_dict,
    unwrap,
)

__all__ = ["CheckpointError", "Checkpoints", "Loaded", "StopSignal", "Stopped", "ignore_stop_signals", "load", "resume",
           "rng_state", "set_rng_state", "unwrap"]  # fmt: skip

SCHEMA = 1
_FOLDER = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_STATE = "state.pt"
_META = "meta.json"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, on the CPU: state dicts by name, the rest of the state, and what meta.json says."""

    path: Path
    step: int
    model: dict[str, dict[str, Any]]
    state: dict[str, Any]
    meta: dict[str, Any]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.meta["metadata"]


class Checkpoints:
    """The checkpoints of one run in `directory`: the `keep` last ones, and the best. One process may save at a time."""

    def __init__(self, directory: str | os.PathLike, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        model: dict[str, dict[str, Any]],
        state: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        metric: float | None = None,
        best: bool = False,
    ) -> Path:
        """Write a checkpoint and return its folder; if anything fails, nothing new is left and the old ones stay.

        `model` maps names ("model", "ema") to state dicts; the prefixes of DDP and torch.compile are taken off.
        `state` is nested dicts and lists of tensors, numbers and text; TypeError names an entry that is none of these.
        `metadata` is JSON. With `best` the file `best` names this checkpoint and it is kept until the next best.
        """
        if not 0 <= step < 10**12:
            raise ValueError(f"step must be at least 0, got {step}")
        for name in model:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == "state":
                raise ValueError(f"model name {name!r} must be letters, digits, - or _, and not 'state'")
        rest: dict[str, Any] = {"state": portable(state or {}, "state"), "extra": {}}
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name, state_dict in model.items():
            tensors[name], extra = split_state_dict(state_dict, name)
            if extra:
                rest["extra"][name] = portable(extra, f"model[{name!r}]")
        with lock(self.directory / ".lock", message=f"waiting for another process that saves in {self.directory}"):
            self._remove_leftovers()
            sequence = max((item.sequence or 0 for item in self._list()), default=0) + 1
            target = self._free_name(step)
            with atomic_path(target) as temporary:
                temporary.mkdir()
                for name, values in tensors.items():
                    save_tensors(values, temporary / f"{name}.safetensors")
                torch.save(rest, temporary / _STATE)
                meta = {
                    "schema": SCHEMA, "step": step, "sequence": sequence, "metric": strict(metric),
                    "models": list(tensors), "torch": torch.__version__, "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "files": {
                        item.name: {"sha256": sha256(item), "size": item.stat().st_size}
                        for item in sorted(temporary.iterdir())
                    },
                    "metadata": strict(metadata or {}),
                }  # fmt: skip
                (temporary / _META).write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")
            if best:
                atomic_write(self.directory / "best", target.name + "\n")
            atomic_write(self.directory / "last", target.name + "\n")
            self._prune(target)
        return target

    def mark(self, path: Path, metric: float, best: bool = False) -> None:
        """Add to a saved checkpoint what an evaluation found later: saving first, a kill in the evaluation costs less.

        The metric comes last, so a checkpoint that has one was wholly marked.
        """
        with lock(self.directory / ".lock", message=f"waiting for another process that saves in {self.directory}"):
            meta = _read_meta(path)
            if best:
                atomic_write(self.directory / "best", path.name + "\n")
            atomic_write(path / _META, json.dumps(meta | {"metric": strict(metric)}, indent=1, allow_nan=False) + "\n")
            self._prune(self.directory / (self._pointer("last") or path.name))

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None. Each damaged one that is passed over gives a warning."""
        path, damaged = self._newest_whole()
        for message in damaged:
            warnings.warn(f"damaged checkpoint passed over: {message}", stacklevel=2)
        return path

    def best(self) -> Path | None:
        """The checkpoint that the file `best` names, or None."""
        name = self._pointer("best")
        return self.directory / name if name and (self.directory / name).is_dir() else None

    def resume(self, where: str | os.PathLike | None = "auto") -> Loaded | None:
        """Load the checkpoint to continue from, or None to start fresh (which is said on stderr).

        `where`: "auto" is this folder; a path is a checkpoint or a folder of them; None or "" starts fresh.
        A path that is not there, a folder that holds only other things, and one whose checkpoints are all damaged
        raise CheckpointError: a run that was meant to continue must not start over unnoticed.
        """
        if where is None or where == "":
            return None
        folder = self.directory if where == "auto" else Path(where)
        if (folder / _META).is_file():
            return load(folder)
        if where != "auto" and not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder to resume from")
        found = Checkpoints(folder, self.keep)
        path, damaged = found._newest_whole()
        if path is None and damaged:
            raise CheckpointError(f"{folder}: every checkpoint is damaged: {'; '.join(damaged)}")
        for message in damaged:
            warnings.warn(f"damaged checkpoint passed over: {message}", stacklevel=2)
        if path is not None:
            return load(path, verify=False)  # verified a moment ago
        visible = sorted(item.name for item in folder.iterdir() if item.name[0] != ".") if folder.is_dir() else []
        if visible:
            raise CheckpointError(f"{folder}: no checkpoint here, only {', '.join(visible[:5])}")
        print(f"{folder}: no checkpoint yet, starting fresh", file=sys.stderr, flush=True)
        return None

    def _newest_whole(self) -> tuple[Path | None, list[str]]:
        damaged = []
        # Without a readable meta.json it may have been the newest: look there first, so that passing it over is said.
        items = sorted(self._list(), key=lambda item: (item.sequence or math.inf, item.step), reverse=True)
        for item in items:
            try:
                _verified_meta(item.path)
                return item.path, damaged
            except CheckpointError as error:
                damaged.append(str(error))
        return None, damaged

    def _list(self) -> list[_Item]:
        items = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _FOLDER.fullmatch(path.name)
            if match and path.is_dir():
                try:
                    sequence = int(json.loads((path / _META).read_text())["sequence"])
                except (OSError, ValueError, KeyError, TypeError):
                    sequence = None
                items.append(_Item(path, int(match[1]), sequence))
        return items

    def _free_name(self, step: int) -> Path:
        # Replacing a folder takes two renames, and a kill between them would lose it: the new one gets a free name,
        # and the old one goes in the pruning.
        path = self.directory / f"step_{step:08d}"
        copy = 2
        while path.exists():
            path = self.directory / f"step_{step:08d}.{copy}"
            copy += 1
        return path

    def _pointer(self, name: str) -> str | None:
        try:
            return (self.directory / name).read_text().strip()
        except OSError:
            return None

    def _prune(self, newest: Path) -> None:
        items = sorted(self._list(), key=lambda item: (item.sequence or 0, item.step), reverse=True)
        protected = {newest.name, self._pointer("best")}
        step = int(_FOLDER.fullmatch(newest.name)[1])
        superseded = {item.path.name for item in items if item.step == step} - protected
        kept = [item for item in items if item.path.name not in superseded][: self.keep]
        for item in items:
            if item not in kept and item.path.name not in protected:
                # Renamed first: a kill in the middle of the removal leaves no half checkpoint under its name.
                doomed = self.directory / f".{item.path.name}.removed.tmp"
                item.path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove what killed saves left; we hold the lock, so nobody is writing them."""
        for path in self.directory.glob(".*.tmp"):
            if path.name.startswith((".step_", ".last.", ".best.")):
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class _Item:
    path: Path
    step: int
    sequence: int | None  # the how-manieth save; None where meta.json cannot be read


def resume(where: str | os.PathLike | None, directory: str | os.PathLike | None = None) -> Loaded | None:
    """`Checkpoints(directory).resume(where)`; without a directory, `where` must be a path or None."""
    if where == "auto" and directory is None:
        raise ValueError("resume 'auto' needs the run's checkpoint directory")
    return Checkpoints(directory or where or ".").resume(where)


def load(path: str | os.PathLike, verify: bool = True) -> Loaded:
    """Load one checkpoint folder onto the CPU, after checking the SHA-256 of every file."""
    path = Path(path)
    meta = _verified_meta(path) if verify else _read_meta(path)
    rest = load_torch(path / _STATE)
    model = {}
    for name in meta["models"]:
        model[name] = dict(load_tensors(path / f"{name}.safetensors"))
        model[name].update(restored(rest["extra"].get(name, {})))
    return Loaded(path, meta["step"], model, restored(rest["state"]), meta)


def load_weights(path: str | os.PathLike, averaged: bool = True) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(metadata, tensors, path) of a run's best checkpoint, else its newest, or of a checkpoint's folder.

    `averaged` prefers the EMA's tensors. ValueError when the folder holds no checkpoint.
    """
    path = Path(path)
    if not (path / "meta.json").is_file():
        inside = path / "checkpoints"
        store = Checkpoints(inside if inside.is_dir() else path)
        chosen = store.best() or store.latest()
        if chosen is None:
            raise ValueError(f"{path}: there is no checkpoint in this folder")
        path = chosen
    loaded = load(path)
    return loaded.metadata, loaded.model["ema" if averaged and "ema" in loaded.model else "model"], str(path)


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / _META).read_text())
    except OSError as error:
        raise CheckpointError(f"{path / _META}: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path / _META}: not JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        found = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
        raise CheckpointError(f"{path / _META}: expected schema {SCHEMA}, got {found!r}")
    return meta


def _verified_meta(path: Path) -> dict[str, Any]:
    meta = _read_meta(path)
    for name, expected in meta["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        size = file.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{file}: {size} bytes, expected {expected['size']}")
        found = sha256(file)
        if found != expected["sha256"]:
            raise CheckpointError(f"{file}: SHA-256 is {found}, expected {expected['sha256']}")
    return meta


# -------------------------------------------------------------------------------------------------- random state


def rng_state() -> dict[str, Any]:
    """The states of python's, numpy's and torch's random generators, of every CUDA device too if CUDA is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set what `rng_state` returned. States of CUDA devices that this machine lacks are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for index, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu(), index)


# -------------------------------------------------------------------------------------------------------- stopping


ASK_SECONDS = 1.0  # about how often several processes ask each other whether to stop
ASK_STEPS = 10  # and after how many steps at the latest

# A hangup is a closed terminal or a lost connection.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(SystemExit):
    """A run that a signal ended, after it saved: the program leaves with the status that shells give such an end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class StopSignal:
    """Within the block, SIGTERM, SIGHUP and the first Ctrl-C only set `requested`; the loop then saves and leaves.

    A second Ctrl-C interrupts as usual. In a thread other than the main one, where Python cannot catch signals,
    `requested` stays False. Signals reach the processes of a `world` at different steps: each calls `agreed` once per
    step, so that all stop at one. Afterwards `raise Stopped(number)` says to whoever started the run that it ended.
    """

    def __init__(self, world: World | None = None) -> None:
        self.requested = False
        self.signal: str | None = None
        self.world = world
        self._previous: dict[int, Any] = {}
        self._steps, self._due, self._clock = 0, 1, time.perf_counter()

    def agreed(self) -> bool:
        """Whether any process was told to stop: the same answer on all of them, if all call it after every step.

        Asking costs an exchange, so it happens about every second: after each step where steps are slow, since a
        launcher grants little time between SIGTERM and SIGKILL.
        """
        if self.world is None or self.world.size == 1:
            return self.requested
        self._steps += 1
        if self._steps < self._due:
            return False
        pace = (time.perf_counter() - self._clock) / self._steps
        # Every process must ask at the same step, so all go by the time that the first one measured.
        question = torch.tensor([float(self.requested), pace if self.world.is_main else 0.0], dtype=torch.float64)
        told, pace = self.world.sum(question).tolist()
        self._due = min(max(int(ASK_SECONDS / max(pace, 1e-9)), 1), ASK_STEPS)
        self._steps, self._clock = 0, time.perf_counter()
        return told > 0

    def number(self) -> int | None:
        """The number of the signal that any process got, None if none did. Call it on every process."""
        own = signal.Signals[self.signal].value if self.signal else 0
        return max(self.world.gather(own) if self.world else [own]) or None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.signal = signal.Signals(number).name


def ignore_stop_signals(*_: object) -> None:
    """For a data loader's worker (`worker_init_fn`): a signal to the whole group of processes must not end it.

    The process that trains needs its workers until it has saved; they leave when it does, or when it dies.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
