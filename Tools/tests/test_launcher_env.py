"""Environments: made once, shared, re-used offline, rebuilt when broken, never left half-made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dlx import env
from dlx.task import TaskError, discover


def stamp(folder: Path) -> dict:
    return json.loads((folder / env.STAMP).read_text())


def test_made_once_from_the_pins_and_re_used(tree):
    tree.task(requirements=tree.wheel("tiny"))
    first = tree.dlx("run", "Alpha", "train")
    assert first.returncode == 0, first.stdout
    assert "making the environment fake-" in first.stdout and "package 1: tiny" in first.stdout
    folder = tree.env_folder()
    assert stamp(folder)["pins"][0].startswith("tiny @ file://") and stamp(folder)["megabytes"] > 1
    again = tree.dlx("run", "Alpha", "train", PATH="/usr/bin:/bin")
    assert again.stdout.strip() == str(tree.root)
    os.unlink(tree.root.parent / "tiny-1.0-py3-none-any.whl")  # re-use needs no source of packages
    assert tree.dlx("run", "Alpha", "train").returncode == 0


def test_a_broken_environment_is_made_again(tree):
    tree.task()
    assert tree.dlx("env", "make", "Alpha").returncode == 0
    folder = tree.env_folder()
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/gone/python3")
    done = tree.dlx("run", "Alpha", "train")
    assert done.returncode == 0 and "is broken or was left half-made" in done.stdout
    (folder / env.STAMP).unlink()
    assert tree.dlx("run", "Alpha", "train").returncode == 0 and (folder / env.STAMP).exists()


def test_failure_shows_pips_log_and_leaves_nothing(tree):
    tree.task(requirements="no-such-package-exists==9.9\n")
    done = tree.dlx("run", "Alpha", "train")
    assert done.returncode == 2
    assert "`pip install` failed with status 1" in done.stdout
    assert "No matching distribution found for no-such-package-exists==9.9" in done.stdout
    assert "Traceback" not in done.stdout
    folder = tree.env_folder()
    assert not folder.exists() and folder.with_name(folder.name + ".log").read_text()


def test_failure_leaves_out_pips_retries(tree):
    """The index is a port where nobody listens."""
    tree.task(requirements="no-such-package-exists==9.9\n")
    offline = {"PIP_NO_INDEX": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    done = tree.dlx("run", "Alpha", "train", **offline)
    assert "No matching distribution found" in done.stdout and "Retrying" not in done.stdout
    folder = tree.env_folder()
    assert "Retrying" in folder.with_name(folder.name + ".log").read_text()


def test_two_launchers_at_once_make_it_once(tree):
    tree.task(requirements=tree.wheel("tiny"))
    words = tree.command("run", "Alpha", "train")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(words, env=tree.environment(), cwd=tree.root, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "".join(outputs).count("making the environment") == 1
    assert "".join(outputs).count("waiting for it") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_while_making(tree, number):
    """kill -9 leaves a folder without a stamp, which is made again; what can be caught leaves nothing."""
    tree.task()
    folder = tree.env_folder()
    process = subprocess.Popen(tree.command("env", "make", "Alpha"), env=tree.environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (folder / "bin").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(20)
    assert folder.exists() == (number == signal.SIGKILL)
    assert not (folder / env.STAMP).exists()
    done = tree.dlx("run", "Alpha", "train")
    assert done.returncode == 0, done.stdout
    assert ("left half-made" in done.stdout) == (number == signal.SIGKILL)


def test_the_folder_is_named_after_the_pins(tree):
    tree.task(requirements="One==1.0  # why\n\ntwo_x == 2\n")
    alpha = discover(tree.root)[0]
    before = env.for_task(alpha)
    assert before.pins == ("one==1.0", "two-x==2")
    tree.write("PyTorch/Area/Alpha/requirements.txt", "two-X==2\none==1.0\n")
    assert env.for_task(alpha).folder == before.folder  # the same pins in other words
    tree.write("PyTorch/Area/Alpha/requirements.txt", "two-x==2\none==1.1\n")
    assert env.for_task(alpha).folder != before.folder


def test_a_group_shares_the_union_and_isolated_does_not(tree):
    tree.task("PyTorch/Area/Alpha", requirements="one==1\n")
    tree.task("PyTorch/Area/Beta", requirements="one==1\ntwo==2; sys_platform == 'linux'\n")
    tree.task("Tools", kind='"library"', package="dlx")
    tools, alpha, beta = discover(tree.root)
    assert env.for_task(alpha) == env.for_task(beta) == env.for_task(tools)
    assert env.for_task(alpha).pins == ("one==1", "two==2; sys_platform == 'linux'")
    alone = env.for_task(alpha, isolated=True)
    assert alone.pins == ("one==1",) and alone.folder.name.startswith("alpha-")


def test_disagreeing_pins_name_both_files(tree):
    tree.task("PyTorch/Area/Alpha", requirements="one==1\n")
    tree.task("PyTorch/Area/Beta", requirements="one==2\n")
    with pytest.raises(
        TaskError, match=r"disagree: .*Alpha/requirements.txt has 'one==1', .*Beta/requirements.txt has"
    ):
        env.for_task(discover(tree.root)[0])


def test_pip_options_are_refused(tree):
    tree.task(requirements="one==1\n--index-url https://example.org\n")
    with pytest.raises(TaskError, match="line 2: '--index-url"):
        env.for_task(discover(tree.root)[0])


def test_list_path_and_prune(tree):
    tree.task()
    assert "not made yet" in tree.dlx("env", "list").stdout
    made = Path(tree.dlx("env", "make").stdout.splitlines()[-1])
    assert made == tree.env_folder() and made.is_dir()
    assert "MB, made" in tree.dlx("env", "list").stdout
    old = made.with_name("fake-0123456789ab")
    shutil.copytree(made, old, symlinks=True)
    bystander = tree.home / "envs" / "notes"
    bystander.mkdir()
    assert tree.dlx("env", "prune", "--dry-run").stdout == f"would remove {old}\n" and old.exists()
    assert tree.dlx("env", "prune").stdout == f"removed {old}\n" and not old.exists() and made.exists()
    tree.dlx("env", "prune", "--all")
    assert not made.exists() and bystander.exists()
