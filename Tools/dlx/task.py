"""What a task says about itself: task.toml, and finding tasks by name."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dlx.paths import repo_root

VERBS = ("quickstart", "prepare", "train", "evaluate", "infer", "benchmark", "quantize", "export", "serve")
STATES = ("complete", "partial", "planned")
DEFAULT_TASK = "ConvNets"
ALWAYS_IGNORED = (".git", "__pycache__", "*.egg-info", ".venv", "output", "runs")
# torchrun on this machine alone. It would tell its processes the host's name, which need not resolve (containers).
TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
# Key -> (type, required). The tables [verbs] and [test] are read on their own.
KEYS = {
    "name": (str, True),
    "framework": (str, True),
    "summary": (str, True),
    "package": (str, True),
    "state": (str, True),
    "state_note": (str, False),
    "kind": (str, False),
    "env": (str, True),
    "apt": (list, False),
    "verbs": (dict, False),
    "test": (dict, False),
}


class TaskError(ValueError):
    """A task.toml that breaks the contract, or a name that no task has."""


@dataclass(frozen=True)
class Task:
    """One task (or the shared library, kind "library"), as its task.toml says."""

    name: str
    framework: str
    summary: str
    package: str
    state: str
    env: str
    folder: Path
    root: Path
    kind: str = "task"
    state_note: str = ""
    apt: tuple[str, ...] = ()
    verbs: dict[str, str | list[str]] = field(default_factory=dict)
    test_args: tuple[str, ...] = ("tests",)

    @property
    def requirements(self) -> Path:
        return self.folder / "requirements.txt"

    def command(self, verb: str, arguments: Iterable[str], nproc: str | None = None) -> list[str]:
        """The command line of a verb; its `python` is the environment's. TaskError for a verb that the task lacks."""
        if verb not in self.verbs:
            offers = ", ".join(self.verbs) or "none"
            raise TaskError(f"{self.name} has no verb {verb!r}{nearest(verb, self.verbs)}; it has: {offers}")
        entry = self.verbs[verb]
        if isinstance(entry, list):
            if nproc:
                raise TaskError(f"{self.name} {verb}: --nproc is for verbs that are Python modules, this is a command")
            return [word.replace("{task_dir}", str(self.folder)) for word in entry] + list(arguments)
        if nproc and nproc != "1":
            if self.framework not in ("PyTorch", "DGLPyTorch", "CUDA-Optimized"):
                raise TaskError(f"{self.name}: --nproc is for torchrun, which {self.framework} does not use")
            torchrun = [*TORCHRUN, "--nproc-per-node", nproc, "-m"]
            return ["python", "-m", "dlx.entry", *torchrun, "dlx.entry", entry, *arguments]
        return ["python", "-m", "dlx.entry", entry, *arguments]

    def environment(self, env_folder: Path, command: Iterable[str]) -> dict[str, str]:
        """The variables that every verb and test of the task runs with."""
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONSTARTUP")}
        return variables | {
            "PYTHONPATH": f"{self.root / 'Tools'}{os.pathsep}{self.folder}",
            "PYTHONSAFEPATH": "1",  # the user's folder may hold a random.py; it is not Python's
            "PYTHONUNBUFFERED": "1",
            # Threads that wait must not spin: with other work on the machine that costs tens of times what it saves.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "PATH": f"{env_folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "VIRTUAL_ENV": str(env_folder),
            "DLX_ROOT": str(self.root),
            "DLX_TASK": self.name,
            "DLX_TASK_DIR": str(self.folder),
            "DLX_COMMAND": shlex.join(["./dlx", *command]),
        }


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' for the closest name, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f"; did you mean {lowered[found[0]]!r}?" if found else ""


def read(path: Path, root: Path) -> Task:
    """Read one task.toml. TaskError names the file and the key."""
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: not valid TOML: {error}") from None
    for key, value in raw.items():
        if key not in KEYS:
            raise TaskError(f"{path}: unknown key {key!r}{nearest(key, KEYS)}")
        if not isinstance(value, KEYS[key][0]):
            raise TaskError(f"{path}: key {key!r} must be a {KEYS[key][0].__name__}, not {value!r}")
    for key, (_, required) in KEYS.items():
        if required and not raw.get(key):
            raise TaskError(f"{path}: key {key!r} is missing or empty")
    folder = path.parent
    name = folder.relative_to(root).as_posix()
    if raw["name"] != name:
        raise TaskError(f"{path}: key 'name' is {raw['name']!r}, but the folder is {name!r}")
    if raw["state"] not in STATES:
        raise TaskError(f"{path}: key 'state' is {raw['state']!r}, not one of {', '.join(STATES)}")
    if raw["state"] == "partial" and not raw.get("state_note"):
        raise TaskError(f"{path}: key 'state_note' must say what is not complete")
    if raw.get("kind", "library") != "library":
        raise TaskError(f"{path}: key 'kind' is {raw['kind']!r}; leave it out, or 'library'")
    if not raw["package"].isidentifier():
        raise TaskError(f"{path}: key 'package' is {raw['package']!r}, which cannot be imported")
    if not re.fullmatch(r"[a-z0-9_-]+", raw["env"]):
        raise TaskError(f"{path}: key 'env' is {raw['env']!r}; use small letters, digits, - and _")
    verbs = raw.get("verbs", {})
    for verb, entry in verbs.items():
        if verb not in VERBS:
            raise TaskError(f"{path}: key 'verbs.{verb}': not one of {', '.join(VERBS)}{nearest(verb, VERBS)}")
        if not entry or not (isinstance(entry, str) or _is_strings(entry)):
            raise TaskError(f"{path}: key 'verbs.{verb}' must be a module or a list of words, not {entry!r}")
    test = raw.get("test", {})
    for key in test:
        if key != "args":
            raise TaskError(f"{path}: unknown key 'test.{key}'{nearest(key, ['args'])}")
    for key, value in (("apt", raw.get("apt", [])), ("test.args", test.get("args", []))):
        if not _is_strings(value):
            raise TaskError(f"{path}: key {key!r} must be a list of strings, not {value!r}")
    simple = {key: value for key, value in raw.items() if key not in ("apt", "verbs", "test")}
    return Task(
        **simple,
        folder=folder,
        root=root,
        apt=tuple(raw.get("apt", [])),
        verbs={verb: verbs[verb] for verb in VERBS if verb in verbs},
        test_args=tuple(test.get("args", ["tests"])),
    )


def require_root() -> Path:
    """The repository's root, or a TaskError that says how to get there."""
    root = repo_root()
    if root is None:
        raise TaskError(f"{Path.cwd()} is not inside a repository that holds `dlx` and `Tools/dlx`; change to one")
    return root


def discover(root: Path) -> list[Task]:
    """Every task below `root`, and the library, by name; tasks lie one to three folders deep.

    Folders that are hidden or that git ignores hold none, nor does another repository or copy inside this one.
    """
    files = [path for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}/task.toml")]
    skipped = (".*", *ignored(root))

    def ours(path: Path) -> bool:
        parts = path.relative_to(root).parts[:-1]
        if any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in skipped):
            return False
        inner = path.parents[: len(parts)]
        return not any((folder / "dlx").is_file() and (folder / "Tools" / "dlx").is_dir() for folder in inner)

    found = (read(path, root) for path in files if ours(path))
    return sorted(found, key=lambda task: (task.kind == "task", task.name))


def ignored(root: Path) -> list[str]:
    """The names, perhaps with wildcards, that .gitignore has for any folder; its patterns with paths are left out."""
    file = root / ".gitignore"
    lines = [line.strip() for line in file.read_text().splitlines()] if file.is_file() else []
    names = [line.strip("/") for line in lines if line and line[0] not in "#!" and "/" not in line.strip("/")]
    return [*ALWAYS_IGNORED, *names]


def find(name: str, root: Path) -> Task:
    """The task with this full name, package name or last component, in any case; TaskError suggests the nearest.

    Packages are unique and folders are not: SSD is the task whose package is ssd, though another one's folder is SSD.
    """
    tasks = discover(root)
    wanted = name.strip("/").lower()
    exact = [task for task in tasks if wanted in (task.name.lower(), task.package.lower())]
    found = exact or [task for task in tasks if wanted == task.name.rsplit("/", 1)[-1].lower()]
    if len(found) == 1:
        return found[0]
    if found:
        raise TaskError(f"{name!r} can be {' or '.join(task.name for task in found)}; give the full name")
    names = [alias for task in tasks for alias in (task.package, task.name.rsplit("/", 1)[-1], task.name)]
    raise TaskError(f"no task {name!r}{nearest(name, names) or '; `./dlx list` shows them all'}")


def default(root: Path) -> Task:
    """The task that `quickstart` runs when none is named: ConvNets, or the first one where a copy holds another."""
    tasks = [task for task in discover(root) if "quickstart" in task.verbs]
    if not tasks:
        raise TaskError(f"{root}: no task has a quickstart")
    return next((task for task in tasks if task.name.endswith(f"/{DEFAULT_TASK}")), tasks[0])


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
