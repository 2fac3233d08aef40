"""What continuing a run needs besides its checkpoint: equal settings, its record, and no second run in its folder."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from . import checkpoint as checkpoints
from . import dist, files, runlog
from . import record as records
from .record import Record

ADVICE = "give --resume none or another --output_dir"
# Options that may differ when a run goes on: where and how long it runs, what it writes. data_dir and batch_size count
# in the data and the global batch.
FREE_OPTIONS = {
    "data_dir", "batch_size", "workers", "tolerant", "device", "engine", "epochs", "max_steps", "output_dir", "resume",
    "keep_checkpoints", "save_steps", "evaluate_epochs", "log_every", "tensorboard",
}  # fmt: skip
# A worker process of a killed run holds its lock until it finds out, which takes torch's loader five seconds.
LOCK_SECONDS = 10.0


@contextmanager
def only_run(output: Path, world: dist.World) -> Iterator[None]:
    """Hold the folder of a run. ValueError on every process where another training goes on in it."""
    with ExitStack() as held:
        taken = False
        if world.is_main:
            message = f"{output}: another training runs here, waiting {LOCK_SECONDS:g} s for it to end"
            try:
                held.enter_context(files.lock(output / ".lock", LOCK_SECONDS, message))
            except TimeoutError:
                taken = True
        if world.any(taken):
            raise ValueError(f"another training is running in {output}: stop it, or give another --output_dir")
        yield


def source(resume: str) -> str | None:
    """What `Checkpoints.resume` takes: a run's folder stands for the checkpoints in it."""
    if resume.lower() in ("", "none"):
        return None
    inside = Path(resume) / "checkpoints"
    return str(inside) if resume != "auto" and inside.is_dir() else resume


def warn_of_changes(loaded: checkpoints.Loaded, conditions: dict[str, Any]) -> None:
    """One warning that lists the settings in which this run differs from the one that saved the checkpoint."""
    before = loaded.metadata.get("conditions", {})
    changes = [
        f"{key}: {before[key]} -> {value}"
        for key, value in conditions.items()
        if key in before and before[key] != value
    ]
    if changes:
        warnings.warn(
            f"{loaded.path} was saved with other settings, so this is not the run that it began: "
            f"{'; '.join(changes)}. To start over, {ADVICE}",
            stacklevel=2,
        )


def continue_record(record: Record, output: Path, names: Collection[str]) -> None:
    """Take over what earlier processes of this run found; the curves `names` from the log, which survives a kill."""
    curves: dict[str, dict[int, Any]] = {}
    starts_anew = False
    for entry in runlog.read(output):
        if entry.get("step") == "RUN":
            starts_anew = True
        elif entry.get("step") == [] and "resumed_from" in entry["data"]:
            starts_anew = False
            last = entry["data"]["step"]
            curves = {name: {at: y for at, y in points.items() if at <= last} for name, points in curves.items()}
        elif entry["type"] == "LOG" and isinstance(entry["step"], list) and len(entry["step"]) == 2:
            curves, starts_anew = ({} if starts_anew else curves), False
            for name in (name for name in names if name in entry["data"]):
                curves.setdefault(name, {})[entry["step"][1]] = entry["data"][name]
    record.fields["curve"] = {name: [[at, y] for at, y in sorted(points.items())] for name, points in curves.items()}
    if (output / records.FILE_NAME).is_file():
        earlier = records.load(output).fields
        record.fields["metrics"] = earlier["metrics"] | record.fields["metrics"]
        record.fields["attachments"] = earlier["attachments"] | record.fields["attachments"]
