"""Files that are either whole or not there: atomic writes, hashes, locks between processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; make it a file or a folder, and it becomes `path` when the block succeeds.

    On success it is flushed to the disk and renamed over `path` (a folder there is replaced); on failure it is removed
    and `path` stays as it was. The parent folder is created; the suffix is kept, since libraries choose a format by it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A private folder holds the temporary, so that the caller may create a file or a folder under a name it can trust.
    holder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    temporary = holder / path.name
    try:
        yield temporary
        _flush(temporary)
        if path.is_dir() and not path.is_symlink():
            path.rename(holder / "replaced")  # a folder cannot be renamed over a filled folder
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8) so that readers see the old file or the new one, never a part."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def lock(path: str | os.PathLike[str], timeout: float | None = None, message: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock that other processes and threads respect; the system frees it when the holder dies.

    `message` goes to stderr once when there is someone to wait for; `timeout` is in seconds, then TimeoutError.
    The lock file stays: removing it would let two processes lock two different files of one name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = None if timeout is None else time.monotonic() + timeout
    with open(path, "a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if message:
                    print(message, file=sys.stderr, flush=True)
                    message = None
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{path}: still locked by another process after {timeout:g} s") from None
                time.sleep(0.05)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)  # closing alone leaves it to forked children, who hold the file as well


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _flush(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():
                _flush(child)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
