"""The log of a run: `DLLL {json}` lines in a file, a readable line on the console, TensorBoard if wanted.

The file format is that of NVIDIA's dllogger, so its parsers read it (skip five characters, parse JSON; times are
strings; the keys come in a fixed order). What differs: the JSON is strict, so NaN and infinities are the strings "NaN",
"Infinity" and "-Infinity"; each line is flushed, so a killed run keeps its log; a file that exists is continued; and a
RUN line at the start carries the run id that the record has too.

    log = RunLog(output_dir)
    log.metadata("train.loss", goal="MINIMIZE", stage="TRAIN", format=":.3f")
    log.parameter({"batch_size": 64})
    log.log((epoch, iteration), {"train.loss": 0.52})
    log.log((), {"val.top1": 91.2})
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["FILE_NAME", "RunLog", "new_run_id", "read", "strict"]

T = TypeVar("T")
Step = tuple[int, ...] | list[int] | int | str
FILE_NAME = "dllogger.json"
PREFIX = "DLLL "
_STEP_NAMES = ("Epoch", "Iteration", "Validation Iteration")


class RunLog:
    """Writes one run's log to `<output_dir>/dllogger.json`, the console and (with `tensorboard`) `<output_dir>/tb`.

    With `enabled=False` (every rank but 0) nothing is written anywhere and no folder is made.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        *,
        console: bool = True,
        tensorboard: bool = False,
        enabled: bool = True,
        run_id: str | None = None,
    ) -> None:
        self.path = Path(output_dir) / FILE_NAME
        self.enabled = enabled
        self.run_id = run_id or new_run_id()
        self._console = console and enabled
        self._started = time.time()
        self._metadata: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()
        self._bar: Any = None
        self._file: Any = None
        self._board: Any = None
        self._board_step = 0
        if not enabled:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        resumed = _end_with_newline(self.path)
        self._file = open(self.path, "a", encoding="utf-8")
        if tensorboard:
            self._board = _event_writer(self.path.parent / "tb")
        self._write({"type": "LOG", "step": "RUN", "data": {"run_id": self.run_id, "resumed": resumed}})

    def parameter(self, values: dict[str, Any]) -> None:
        """Log the configuration (step "PARAMETER")."""
        self.log("PARAMETER", values)

    def metadata(
        self,
        metric: str,
        *,
        unit: str | None = None,
        goal: str | None = None,
        stage: str | None = None,
        format: str | None = None,
    ) -> None:
        """Describe a metric once: unit, goal MINIMIZE or MAXIMIZE, stage TRAIN, VAL or TEST, console format `:.3f`."""
        if goal not in (None, "MINIMIZE", "MAXIMIZE"):
            raise ValueError(f"goal of {metric!r} must be MINIMIZE or MAXIMIZE, got {goal!r}")
        if stage not in (None, "TRAIN", "VAL", "TEST"):
            raise ValueError(f"stage of {metric!r} must be TRAIN, VAL or TEST, got {stage!r}")
        if format is not None:
            _format(1.0, format, metric)  # a bad format fails here and not in the middle of training
        pairs = (("unit", unit), ("GOAL", goal), ("STAGE", stage), ("format", format))
        described = {key: value for key, value in pairs if value is not None}
        self._metadata[metric] = described
        if self._file is not None:
            self._write({"type": "METADATA", "metric": metric, "metadata": described})

    def log(self, step: Step, data: dict[str, Any]) -> None:
        """Log `data` at `step`: (epoch,), (epoch, iteration), (epoch, iteration, validation iteration), () or a word.

        Iterations count from the start of the run, not of the epoch, so that curves have one rising axis.
        Values are numbers (also numpy or one-element tensors), strings, or JSON-ready lists and dicts.
        """
        if self._file is None:
            return
        step = _checked_step(step)
        data = {str(key): _to_plain(value) for key, value in data.items()}
        for key, value in data.items():
            if isinstance(value, float) and not math.isfinite(value) and key not in self._warned:
                self._warned.add(key)
                warnings.warn(f"{key} is {value} at step {_step_text(step)!r}; logged as text", stacklevel=2)
        now = self._write({"type": "LOG", "step": step, "data": data})
        if self._console:
            self._print(f"DLL {now} - {self._console_text(step, data)}")
        if self._board is not None:
            self._to_board(step, data)

    def progress(self, iterable: Iterable[T], total: int | None = None, desc: str | None = None) -> Iterator[T]:
        """Iterate; on a terminal a progress bar shows how far, and log lines appear above it."""
        if not (self._console and sys.stderr.isatty()):
            yield from iterable
            return
        from tqdm import tqdm

        outer, self._bar = self._bar, tqdm(iterable, total=total, desc=desc, leave=False, dynamic_ncols=True)
        try:
            yield from self._bar
        finally:
            self._bar.close()
            self._bar = outer

    def flush(self) -> None:
        """Hand everything to the operating system (each line already is; this is for the TensorBoard sink)."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Close the sinks. Logging after that writes nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> str:
        now = time.time()
        stamp, elapsed = str(now), str(now - self._started)
        local = str(datetime.fromtimestamp(now))
        # The order of the keys differs between the two kinds in dllogger too.
        if record["type"] == "LOG":
            head = {"timestamp": stamp, "datetime": local, "elapsedtime": elapsed}
        else:
            head = {"timestamp": stamp, "elapsedtime": elapsed, "datetime": local}
        self._file.write(PREFIX + json.dumps(strict({**head, **record}), allow_nan=False) + "\n")
        self._file.flush()
        return local

    def _console_text(self, step: Any, data: dict[str, Any]) -> str:
        parts = [_step_text(step)]
        for key, value in data.items():
            described = self._metadata.get(key, {})
            text = _format(value, described.get("format"), key)
            parts.append(f"{key} : {text} {described.get('unit') or ''}".rstrip())
        return " ".join(part for part in parts if part)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def _to_board(self, step: Any, data: dict[str, Any]) -> None:
        # Scalars of one tag need one rising axis: the iteration if there is one, else the last that was seen.
        if isinstance(step, list) and len(step) >= 2:
            self._board_step = max(self._board_step, step[1])
        for key, value in data.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            at = step[0] if isinstance(step, list) and len(step) == 1 else self._board_step
            self._board.add_scalar(key, value, at)


def read(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yield the records of a log file (or of the one in a run's folder); a line cut off by a crash is left out.

    The strings "NaN", "Infinity" and "-Infinity" in `data` become floats again. A damaged line that is not the last
    raises ValueError with its number.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            if not line.startswith(PREFIX):
                raise ValueError("does not start with 'DLLL '")
            record = json.loads(line[len(PREFIX) :])
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}:{number}: not a log line: {error}") from None
        if record.get("type") == "LOG" and isinstance(record.get("data"), dict):
            record["data"] = {key: _from_text(value) for key, value in record["data"].items()}
        yield record


def new_run_id() -> str:
    """A name for one run: time to the second and six random digits, so that names sort by time."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def strict(value: Any) -> Any:
    """`value` in types that strict JSON has: non-finite floats as text, numpy and tensor scalars as numbers."""
    value = _to_plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return value


# ----------------------------------------------------------------------------------------------------------- values


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # Subclasses (numpy.float64, an IntEnum) print in their own way.
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors of every framework
        return _to_plain(value.tolist())
    if hasattr(value, "numpy"):
        return _to_plain(value.numpy().tolist())
    return str(value)


def _from_text(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _format(value: Any, specification: str | None, metric: str) -> str:
    """`specification` is a format like `:.3f` or `{:.3f}` (both are in use) or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if specification is None:
        return f"{value:.5g}" if isinstance(value, float) else str(value)
    pattern = specification if "{" in specification else "{" + specification + "}"
    try:
        return pattern.format(value)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"format of {metric!r}: {specification!r} cannot print a number: {error}") from None


def _checked_step(step: Step) -> list[int] | str:
    if isinstance(step, str):
        return step
    numbers = list(step) if isinstance(step, tuple | list) else [step]
    if len(numbers) > 3 or any(isinstance(n, bool) or not hasattr(n, "__index__") for n in numbers):
        raise ValueError(f"step must be up to three integers or a word, got {step!r}")
    return [int(number) for number in numbers]


def _step_text(step: list[int] | str) -> str:
    if isinstance(step, str):
        return step
    if not step:
        return "Summary:"
    return " ".join(f"{name}: {number}" for name, number in zip(_STEP_NAMES, step, strict=False))


def _end_with_newline(path: Path) -> bool:
    """Finish the line that a killed run left half written; whether the file held anything."""
    try:
        with open(path, "rb+") as stream:
            size = stream.seek(0, os.SEEK_END)
            if size == 0:
                return False
            stream.seek(size - 1)
            if stream.read(1) != b"\n":
                # Drop the half line: it is no JSON, and a reader would stumble over it in the middle of the file.
                stream.seek(0)
                stream.truncate(stream.read().rfind(b"\n") + 1)
            return True
    except FileNotFoundError:
        return False


def _event_writer(folder: Path) -> Any:
    """tensorboard's own writer: torch.utils.tensorboard would need torch in every framework's environment."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder.mkdir(parents=True, exist_ok=True)

    class Writer(EventFileWriter):
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            self.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    return Writer(str(folder))
