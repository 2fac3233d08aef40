"""Read the idx files of MNIST and its relatives."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

AGAIN = "if it is of a prepared data set, `./dlx cache verify --repair` fetches it again"


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in an idx file (the format of MNIST), plain or .gz, in native byte order. ValueError names the file."""
    import numpy as np

    path = Path(path)
    kinds = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
    try:
        with open(path, "rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as stream:
            content = stream.read()
    except EOFError as error:
        raise ValueError(f"{path}: cut short ({error}); {AGAIN}") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged ({error}); {AGAIN}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in kinds:
        raise ValueError(f"{path}: not an idx file (starts with {content[:4].hex()})")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{path}: cut short within its header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    kind = np.dtype(kinds[content[2]])
    expected = start + kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise ValueError(f"{path}: holds {len(content)} bytes, its header {shape} says {expected}")
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="))
