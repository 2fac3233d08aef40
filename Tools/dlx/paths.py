"""Where things live: the cache that all tasks and clones share, and the root of the repository."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """$DLX_HOME, or ~/.cache/dlx. Nothing is created here; writers create the folders that they need."""
    return Path(os.environ.get("DLX_HOME") or Path.home() / ".cache" / "dlx").expanduser().absolute()


def env_dir() -> Path:
    """Virtual environments, one per group and set of pins."""
    return home() / "envs"


def data_dir() -> Path:
    """Prepared data sets."""
    return home() / "data"


def package_dir() -> Path:
    """Verified downloads, as they came."""
    return home() / "packages"


def weight_dir() -> Path:
    """Verified weights files."""
    return home() / "weights"


def repo_root() -> Path | None:
    """The repository: $DLX_ROOT, or the nearest folder at or above the current one that holds `dlx` and `Tools/dlx`."""
    if os.environ.get("DLX_ROOT"):
        return Path(os.environ["DLX_ROOT"]).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dlx").is_file() and (folder / "Tools" / "dlx").is_dir():
            return folder
    return None
