"""What the headers of picture files say, for whole folders: sizes, orientation, damage, and who can decode them.

Kept in a small index below $DLX_HOME, so that the next start only looks at files that have changed.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from . import files, paths, vision

CHECKS = ("headers", "full")
INDEX = 3  # the form of the index files; what `inspect` tells belongs to it
ORIENTATION_TAG = 0x0112
# What DALI's decoders make the same 8-bit RGB of as Pillow, by format. It gives other values or nothing for the rest.
PLAIN = {
    "JPEG": {"L", "RGB", "CMYK"},
    "MPO": {"RGB"},
    "PNG": {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"},
    "BMP": {"1", "L", "P", "RGB"},
    "PPM": {"1", "L", "RGB"},
    "WEBP": {"RGB", "RGBA"},
    "TIFF": {"L", "RGB", "RGBA", "I;16"},
}


class Look(NamedTuple):
    """Size of the upright picture in pixels; whether it is `PLAIN`; its EXIF orientation, 1 to 8 (1: as stored)."""

    width: int
    height: int
    plain: bool
    orientation: int

    @property
    def stored_size(self) -> tuple[int, int]:
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def inspect(path: str | os.PathLike[str], check: str = "headers") -> Look:
    """ValueError with the path when the file is not a whole picture.

    `check` "headers" opens it, and decodes it where its end is missing; "full" decodes it.
    """
    path = os.fspath(path)
    try:
        with Image.open(path) as image:
            vision.check_pixels(image)
            turned = image.getexif().get(ORIENTATION_TAG, 1)
            turned = turned if turned in range(2, 9) else 1
            plain = image.mode in PLAIN.get(image.format, ()) and not (image.format == "WEBP" and turned != 1)
            width, height = image.size[::-1] if turned >= 5 else image.size
            if check == "headers" and _ends_well(path):
                return Look(width, height, plain, turned)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such picture") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path}: refused, {error}") from error
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not a picture in a known format") from None
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise anything on damaged headers
        raise ValueError(f"{path}: unreadable picture ({error})") from error
    return Look(*vision.decode_image(path).size, plain, turned)


def describe(path: str) -> str:
    """Format and mode of a picture."""
    with Image.open(path) as image:
        return f"{image.format}, mode {image.mode}"


def _ends_well(path: str) -> bool:
    """Whether a JPEG or PNG has its end marker near its end; cut files lack it. Other formats: only decoding tells."""
    with open(path, "rb") as stream:
        start = stream.read(4)
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 1024))
        end = stream.read()
    if start[:3] == b"\xff\xd8\xff":
        return b"\xff\xd9" in end
    return start == b"\x89PNG" and b"IEND" in end


def inspect_all(
    folder: Path, names: Sequence[str], check: str = "headers", workers: int = 8
) -> tuple[np.ndarray, list[str]]:
    """Of the pictures `names` below `folder`: int32 (N, 4), each row a `Look`, and "" or what is wrong with each."""
    if check not in CHECKS:
        raise ValueError(f"check {check!r} is none of {', '.join(CHECKS)}")
    index = paths.home() / "index" / f"{hashlib.sha256(f'{folder}|{check}|{INDEX}'.encode()).hexdigest()[:24]}.npz"
    stats = np.array([_stat(folder / name) for name in names], np.int64).reshape(-1, 2)
    looks = np.zeros((len(names), len(Look._fields)), np.int32)
    reasons = [""] * len(names)
    known = _read_index(index)
    todo = []
    for number, name in enumerate(names):
        entry = known.get(name)
        if entry is not None and entry[:2] == tuple(stats[number]) and stats[number, 0] >= 0:
            looks[number] = entry[2:]
        else:
            todo.append(number)

    def look(number: int) -> None:
        try:
            looks[number] = inspect(folder / names[number], check)
        except ValueError as error:
            reasons[number] = str(error)

    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers)) as pool:
        warnings.simplefilter("ignore")  # for all threads: the filters are the process's
        list(pool.map(look, todo))
    good = [number for number, reason in enumerate(reasons) if not reason]
    if todo and good:
        _write_index(index, [names[n] for n in good], np.concatenate([stats[good], looks[good]], 1))
    return looks, reasons


def _stat(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _read_index(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with np.load(path, allow_pickle=False) as content:
            names = bytes(content["names"]).decode("utf-8", "surrogateescape").split("\n")
            return dict(zip(names, map(tuple, content["values"].tolist()), strict=True))
    except (OSError, ValueError, KeyError, EOFError):
        return {}


def _write_index(path: Path, names: Iterable[str], values: np.ndarray) -> None:
    names = list(names)
    if any("\n" in name for name in names):
        return
    try:
        with files.atomic_path(path) as temporary:
            joined = np.frombuffer("\n".join(names).encode("utf-8", "surrogateescape"), np.uint8)
            np.savez(temporary, names=joined, values=values)
    except (OSError, UnicodeError):
        pass  # an index only saves time; a read-only home must not stop a training
