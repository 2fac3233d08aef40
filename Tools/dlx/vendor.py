"""Take one task away: a folder that works alone, with `dlx` and the launcher in it."""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
import tempfile
from pathlib import Path

from dlx.task import Task, ignored

# Next to the task and Tools; what a tree lacks is left out.
ROOT_FILES = (
    "dlx", "LICENSE", "pyproject.toml", ".gitignore", ".dockerignore", "hubconf.py", "docs/data.md", "docs/hub.md",
)  # fmt: skip

README = """# {last}

{summary}

This folder was taken out of a larger repository with `./dlx copy {name}` and works alone:

| path | what it is |
|---|---|
| [{name}]({name}/README.md) | the task: model, recipes, tests; start with its README |
| `Tools` | the package `dlx` that the task uses |
| `dlx` | the launcher |
{documents}
It needs Python 3.11 or newer. The first call makes the environment.

```bash
{quickstart}./dlx test
```

`./dlx run {last} VERB -- ...` runs the other verbs: {verbs}.
In an environment of your own: `pip install -r {name}/requirements.txt ./Tools`.
The licence is in LICENSE; keep it with the code.
"""


def copy(task: Task, destination: Path) -> Path:
    """Write the task, Tools, the launcher and a README of its own to `destination`, which must be empty or not exist.

    Files that git ignores stay behind. Nothing is left there when the copy fails.
    """
    destination = destination.absolute()
    if task.kind != "task":
        raise ValueError(f"{task.name} is not a task; it goes along with every copy")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder; nothing was copied")
    if destination.resolve().is_relative_to(task.root.resolve()):
        raise ValueError(f"{destination} lies inside {task.root}, the repository to copy from; choose a place outside")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as scratch:
        for file in listing(task.root):
            inside = any(file.is_relative_to(part) for part in (Path(task.name), Path("Tools")))
            if inside or file.as_posix() in ROOT_FILES:
                target = Path(scratch) / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(task.root / file, target, follow_symlinks=False)
        (Path(scratch) / "README.md").write_text(_readme(task))
        destination.mkdir(exist_ok=True)  # an empty one is kept: the user may be standing in it
        for item in Path(scratch).iterdir():
            item.rename(destination / item.name)
    return destination


def _readme(task: Task) -> str:
    last = task.name.rsplit("/", 1)[-1]
    quickstart = "./dlx quickstart\n" if "quickstart" in task.verbs else ""
    verbs = ", ".join(f"`{verb}`" for verb in task.verbs)
    texts = {"docs/data.md": "where data and weights come from", "docs/hub.md": "the models through torch.hub"}
    rows = [f"| [{name}]({name}) | {text} |\n" for name, text in texts.items() if (task.root / name).is_file()]
    parts = {"verbs": verbs, "quickstart": quickstart, "documents": "".join(rows)}
    return README.format(last=last, name=task.name, summary=task.summary, **parts)


def listing(root: Path) -> list[Path]:
    """The files of the repository that git does not ignore, relative to `root`.

    Outside a git work tree (a release archive, a copy) the simple patterns of .gitignore are applied by name.
    """
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            files = {Path(name) for name in done.stdout.decode().split("\0") if name}
            return sorted(file for file in files if (root / file).is_symlink() or (root / file).is_file())
    left_out = ignored(root)
    found, folders = [], [root]
    while folders:
        for entry in folders.pop().iterdir():
            if any(fnmatch.fnmatch(entry.name, pattern) for pattern in left_out):
                continue
            if entry.is_dir() and not entry.is_symlink():
                folders.append(entry)
            else:
                found.append(entry.relative_to(root))
    return sorted(found)
