"""One JSON record per run: what ran, on what, and what came out; README tables and reports are made from it.

    record = Record.start(task="PyTorch/Classification/ConvNets", verb="train", config=to_dict(config), seed=1)
    record.curve("train.loss", step, loss)
    record.metric("val.top1", 93.1, "%", goal="MAXIMIZE")
    record.finish().save(output_dir)

A number without its conditions cannot be compared, so the conditions are captured at the start and not asked for.
The name of the host and of the user are left out on purpose: records are committed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .files import atomic_write
from .runlog import new_run_id, strict

__all__ = ["FILE_NAME", "SCHEMA", "Record", "commit", "hardware", "load", "versions"]

SCHEMA = 1
FILE_NAME = "record.json"
_PACKAGES = ("torch", "torchvision", "tensorflow", "keras", "paddle", "mxnet", "dgl", "jax", "numpy", "onnx",
             "onnxruntime", "nvidia-dali-cuda130", "transformers", "triton", "safetensors")  # fmt: skip
_STATUS = ("running", "finished", "stopped", "failed")
# Every key of schema 1 and its type; `load` refuses a record that differs.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "schema": int, "run_id": str, "task": str, "verb": str, "command": str, "status": str, "config": dict,
    "seed": (int, type(None)), "data": dict, "source": (dict, type(None)), "versions": dict, "hardware": dict,
    "started": str, "ended": (str, type(None)), "seconds": (int, float, type(None)), "metrics": dict, "curve": dict,
    "attachments": dict,
}  # fmt: skip


class Record:
    """A run's record while it is being filled, or as read by `load`. The fields are those of the JSON file."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self._clock = time.monotonic()

    @classmethod
    def start(
        cls,
        task: str,
        verb: str,
        config: dict[str, Any],
        *,
        seed: int | None = None,
        data: dict[str, str] | None = None,
        run_id: str | None = None,
    ) -> Record:
        """Capture the command, commit, versions, hardware and time. `data` maps a data set's name to its SHA-256."""
        command = os.environ.get("DLX_COMMAND") or shlex.join([Path(sys.executable).name, *_own_arguments()])
        fields: dict[str, Any] = {
            "schema": SCHEMA, "run_id": run_id or new_run_id(), "task": task, "verb": verb, "command": command,
            "status": "running", "config": strict(config), "seed": seed, "data": dict(data or {}), "source": commit(),
            "versions": versions(), "hardware": hardware(), "started": _now(), "ended": None, "seconds": None,
            "metrics": {}, "curve": {}, "attachments": {},
        }  # fmt: skip
        return cls(fields)

    @property
    def run_id(self) -> str:
        return self.fields["run_id"]

    def metric(self, name: str, value: float, unit: str, goal: str | None = None) -> None:
        """Set a result. `goal` is MINIMIZE, MAXIMIZE or None (a plain fact such as a parameter count)."""
        if goal not in (None, "MINIMIZE", "MAXIMIZE"):
            raise ValueError(f"goal of {name!r} must be MINIMIZE or MAXIMIZE, got {goal!r}")
        if not isinstance(unit, str):
            raise ValueError(f"unit of {name!r} must be text ('' for a ratio), got {unit!r}")
        number = strict(value)
        if isinstance(number, bool) or not (isinstance(number, int | float) or number in _NON_FINITE):
            raise ValueError(f"metric {name!r} must be a number, got {value!r}")
        self.fields["metrics"][name] = {"value": number, "unit": unit, "goal": goal}

    def curve(self, name: str, step: float, value: float) -> None:
        """Append the point (step, value) to the curve `name`."""
        self.fields["curve"].setdefault(name, []).append([strict(step), strict(value)])

    def attach(self, key: str, value: Any) -> None:
        """Keep any JSON value; the report knows confusion, samples, audio and files."""
        self.fields["attachments"][key] = strict(value)

    def finish(self, status: str = "finished") -> Record:
        """Set the end time and the status: finished, stopped (by a signal) or failed."""
        if status not in _STATUS:
            raise ValueError(f"status must be one of {', '.join(_STATUS)}, got {status!r}")
        self.fields.update(status=status, ended=_now(), seconds=round(time.monotonic() - self._clock, 3))
        return self

    def value(self, name: str) -> float:
        """The value of a metric; KeyError with the names there are."""
        if name not in self.fields["metrics"]:
            raise KeyError(f"no metric {name!r}; there are {', '.join(self.fields['metrics']) or 'none'}")
        return float(self.fields["metrics"][name]["value"])

    def save(self, path: str | os.PathLike) -> Path:
        """Write the record to a file, or as record.json into a folder. Returns the file's path."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() or path.suffix != ".json" else path
        _validate(self.fields, str(path))
        atomic_write(path, json.dumps(self.fields, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        return path


def load(path: str | os.PathLike) -> Record:
    """Read and check a record (a file, or a run's folder). ValueError names the file, the key and what is wrong."""
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such run record") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a run record: {error}") from None
    _validate(fields, str(path))
    return Record(fields)


_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NON_FINITE


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not strict JSON")


def _validate(fields: Any, where: str) -> None:
    def check(holds: bool, key: str, message: str) -> None:
        if not holds:
            raise ValueError(f"{where}: {key}: {message}")

    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(fields).__name__}")
    check(fields.get("schema") == SCHEMA, "schema", f"expected {SCHEMA}, got {fields.get('schema')!r}")
    for key, kind in _TYPES.items():
        check(key in fields, key, "missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join("null" if item is type(None) else item.__name__ for item in kinds)
        found = type(fields[key]).__name__
        check(isinstance(fields[key], kind), key, f"expected {names}, got {found} {fields[key]!r:.60}")
    unknown = sorted(set(fields) - set(_TYPES))
    check(not unknown, ", ".join(unknown), "unknown key")
    check(fields["status"] in _STATUS, "status", f"expected one of {', '.join(_STATUS)}, got {fields['status']!r}")
    for name, metric in fields["metrics"].items():
        key = f"metrics.{name}"
        check(isinstance(metric, dict) and set(metric) == {"value", "unit", "goal"}, key, "expected value, unit, goal")
        check(_is_number(metric["value"]), key, f"value must be a number, got {metric['value']!r}")
        check(isinstance(metric["unit"], str), key, f"unit must be text, got {metric['unit']!r}")
        check(metric["goal"] in (None, "MINIMIZE", "MAXIMIZE"), key, f"bad goal {metric['goal']!r}")
    for name, points in fields["curve"].items():
        whole = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
        check(whole and all(_is_number(x) for p in points for x in p), f"curve.{name}", "expected [[step, value], ...]")


# ------------------------------------------------------------------------------------------------------- conditions


def versions() -> dict[str, str]:
    """Python and the frameworks that are installed; `cuda` and `cudnn` if torch is loaded and built with them."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds, and other frameworks do without
    if torch is not None:
        found["torch"] = str(torch.__version__)  # the installed package may leave out the build, "+cu130" or "+cpu"
    if torch is not None and getattr(torch.version, "cuda", None):
        found["cuda"] = torch.version.cuda
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory, system, and the GPUs with their driver (an empty list without any)."""
    gpus, driver = _gpus()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus,
        "driver": driver,
    }


def commit(folder: str | os.PathLike | None = None) -> dict[str, Any] | None:
    """{"commit": hash, "dirty": whether tracked files differ from it}, of the repository the code is in; else None.

    A copy of it (an image, a cluster's node) says by $DLX_COMMIT what it was made from: hash, or hash-dirty.
    """
    name, _, dirty = os.environ.get("DLX_COMMIT", "").partition("-")
    if name:
        return {"commit": name, "dirty": dirty == "dirty"}
    folder = Path(folder or os.environ.get("DLX_TASK_DIR") or Path(__file__).parent)

    def git(*arguments: str) -> str:
        # Without optional locks, reading the status does not disturb a commit that runs at the same time.
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        # Code installed into an environment inside somebody's repository does not belong to that repository.
        if not git("ls-files", "--", "."):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [], None
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    gpus = [{"name": name, "memory_gib": _gib(memory)} for name, memory, _ in rows]
    return gpus, rows[0][2] if rows else None


def _gib(mebibytes: str) -> float | None:
    try:
        return round(float(mebibytes) / 1024, 1)
    except ValueError:  # "[N/A]" on systems that share the memory with the CPU
        return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _own_arguments() -> list[str]:
    """sys.argv as one would type it: `-m module` instead of the path of the module's file."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name and spec.name != "__main__":
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return sys.argv


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
