"""Virtual environments, one per group of tasks and set of pins, shared by all clones under $DLX_HOME/envs.

An environment is complete when its stamp is there, and the stamp is written last: whatever dies half-way, the next
launcher finds no stamp and starts afresh. pip's own configuration decides where packages come from.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dlx.files import atomic_write, human_bytes, lock
from dlx.paths import env_dir
from dlx.task import Task, TaskError, discover

STAMP = ".dlx-complete.json"
LOG_TAIL = 30


class EnvError(ValueError):
    """An environment could not be made."""


@dataclass(frozen=True)
class Env:
    """A group's environment, made or not."""

    group: str
    pins: tuple[str, ...]
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")

    def ready(self) -> bool:
        """Whether the stamp is there and the interpreter starts (it does not when the Python below it was removed)."""
        if not (self.folder / STAMP).is_file():
            return False
        try:
            return subprocess.run([self.python, "-I", "-c", ""], capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def for_task(task: Task, isolated: bool = False) -> Env:
    """The environment that a task runs in: its group's, or with `isolated` one of its own."""
    members = [task] if isolated else [other for other in discover(task.root) if other.env == task.env]
    return describe(task.package if isolated else task.env, members)


def groups(root: Path) -> dict[str, Env]:
    """Every environment group of the repository."""
    tasks = discover(root)
    return {name: describe(name, [t for t in tasks if t.env == name]) for name in sorted({t.env for t in tasks})}


def describe(group: str, members: list[Task]) -> Env:
    """The environment for these tasks together: its folder's name carries a hash of pins, Python and platform."""
    pins = merge([task.requirements for task in members if task.requirements.is_file()])
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    key = "\n".join([*pins, version, sys.platform, platform.machine()])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Env(group, tuple(pins), env_dir() / f"{group}-{digest}")


def merge(files: list[Path]) -> list[str]:
    """The union of requirements files, sorted and normalised; TaskError where two files pin one package differently."""
    merged: dict[tuple[str, str], tuple[str, Path]] = {}
    for file in files:
        for number, raw in enumerate(file.read_text().splitlines(), 1):
            line = re.sub(r"(^|\s)#.*", "", raw).strip()
            if not line:
                continue
            match = re.match(r"([A-Za-z0-9][\w.-]*)\s*(.*)", line)
            if line.startswith("-") or match is None:
                raise TaskError(f"{file}: line {number}: {raw!r} is not NAME==VERSION")
            rest, _, marker = match[2].partition(";")
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            rest, marker = rest.strip(), marker.strip()
            rest = f" {rest}" if rest.startswith("@") else "".join(rest.split())
            text = name + rest + (f"; {marker}" if marker else "")
            known, where = merged.setdefault((name, marker), (text, file))
            if known != text:
                raise TaskError(f"pins of one environment disagree: {where} has {known!r}, {file} has {text!r}")
    return sorted(text for text, _ in merged.values())


def ensure(env: Env) -> Env:
    """Make the environment unless it is there and works. Two launchers may call this at once: one makes, one waits."""
    if env.ready():
        return env
    waiting = f"dlx: another process makes {env.folder.name}; waiting for it"
    with lock(env.folder.with_name(env.folder.name + ".lock"), message=waiting):
        if env.ready():
            return env
        if env.folder.exists():
            print(f"dlx: {env.folder} is broken or was left half-made; making it again", flush=True)
            shutil.rmtree(env.folder)
        # A kill and a closed terminal clean up, too.
        numbers = (signal.SIGTERM, signal.SIGHUP)
        previous = [signal.signal(number, lambda received, _: sys.exit(128 + received)) for number in numbers]
        try:
            _make(env)
        except BaseException:
            shutil.rmtree(env.folder, ignore_errors=True)
            raise
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)
    return env


def _make(env: Env) -> None:
    started = time.time()
    print(f"dlx: making the environment {env.folder.name} (once; {len(env.pins)} pinned packages)", flush=True)
    env.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(env.log, "wb") as log:
        _run(env, [sys.executable, "-m", "venv", str(env.folder)], log, "python -m venv")
        if env.pins:
            requirements = env.folder / "requirements.txt"
            requirements.write_text("\n".join(env.pins) + "\n")
            pip = [str(env.python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
            _run(env, [*pip, "-r", str(requirements)], log, "pip install")
    seconds = time.time() - started
    size = sum(f.lstat().st_size for f in env.folder.rglob("*") if f.is_file() and not f.is_symlink())
    stamp = {
        "group": env.group,
        "pins": list(env.pins),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "seconds": round(seconds, 1),
        "megabytes": round(size / 1e6, 1),
    }
    atomic_write(env.folder / STAMP, json.dumps(stamp, indent=2) + "\n")
    print(f"dlx: environment ready in {seconds:.0f} s, {human_bytes(size)}: {env.folder}", flush=True)


def _run(env: Env, command: list[str], log: BinaryIO, what: str) -> None:
    """Run one step with its output in the log and its progress on the screen; EnvError carries the log's tail."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET")}
    variables |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    progress = Progress(env, what)
    tail: deque[str] = deque(maxlen=LOG_TAIL)
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=_die_with_parent,
    )  # fmt: skip
    try:
        rest = b""
        while True:
            if select.select([process.stdout], [], [], 1.0)[0]:
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                log.write(chunk)
                log.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace").rstrip()
                    if not is_retry(text):
                        tail.append(text)
                    progress.line(text)
            progress.tick()
        status = process.wait()
    finally:
        progress.close()
        if process.poll() is None:
            process.kill()
            process.wait()
    if status:
        if rest.strip():
            tail.append(rest.decode(errors="replace").rstrip())
        shown = "\n".join(f"  {line}" for line in tail)
        raise EnvError(
            f"`{what}` failed with status {status} for the environment {env.folder.name}, which was removed.\n"
            f"The last lines of {env.log}:\n{shown}"
        )


class Progress:
    """pip's progress: one line that updates itself on a terminal, a line per step elsewhere."""

    def __init__(self, env: Env, what: str) -> None:
        self.env = env
        self.terminal = sys.stdout.isatty()
        self.started = time.monotonic()
        self.packages = 0
        self.installing = 0
        self.text = what

    def line(self, line: str) -> None:
        """Take one line of pip's output."""
        words = line.split()
        if line.startswith(("Collecting ", "Processing ")):
            self.packages += 1
            self._say(f"package {self.packages}: {_short(words[1])}")
        elif line.strip().startswith("Downloading") and "(" in line:
            size = line[line.rindex("(") :]
            self._say(f"package {self.packages}: {_short(words[1])} {size}", quiet=True)
        elif line.strip().startswith("Building wheel"):
            self._say(line.strip().lower())
        elif line.startswith("Installing collected packages"):
            self.installing = line.count(",") + 1
            self._say(f"installing {self.installing} packages")

    def tick(self) -> None:
        """Redraw; while pip is silent, count what it has installed."""
        if not self.terminal:
            return
        text = self.text
        if self.installing:
            done = len(list(self.env.folder.glob("lib/python*/site-packages/*.dist-info")))
            text = f"installing {min(done, self.installing)}/{self.installing} packages"
        width = shutil.get_terminal_size().columns - 1
        line = f"  {time.monotonic() - self.started:4.0f} s  {text}"
        print(f"\r\x1b[K{line[:width]}", end="", flush=True)

    def close(self) -> None:
        """Clear the updating line."""
        if self.terminal:
            print("\r\x1b[K", end="", flush=True)

    def _say(self, text: str, quiet: bool = False) -> None:
        self.text = text
        if not self.terminal and not quiet:
            print(f"  {time.monotonic() - self.started:4.0f} s  {text}", flush=True)


def _short(requirement: str) -> str:
    """Name and version in what pip prints: a requirement, or the path of a wheel."""
    return re.sub(r"-(py|cp)\d.*\.whl$", "", requirement.split(";")[0].rsplit("/", 1)[-1])


def is_retry(line: str) -> bool:
    """Whether pip says there that it tries again: five long lines per address, before the one that tells the reason."""
    return line.lstrip().startswith("WARNING: Retrying (")


def _die_with_parent() -> None:
    # A killed launcher must not leave a pip behind that writes into the folder its successor is making.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def existing() -> list[tuple[Path, dict | None]]:
    """Every environment folder with its stamp; None for one that is not complete."""
    folders = sorted(p for p in env_dir().glob("*-" + "[0-9a-f]" * 12) if p.is_dir())
    stamps = [folder / STAMP for folder in folders]
    return [(s.parent, json.loads(s.read_text()) if s.is_file() else None) for s in stamps]


def prune(root: Path, everything: bool = False, dry_run: bool = False) -> list[Path]:
    """Remove the environments that this clone's tasks do not use (shared or isolated), or all of them."""
    tasks = discover(root)
    used = {env.folder for env in groups(root).values()} | {for_task(task, isolated=True).folder for task in tasks}
    removed = []
    for folder, _ in existing():
        if everything or folder not in used:
            removed.append(folder)
            if not dry_run:
                with lock(folder.with_name(folder.name + ".lock"), timeout=5):
                    shutil.rmtree(folder)
                    folder.with_name(folder.name + ".log").unlink(missing_ok=True)
    return removed
