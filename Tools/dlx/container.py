"""Container images of tasks, with docker, podman or buildah."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from dlx.task import Task

ENGINES = ("docker", "podman", "buildah")


class ContainerError(ValueError):
    """No engine, or a task without a Dockerfile."""


def choose(engine: str | None = None) -> str:
    """The engine asked for, or the first that is there and answers; ContainerError says what was tried."""
    tried = []
    for name in [engine] if engine else ENGINES:
        if shutil.which(name) is None:
            tried.append(f"{name}: not installed")
        elif name == "docker" and not _answers(["docker", "version", "--format", "{{.Server.Version}}"]):
            tried.append("docker: installed, but its server does not answer (is it running, may you use it?)")
        else:
            return name
    raise ContainerError("no container engine to build with\n  " + "\n  ".join(tried))


def default_tag(task: Task) -> str:
    """'dlx/convnets:latest'; image names are lower case."""
    return f"dlx/{task.package.lower()}:latest"


def command(task: Task, engine: str, tag: str = "", build_args: list[str] = (), extra: list[str] = ()) -> list[str]:
    """The command that builds the task's image from the repository root, so that Tools is in the context."""
    dockerfile = task.folder / "Dockerfile"
    if not dockerfile.is_file():
        raise ContainerError(f"{task.name} has no Dockerfile")
    for pair in build_args:
        if not re.match(r"[A-Za-z_]\w*=", pair):
            raise ContainerError(f"--build-arg {pair!r}: must be NAME=VALUE")
    # chroot isolation needs no privileges and no runtime, so a build works inside a container, too; --layers keeps the
    # installed requirements for the next build, as the other engines do by themselves.
    start = ["buildah", "build", "--layers", "--isolation", os.environ.get("BUILDAH_ISOLATION", "chroot")]
    arguments = start if engine == "buildah" else [engine, "build"]
    arguments += ["--file", str(dockerfile), "--tag", tag or default_tag(task)]
    for pair in build_args:
        arguments += ["--build-arg", pair]
    return [*arguments, *extra, str(task.root)]


def base_image(task: Task, build_args: list[str] = ()) -> str:
    """The image that the build starts from, or an empty string for a Dockerfile that does not let it be chosen."""
    found = re.search(r"^ARG FROM_IMAGE_NAME=(\S+)", (task.folder / "Dockerfile").read_text(), re.MULTILINE)
    given = [pair.partition("=")[2] for pair in build_args if pair.startswith("FROM_IMAGE_NAME=")]
    return (given or [found[1]])[-1] if found else ""


def _answers(arguments: list[str]) -> bool:
    try:
        return subprocess.run(arguments, capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
