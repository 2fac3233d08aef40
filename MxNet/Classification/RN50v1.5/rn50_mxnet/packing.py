"""From pictures to RecordIO, shuffled, so that a run that was interrupted goes on where it was (our own im2rec).

While a split is being packed, `NAME.rec.partial` grows record by record and `NAME.journal` has a line a picture: its
place in the shuffled order and the file's size after it, or why it was left out. Whatever lies behind the last line of
the journal is cut off before packing goes on, so a kill at any byte leaves nothing wrong. Only a finished split gets
its name; its journal goes when all splits are finished, and until then it is not packed again.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from dlx import vision
from dlx.draws import permutation
from dlx.files import atomic_write, sha256

from .data import META, Dataset, open_dataset
from .recordio import check, encode_picture, encode_record, index_path

JOURNAL_EVERY = 256  # pictures between two moments at which the files are handed to the disk


@dataclass(frozen=True)
class Item:
    """One picture to pack: ``read`` gives its encoded bytes or raises ValueError where it cannot be decoded.

    ``stamp`` differs when what is read does: a file's size and time.
    """

    name: str
    label: int
    read: Callable[[], bytes]
    stamp: str = ""


Splits = dict[str, list[Item]]


@dataclass
class Packed:
    """A finished split: how many pictures it holds, and those left out with the reason."""

    records: int
    skipped: list[tuple[str, str]] = field(default_factory=list)


def encode_file(path: Path, resize: int | None, quality: int) -> bytes:
    """A picture file as it goes into the record. ValueError where it cannot be decoded to the last byte.

    Plain RGB and grey JPEG and 8-bit PNG files stay as they are; what MXNet's decoder would turn, colour or refuse
    (EXIF rotation, CMYK, palettes, transparency, other formats) is decoded here and stored as JPEG. ``resize`` scales
    larger pictures to this short side.
    """
    picture = vision.decode_image(path)  # decodes all of it, upright and RGB
    with Image.open(path) as raw:
        plain = (raw.format, raw.mode) in (("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "L"))
        plain = plain and ImageOps.exif_transpose(raw).size == raw.size and raw.getexif().get(0x0112, 1) == 1
        plain = plain and "transparency" not in raw.info
    if plain and (resize is None or min(picture.size) <= resize):
        return path.read_bytes()
    if resize is not None and min(picture.size) > resize:
        picture = vision.resize_short(picture, resize)
    return encode_array(np.asarray(picture), "JPEG", quality=quality, subsampling=0)


def encode_array(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """uint8 (H, W) or (H, W, 3) as the bytes of a file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def list_folder(folder: Path, resize: int | None, quality: int) -> tuple[list[str], list[Item]]:
    """Class names and items of `folder/CLASS/*.jpg`. ValueError for no class, or one without pictures."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; pictures lie in train/CLASS/ and val/CLASS/")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(f"{folder}: {len(classes)} class folders; a classifier needs two or more")
    items = []
    for label, name in enumerate(classes):
        paths = vision.find_images(folder / name)
        if not paths:
            raise ValueError(f"{folder / name}: no picture of this class")
        for path in paths:
            read = lambda path=path: encode_file(path, resize, quality)  # noqa: E731
            stat = path.stat()
            stamp = f"{stat.st_size} {stat.st_mtime_ns}"
            items.append(Item(str(path.relative_to(folder)), label, read, stamp))
    return classes, items


def pack(
    items: Sequence[Item], target: Path, *, seed: int, settings: dict[str, Any], stop_after: int | None = None
) -> Packed | None:
    """Write ``items`` in an order drawn from ``seed`` to ``target`` (NAME.rec) and its index.

    ``settings`` is what else decides the bytes; where it, the seed or the list of items has changed, a partial file is
    begun again. ``stop_after`` leaves after so many pictures, with None, as a kill would. ValueError if nothing
    remains.
    """
    if not items:
        raise ValueError(f"{target}: there is no picture to pack")
    partial, journal = target.with_suffix(".rec.partial"), target.with_suffix(".journal")
    identity = _identity(items, seed, settings)
    done = _finished(target, journal, identity, len(items))
    if done is not None:
        return _packed(done)
    done = _resume(partial, journal, identity)
    order = permutation(seed, 0, len(items))
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "ab") as records, open(journal, "a") as lines:
        if not done:
            lines.write(json.dumps({"identity": identity}) + "\n")
        for count, place in enumerate(range(len(done), len(items)), 1):
            item = items[order[place]]
            line: dict[str, Any] = {"place": place, "item": item.name, "start": records.tell()}
            try:
                records.write(encode_record(encode_picture(item.label, place, item.read())))
            except (ValueError, OSError) as error:
                line["skipped"] = str(error)
            line["end"] = records.tell()
            done.append(line)
            records.flush()  # before its line: a line never speaks of bytes that are not there
            lines.write(json.dumps(line) + "\n")
            if count % JOURNAL_EVERY == 0:
                lines.flush()
            if count == stop_after:
                return None
        os.fsync(records.fileno())
    kept = [line for line in done if "skipped" not in line]
    if not kept:
        first = done[0]
        raise ValueError(f"{target}: not one of {len(items)} pictures can be read; {first['item']}: {first['skipped']}")
    atomic_write(index_path(target), "".join(f"{line['place']}\t{line['start']}\n" for line in kept))
    os.replace(partial, target)
    return _packed(done)


def _packed(done: list[dict[str, Any]]) -> Packed:
    skipped = [(line["item"], line["skipped"]) for line in done if "skipped" in line]
    return Packed(len(done) - len(skipped), skipped)


def _identity(items: Sequence[Item], seed: int, settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([seed, settings], sort_keys=True).encode())
    for item in items:
        digest.update(f"{item.label}\t{item.name}\t{item.stamp}\n".encode())
    return digest.hexdigest()


def _journal(path: Path, identity: str) -> list[dict[str, Any]]:
    """The lines of a journal of these items in their order; none where it is another's."""
    lines = path.read_text().split("\n")[:-1]  # what follows the last line break is half a line
    if not lines or lines[0] != json.dumps({"identity": identity}):
        return []
    done = []
    for line in lines[1:]:
        entry = json.loads(line)
        if entry["place"] != len(done):
            break
        done.append(entry)
    return done


def _finished(target: Path, journal: Path, identity: str, count: int) -> list[dict[str, Any]] | None:
    """The journal of a split that was finished before a kill came in another one."""
    if not target.is_file() or not journal.is_file():
        return None
    done = _journal(journal, identity)
    return done if len(done) == count and done[-1]["end"] == target.stat().st_size else None


def _resume(partial: Path, journal: Path, identity: str) -> list[dict[str, Any]]:
    """The journal's lines that count, both files cut to them; none where there is nothing to go on with."""
    done: list[dict[str, Any]] = []
    if partial.is_file() and journal.is_file():
        size = partial.stat().st_size
        done = list(itertools.takewhile(lambda entry: entry["end"] <= size, _journal(journal, identity)))
    if not done:
        partial.unlink(missing_ok=True)
        journal.unlink(missing_ok=True)
        return done
    os.truncate(partial, done[-1]["end"])
    head = json.dumps({"identity": identity})
    atomic_write(journal, "".join(f"{line}\n" for line in [head, *map(json.dumps, done)]))
    return done


def make(
    folder: Path, classes: list[str], splits: Splits, channels: int, seed: int, settings: dict[str, Any]
) -> Dataset:
    """Pack what is not packed yet, write dataset.json, and check everything that was written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).unlink(missing_ok=True)
    described = {}
    for name, items in splits.items():
        target = folder / f"{name}.rec"
        packed = pack(items, target, seed=seed, settings=settings)
        contents = check(target, len(classes))
        described[name] = {
            "records": len(contents), "bytes": target.stat().st_size, "sha256": sha256(target),
            "skipped": [list(pair) for pair in packed.skipped],
        }  # fmt: skip
        print(f"{target}: {len(contents):,} pictures, {len(packed.skipped)} corrupt ones left out")
        for item, reason in packed.skipped[:10]:
            print(f"  {item}: {reason}")
    content = {"classes": classes, "channels": channels, "seed": seed, "settings": settings, "splits": described}
    content["sha256"] = described["train"]["sha256"]
    atomic_write(folder / META, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for name in splits:
        (folder / f"{name}.journal").unlink(missing_ok=True)
    return open_dataset(folder)
