"""`./dlx copy`: what goes along, what stays, and that the copy works alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlx.vendor import listing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(ready):
    """A repository with two tasks and things that a copy leaves behind."""
    ready.task("PyTorch/Area/Alpha", verbs='quickstart = "alpha.train"')
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", "import alpha.train, dlx\ndef test_good(): pass\n")
    ready.task("PyTorch/Area/Beta")
    ready.task("Tools", kind='"library"', package="dlx")
    ready.write("Tools/tests/test_it.py", "import dlx\ndef test_good(): pass\n")
    ready.write("PyTorch/Area/Alpha/output/record.json", "{}")
    ready.write("PyTorch/Area/Alpha/alpha/__pycache__/x.pyc", "")
    ready.write("docs/design.md", "")
    ready.write("docs/data.md", "# Data\n")
    return ready


@pytest.mark.parametrize("git", [True, False])
def test_the_copy_holds_the_task_alone_and_works(source, tmp_path, git):
    if git:
        subprocess.run(["git", "init", "-q", str(source.root)], check=True)
    done = source.dlx("copy", "Alpha", str(tmp_path / "product"))
    assert done.returncode == 0, done.stdout
    copy = tmp_path / "product"
    names = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert {
        "dlx",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "Tools/dlx/cli.py",
        "PyTorch/Area/Alpha/task.toml",
        "docs/data.md",
    } <= names
    assert not any("Beta" in name or "output" in name or "__pycache__" in name or "design" in name for name in names)
    assert "(docs/data.md)" in (copy / "README.md").read_text() and "hub" not in (copy / "README.md").read_text()
    assert (
        "# Alpha" in (copy / "README.md").read_text()
        and "PyTorch/Area/Alpha/README.md" in (copy / "README.md").read_text()
    )

    def dlx(*words: str) -> str:
        command = [sys.executable, str(copy / "dlx"), *words]
        done = subprocess.run(command, cwd=copy, env=source.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert dlx("quickstart").strip() == str(copy)
    assert dlx("test").splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    assert "Beta" not in dlx("list")
    dlx("readme", "--check")


def test_a_filled_destination_is_refused(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    done = source.dlx("copy", "Alpha", str(tmp_path / "full"))
    assert done.returncode == 2 and "not an empty folder; nothing was copied" in done.stdout
    assert os.listdir(tmp_path / "full") == ["mine"]
    (tmp_path / "link").symlink_to(source.root)
    for inside in (source.root / "Tools" / "copy", source.root / "runs" / "copy", tmp_path / "link" / "copy"):
        done = source.dlx("copy", "Alpha", str(inside))
        assert done.returncode == 2 and "choose a place outside" in done.stdout and not inside.exists()
    assert not (source.root / "runs").exists()


def test_an_empty_folder_is_filled_where_it_stands(source, tmp_path):
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "empty").stat().st_ino
    assert source.dlx("copy", "Alpha", ".", cwd=tmp_path / "empty", DLX_ROOT="").returncode == 0
    assert (tmp_path / "empty").stat().st_ino == before and (tmp_path / "empty" / "dlx").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".empty")]


def test_the_library_alone_is_not_a_task(source, tmp_path):
    assert "is not a task" in source.dlx("copy", "Tools", str(tmp_path / "x")).stdout


def test_listing_follows_git(source):
    subprocess.run(["git", "init", "-q", str(source.root)], check=True)
    source.write(".gitignore", "*.secret\n/docs/\n")
    source.write("PyTorch/Area/Alpha/a.secret", "")
    found = {path.as_posix() for path in listing(source.root)}
    assert "PyTorch/Area/Alpha/a.secret" not in found and "docs/design.md" not in found and "dlx" in found


@pytest.mark.slow
def test_convnets_can_be_taken_away(tmp_path):
    """The real thing: the copy's own tests, but for those that are slow, pass in the copy."""
    if not (ROOT / "PyTorch/Classification/ConvNets/task.toml").exists():
        pytest.skip("this tree holds another task")
    command = [sys.executable, str(ROOT / "dlx"), "copy", "PyTorch/Classification/ConvNets", str(tmp_path / "product")]
    subprocess.run(command, check=True)
    command = [sys.executable, str(tmp_path / "product" / "dlx"), "test", "ConvNets"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
