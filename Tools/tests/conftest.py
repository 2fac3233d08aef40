"""A tiny repository with fake tasks, for the tests of the launcher. Nothing here is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Tree:
    """A repository in a temporary folder: the real launcher, and tasks that the test writes."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.root, self.home = folder, home
        shutil.copytree(ROOT / "Tools" / "dlx", folder / "Tools" / "dlx", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("dlx", "LICENSE", "pyproject.toml", ".gitignore"):
            shutil.copy2(ROOT / name, folder / name)

    def task(self, name: str = "PyTorch/Area/Alpha", *, requirements: str = "", **keys: str) -> Path:
        """Write a task with the verb `train` = PACKAGE.train, which prints what it sees. `keys` are raw TOML lines."""
        folder = self.root / name
        package = keys.pop("package", f'"{folder.name.lower()}"').strip('"')
        lines = {
            "name": f'"{name}"', "framework": f'"{name.split("/")[0]}"', "summary": f'"Does {folder.name}."',
            "package": f'"{package}"', "state": '"complete"', "env": '"fake"',
        } | {key: value for key, value in keys.items() if key not in ("verbs", "test")}  # fmt: skip
        text = "\n".join(f"{key} = {value}" for key, value in lines.items())
        verbs = keys.get("verbs", f'train = "{package}.train"')
        text += f"\n[verbs]\n{verbs}\n"
        text += f"[test]\n{keys['test']}\n" if "test" in keys else ""
        self.write(f"{name}/task.toml", text)
        self.write(f"{name}/requirements.txt", requirements)
        self.write(f"{name}/README.md", f"# {folder.name}\n")
        if not (folder / package / "__init__.py").exists():  # the real dlx keeps its own
            self.write(f"{name}/{package}/__init__.py", "")
        self.write(f"{name}/{package}/train.py", "import os, sys\nprint(os.getcwd(), *sys.argv[1:], sep='|')\n")
        return folder

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def environment(self, **extra: str) -> dict[str, str]:
        own = {"DLX_HOME": str(self.home), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DLX_", "PYTHON", "PIP_"))}
        return clean | own | extra

    def command(self, *words: str) -> list[str]:
        return [sys.executable, str(self.root / "dlx"), *words]

    def dlx(self, *words: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run the launcher; standard output and error come together in `stdout`."""
        return subprocess.run(
            self.command(*words), cwd=cwd or self.root, env=self.environment(**extra), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False,
        )  # fmt: skip

    def env_folder(self, task: str = "Alpha") -> Path:
        return Path(self.dlx("env", "path", task).stdout.strip())

    def wheel(self, name: str, version: str = "1.0") -> str:
        """A requirement for a package that is made on the spot; it holds one module."""
        path = self.root.parent / f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}.py", f"version = {version!r}\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        return f"{name} @ {path.as_uri()}\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty repository with a cache of its own."""
    (tmp_path / "repo").mkdir()
    return Tree(tmp_path / "repo", tmp_path / "home")


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the environment "fake" with no pins is made, and sees the packages of this interpreter."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "repo").mkdir()
    tree = Tree(folder / "repo", folder / "home")
    tree.task()
    made = tree.dlx("env", "make", "Alpha")
    assert made.returncode == 0, made.stdout
    packages = next(tree.env_folder().glob("lib/python*/site-packages"))
    (packages / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return tree.home


@pytest.fixture
def ready(tmp_path: Path, shared_home: Path) -> Tree:
    """A repository whose tasks' environment is there already and has pytest."""
    (tmp_path / "repo").mkdir()
    return Tree(tmp_path / "repo", shared_home)
