"""Debian and Ubuntu packages that a task needs: installed where we may, otherwise the exact command is printed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

INSTALL = ["apt-get", "install", "-y", "--no-install-recommends"]


class SystemPackageError(ValueError):
    """System packages are missing and cannot be installed from here."""


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those of `packages` that dpkg does not report as installed; all of them where there is no dpkg."""
    if not packages or shutil.which("dpkg-query") is None:
        return list(packages)
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f=${Package} ${Status}\n", *packages], capture_output=True, text=True, check=False
    )
    installed = {line.split()[0] for line in asked.stdout.splitlines() if line.endswith("ok installed")}
    return [package for package in packages if package not in installed]


def ensure(packages: tuple[str, ...], needed_by: str) -> None:
    """Install what is missing as root on Debian or Ubuntu, announced first; otherwise raise with the command to run.

    DLX_SKIP_APT=1 leaves the check out, for systems with other package managers where the equivalents are installed.
    """
    if not packages or os.environ.get("DLX_SKIP_APT") == "1":
        return
    absent = missing(packages)
    if not absent:
        return
    if not (is_debian_like() and shutil.which("apt-get")):
        raise SystemPackageError(
            f"{needed_by} needs what Debian calls: {' '.join(absent)}\n"
            "Install the equivalents of your system, then run again with DLX_SKIP_APT=1."
        )
    if os.geteuid() != 0:
        raise SystemPackageError(
            f"{needed_by} needs system packages that are not installed. Nothing was started. Run:\n"
            f"  sudo apt-get update && sudo {' '.join(INSTALL + absent)}"
        )
    print(f"{needed_by} needs system packages; running: apt-get update && {' '.join(INSTALL + absent)}", flush=True)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], INSTALL + absent):
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).splitlines()[-15:])
            raise SystemPackageError(f"`{' '.join(command)}` failed with status {done.returncode}:\n{tail}")


def is_debian_like(os_release: Path = Path("/etc/os-release")) -> bool:
    """Whether the machine calls itself Debian, Ubuntu or a child of theirs."""
    if not os_release.exists():
        return False
    pairs = (line.partition("=") for line in os_release.read_text().splitlines())
    words = {word for key, _, value in pairs if key in ("ID", "ID_LIKE") for word in value.strip("\"'").split()}
    return bool(words & {"debian", "ubuntu"})
