"""RecordIO, the container of MXNet's data: writing it, and checking the place of every byte.

A file is a row of records. A record is, little-endian: the magic number, a word whose upper three bits say which part
of a split record this is (0 whole, 1 first, 2 middle, 3 last) and whose lower 29 bits are the length in bytes, the
payload, and zeros up to a multiple of four. Where the magic number stands in a payload at a multiple of four, the
record is split there, without it. The payload of a picture is a header (`IfQQ`: flag, label, id, 0), then flag float32
labels where flag is above 0, then the encoded picture. The index beside it, `NAME.idx`, has a line `id TAB offset` a
record.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
HEADER = struct.Struct("<IfQQ")
LONGEST = 2**29 - 1


class RecordError(ValueError):
    """A .rec file that cannot be trained on; the message names file, record and reason."""


def encode_record(payload: bytes) -> bytes:
    """The bytes of one record, split where the payload holds the magic number."""
    if len(payload) > LONGEST:
        raise ValueError(f"a record holds at most {LONGEST} bytes, got {len(payload)}")
    cuts, start = [], payload.find(MAGIC_BYTES)
    while start >= 0:
        if start % 4 == 0:
            cuts.append(start)
            start = payload.find(MAGIC_BYTES, start + 4)
        else:
            start = payload.find(MAGIC_BYTES, start + 1)
    bounds = [0, *(cut + 4 for cut in cuts)], [*cuts, len(payload)]
    parts = [payload[first:last] for first, last in zip(*bounds, strict=True)]
    kinds = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        MAGIC_BYTES + struct.pack("<I", kind << 29 | len(part)) + part + bytes(-len(part) % 4)
        for kind, part in zip(kinds, parts, strict=True)
    )


def encode_picture(label: int, number: int, picture: bytes) -> bytes:
    """The payload of a picture with one label."""
    return HEADER.pack(0, float(label), number, 0) + picture


def decode_picture(payload: bytes) -> tuple[np.ndarray, int, bytes]:
    """(labels float32 (label_width,), id, encoded picture). ValueError where the header does not fit."""
    if len(payload) < HEADER.size:
        raise ValueError(f"{len(payload)} bytes are too few for a header of {HEADER.size}")
    flag, label, number, _ = HEADER.unpack_from(payload)
    end = HEADER.size + 4 * flag
    if end > len(payload):
        raise ValueError(f"the header speaks of {flag} labels, the record has {len(payload)} bytes")
    labels = np.frombuffer(payload, "<f4", flag, HEADER.size) if flag else np.array([label], np.float32)
    return labels, number, payload[end:]


def read_records(path: str | os.PathLike[str], *, payloads: bool = True) -> Iterator[tuple[int, int, bytes]]:
    """(offset, end, payload) of every record, in the file's order; without ``payloads`` the first 64 bytes of each.

    RecordError at the first byte that is not as it must be, a file that is cut short included.
    """
    path = Path(path)
    size = path.stat().st_size
    if not size:
        return
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        position, number = 0, 0
        while position < size:
            start, parts, last = position, [], False
            while not last:
                where = f"{path}: record {number} at byte {start}"
                if position + 8 > size:
                    raise RecordError(f"{where}: the file is cut short ({size} bytes)")
                magic, word = struct.unpack_from("<II", content, position)
                kind, length = word >> 29, word & LONGEST
                if magic != MAGIC:
                    raise RecordError(
                        f"{where}: magic number {magic:#x} instead of {MAGIC:#x}; not RecordIO, or damaged"
                    )
                if kind not in ((0, 1) if not parts else (2, 3)):
                    raise RecordError(f"{where}: part of kind {kind} follows {len(parts)} parts of a split record")
                if position + 8 + length > size:
                    raise RecordError(f"{where}: the file is cut short: {length} bytes announced, {size} in all")
                kept = length if payloads else min(length, 64)
                parts.append(content[position + 8 : position + 8 + kept])
                position += 8 + length + -length % 4
                last = kind in (0, 3)
            yield start, min(position, size), MAGIC_BYTES.join(parts)
            number += 1


def read_index(path: str | os.PathLike[str]) -> dict[int, int]:
    """id -> offset. RecordError names the line that is none."""
    found: dict[int, int] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        pieces = line.split("\t")
        if len(pieces) != 2 or not all(piece.strip().isdigit() for piece in pieces):
            raise RecordError(f"{path}: line {number}: {line!r} is not `id TAB offset`")
        key, offset = map(int, pieces)
        if key in found:
            raise RecordError(f"{path}: line {number}: id {key} comes twice")
        found[key] = offset
    return found


def index_path(path: str | os.PathLike[str]) -> Path:
    """Where the index of a .rec file lies."""
    return Path(path).with_suffix(".idx")


@dataclass(frozen=True)
class Contents:
    """What a checked file holds: ``labels`` (N,) int64 in the file's order."""

    path: Path
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def check(path: str | os.PathLike[str], num_classes: int) -> Contents:
    """Read all of a file's structure, its index and its labels; RecordError for whatever training would stumble over.

    That is: no such file, a file cut short or damaged, no record at all, a label width other than 1, a label that is no
    class, a class of which there is no picture (in a file called train.rec), an index that does not fit.
    """
    path = Path(path)
    if not path.is_file():
        raise RecordError(f"{path}: no such file; `prepare` makes it")
    labels, offsets = [], []
    for row, (start, _, payload) in enumerate(read_records(path, payloads=False)):
        where = f"{path}: record {row} at byte {start}"
        if len(payload) < HEADER.size:
            raise RecordError(f"{where}: {len(payload)} bytes are too few for a picture's header")
        flag, label, _, _ = HEADER.unpack_from(payload)
        if flag > 1:
            raise RecordError(f"{where}: label width {flag}; a classifier's pictures have one label each")
        if flag == 1:
            if len(payload) < HEADER.size + 4:
                raise RecordError(f"{where}: the header speaks of a label that is not there")
            (label,) = struct.unpack_from("<f", payload, HEADER.size)
        if not (label == int(label) and 0 <= label < num_classes if np.isfinite(label) else False):
            raise RecordError(f"{where}: label {label:g} is none of 0 ... {num_classes - 1} ({num_classes} classes)")
        labels.append(int(label))
        offsets.append(start)
    if not labels:
        raise RecordError(f"{path}: this split is empty")
    found = np.array(labels, np.int64)
    absent = np.flatnonzero(np.bincount(found, minlength=num_classes) == 0)
    if path.stem == "train" and len(absent):
        raise RecordError(f"{path}: {num_classes} classes expected, and of class {absent[0]} there is no picture")
    _check_index(path, offsets)
    return Contents(path, found)


def _check_index(path: Path, offsets: list[int]) -> None:
    index = index_path(path)
    if not index.is_file():
        raise RecordError(f"{index}: no such file; shuffling needs the index that `prepare` writes")
    listed = sorted(read_index(index).values())
    if listed != offsets:
        wrong = next((a for a, b in zip(listed, offsets, strict=False) if a != b), None)
        detail = f"it lists {len(listed)} records, the file has {len(offsets)}"
        raise RecordError(f"{index}: does not fit {path.name}: {detail if wrong is None else f'no record at {wrong}'}")
