"""`./dlx build` and system packages, with fake programs in place of the engines and of apt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dlx import container, system
from dlx.task import find


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH with nothing on it but what a test puts there; fakes write their arguments to a log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name: str, status: int = 0, prints: str = "") -> Path:
        log = folder / f"{name}.log"
        (folder / name).write_text(f"#!/bin/sh\necho \"$@\" >> {log}\nprintf '{prints}'\nexit {status}\n")
        (folder / name).chmod(0o755)
        return log

    return add


def test_without_an_engine_the_error_says_what_was_tried(programs, tree):
    tree.task()
    tree.write("PyTorch/Area/Alpha/Dockerfile", "FROM scratch\n")
    programs("docker", status=1)
    done = tree.dlx("build", "Alpha", PATH=os.environ["PATH"])
    assert done.returncode == 2
    assert "docker: installed, but its server does not answer" in done.stdout
    assert "podman: not installed" in done.stdout and "buildah: not installed" in done.stdout


def test_the_first_engine_that_works_is_taken(programs):
    programs("buildah")
    assert container.choose() == "buildah"
    programs("podman")
    assert container.choose() == "podman"
    programs("docker")
    assert container.choose() == "docker"
    assert container.choose("buildah") == "buildah"
    with pytest.raises(container.ContainerError, match="podman: not installed"):
        Path(os.environ["PATH"], "podman").unlink()
        container.choose("podman")


def test_builds_from_the_root_with_the_tasks_dockerfile(programs, tree):
    folder = tree.task()
    tree.write("PyTorch/Area/Alpha/Dockerfile", "FROM scratch\n")
    log = programs("podman")
    words = ["build", "Alpha", "--build-arg", "FROM_IMAGE_NAME=debian:12", "--tag", "my/alpha:1", "--", "--no-cache"]
    done = tree.dlx(*words, PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stdout
    options = "--tag my/alpha:1 --build-arg FROM_IMAGE_NAME=debian:12 --no-cache"
    assert log.read_text().strip() == f"build --file {folder}/Dockerfile {options} {tree.root}"
    programs("podman", status=3)
    done = tree.dlx("build", "Alpha", PATH=os.environ["PATH"])
    assert done.returncode == 3 and "base image" not in done.stdout


def test_a_failed_build_tells_how_to_choose_the_base_image(programs, tree):
    tree.task()
    tree.write("PyTorch/Area/Alpha/Dockerfile", "ARG FROM_IMAGE_NAME=far/away:1\nFROM ${FROM_IMAGE_NAME}\n")
    programs("podman", status=125)
    done = tree.dlx("build", "Alpha", PATH=os.environ["PATH"])
    assert done.returncode == 125
    assert "base image far/away:1 could not be pulled" in done.stdout
    assert "./dlx build Alpha --build-arg FROM_IMAGE_NAME=IMAGE" in done.stdout
    programs("podman")
    assert "base image" not in tree.dlx("build", "Alpha", PATH=os.environ["PATH"]).stdout


def test_calls_that_cannot_be(tree):
    tree.task()
    task = find("Alpha", tree.root)
    with pytest.raises(container.ContainerError, match="Alpha has no Dockerfile"):
        container.command(task, "podman")
    tree.write("PyTorch/Area/Alpha/Dockerfile", "FROM scratch\n")
    with pytest.raises(container.ContainerError, match="must be NAME=VALUE"):
        container.command(task, "podman", build_args=["NAME"])
    assert container.command(task, "buildah")[:5] == ["buildah", "build", "--layers", "--isolation", "chroot"]
    assert "dlx/alpha:latest" in container.command(task, "docker")


def test_missing_system_packages_without_root(programs, monkeypatch):
    programs("dpkg-query", prints="there install ok installed\\nhalf deinstall ok config-files\\n")
    apt = programs("apt-get")
    monkeypatch.setattr(system, "is_debian_like", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert system.missing(("there", "half", "absent")) == ["half", "absent"]
    with pytest.raises(system.SystemPackageError) as error:
        system.ensure(("there", "absent"), "A/B")
    wanted = "  sudo apt-get update && sudo apt-get install -y --no-install-recommends absent"
    assert str(error.value).splitlines()[-1] == wanted
    assert not apt.exists()
    system.ensure(("there",), "A/B")


def test_missing_system_packages_as_root(programs, monkeypatch, capsys):
    programs("dpkg-query")
    apt = programs("apt-get")
    monkeypatch.setattr(system, "is_debian_like", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    system.ensure(("absent",), "A/B")
    assert apt.read_text().splitlines() == ["update", "install -y --no-install-recommends absent"]
    assert "apt-get install -y --no-install-recommends absent" in capsys.readouterr().out
    programs("apt-get", status=100, prints="E: no such package")
    with pytest.raises(system.SystemPackageError, match="failed with status 100:\n  E: no such package"):
        system.ensure(("absent",), "A/B")


def test_other_systems_are_told_and_can_go_on(programs, monkeypatch, tmp_path):
    monkeypatch.setattr(system, "is_debian_like", lambda: False)
    with pytest.raises(system.SystemPackageError, match="DLX_SKIP_APT=1"):
        system.ensure(("sox",), "A/B")
    monkeypatch.setenv("DLX_SKIP_APT", "1")
    system.ensure(("sox",), "A/B")
    monkeypatch.undo()
    for text, answer in [
        ("ID=ubuntu\nID_LIKE=debian\n", True),
        ('ID="mint"\nID_LIKE="ubuntu debian"', True),
        ("ID=fedora", False),
    ]:
        (tmp_path / "os-release").write_text(text)
        assert system.is_debian_like(tmp_path / "os-release") == answer


@pytest.mark.container
def test_an_image_is_really_built(tree):
    """With whatever engine is on this machine, without a network: the base is empty."""
    try:
        engine = container.choose()
    except container.ContainerError as error:
        pytest.skip(str(error))
    tree.task()
    tree.write("PyTorch/Area/Alpha/Dockerfile", "ARG FROM_IMAGE_NAME=a:b\nFROM ${FROM_IMAGE_NAME}\nCOPY Tools Tools\n")
    options = ["--engine", engine, "--tag", "localhost/dlx-test:latest", "--build-arg", "FROM_IMAGE_NAME=scratch"]
    done = tree.dlx("build", "Alpha", *options, HOME=os.environ["HOME"])
    assert done.returncode == 0, done.stdout
    subprocess.run([engine, "rmi", "localhost/dlx-test:latest"], capture_output=True, check=True)
