"""Picture files on disk: class folders, validated before training starts, with every fault listed at once.

    data/train/<class>/*.jpg     data/val/<class>/*.jpg       (also validation, valid or test for the second)

The sizes of all pictures are read along the way (the DALI pipelines compute their crops from them) and kept in a small
index below $DLX_HOME, so that the next start only looks at files that have changed.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from dlx import data, files, paths, vision
from dlx.loading import DataError

SPLITS = {"train": ("train",), "val": ("val", "validation", "valid", "test")}
CHECKS = ("headers", "full")
LISTED = 50
INDEX = 2  # the form of the index files; what `inspect` tells belongs to it
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


@dataclass
class Samples:
    """The pictures of one split.

    `sizes` (N, 2) are width and height of the upright picture; `plain` (N,) tells which of them all decoders read alike
    (default: all); `skipped` holds (path, reason) of files left out in tolerant mode; `ignored` counts the other files
    in the class folders by their suffix.
    """

    name: str
    classes: list[str]
    paths: list[str]
    labels: np.ndarray
    sizes: np.ndarray
    skipped: list[tuple[str, str]] = field(default_factory=list)
    plain: np.ndarray = None  # type: ignore[assignment]
    ignored: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plain is None:
            self.plain = np.ones(len(self.paths), bool)

    def __len__(self) -> int:
        return len(self.paths)


def read_folder(
    root: str | os.PathLike[str], *, tolerant: bool = False, check: str = "headers", workers: int = 8
) -> dict[str, Samples]:
    """The splits found below `root`, by name ("train", "val").

    DataError lists, together: class folders without pictures, classes that the splits do not share, and unreadable
    files (which are left out and reported in `skipped` when `tolerant`). `check` "headers" opens every file and decodes
    those whose end is missing; "full" decodes all. Names of classes are in Unicode's composed form (NFC), however a
    file system spells them.
    """
    root = Path(root).expanduser().absolute()
    if check not in CHECKS:
        raise ValueError(f"check {check!r} is none of {', '.join(CHECKS)}")
    if not root.is_dir():
        raise DataError(f"{root}: no such data folder")
    folders = {split: next((root / n for n in names if (root / n).is_dir()), None) for split, names in SPLITS.items()}
    folders = {split: folder for split, folder in folders.items() if folder is not None}
    if not folders:
        raise DataError(f"{root}: holds neither a folder train nor val with one folder per class inside")
    faults: list[str] = []
    found: dict[str, Samples] = {}
    for split, folder in folders.items():
        found[split] = _read_split(split, folder, faults, tolerant, check, workers)
    if len(found) == 2:
        train, val = (set(found[split].classes) for split in ("train", "val"))
        faults += [f"{folders['val'] / name}: class is not in {folders['train'].name}" for name in sorted(val - train)]
        faults += [f"{folders['train'] / name}: class is not in {folders['val'].name}" for name in sorted(train - val)]
    if faults:
        more = [f"  ... and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        count = f"{len(faults)} fault" + ("s" if len(faults) > 1 else "")
        raise DataError("\n".join([f"{root}: {count} in the data", *(f"  {f}" for f in faults[:LISTED]), *more]))
    return found


def _read_split(split: str, folder: Path, faults: list[str], tolerant: bool, check: str, workers: int) -> Samples:
    found = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    folders = sorted((unicodedata.normalize("NFC", name), name) for name in found)
    classes = [name for name, _ in folders]
    if not classes:
        faults.append(f"{folder}: holds no class folders")
    twice = sorted(name for name, count in Counter(classes).items() if count > 1)
    faults += [f"{folder / name}: two folders of this name, spelled with different Unicode forms" for name in twice]
    names: list[str] = []
    labels: list[int] = []
    ignored: Counter[str] = Counter()
    for label, (_, name) in enumerate(folders):
        pictures, others = _pictures(folder / name)
        ignored.update(others)
        if not pictures:
            kinds = f" (but {_count(others)})" if others else ""
            faults.append(f"{folder / name}: class without pictures{kinds}")
        names += [f"{name}/{picture}" for picture in pictures]
        labels += [label] * len(pictures)
    looks, reasons = _inspect_all(folder, names, check, workers)
    bad = {index: reason for index, reason in enumerate(reasons) if reason}
    skipped = [(str(folder / names[index]), reason) for index, reason in bad.items()]
    if tolerant:
        kept = [index for index in range(len(names)) if index not in bad]
        left = {labels[index] for index in kept}
        had = set(labels)
        faults += [f"{folder / classes[label]}: class without readable pictures" for label in sorted(had - left)]
    else:
        faults += [reason for _, reason in skipped]
        kept = list(range(len(names)))
    return Samples(
        name=split,
        classes=classes,
        paths=[str(folder / names[index]) for index in kept],
        labels=np.array([labels[index] for index in kept], np.int64),
        sizes=looks[kept, :2],
        skipped=skipped if tolerant else [],
        plain=looks[kept, 2] > 0,
        ignored=dict(ignored),
    )


def _pictures(folder: Path) -> tuple[list[str], Counter[str]]:
    """Relative paths, sorted, and how many other files by suffix; linked folders are followed, hidden files not."""
    found = []
    others: Counter[str] = Counter()
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if name.lower().endswith(vision.IMAGE_SUFFIXES):
                found.append(os.path.relpath(os.path.join(where, name), folder))
            else:
                others[os.path.splitext(name)[1].lower() or "no suffix"] += 1
    return sorted(found), others


def _count(ignored: dict[str, int]) -> str:
    return ", ".join(f"{number} of {suffix}" for suffix, number in sorted(ignored.items()))


def describe_ignored(samples: Samples) -> str:
    """ "" or a line about files in the class folders that are no pictures by their suffix."""
    if not samples.ignored:
        return ""
    known = " ".join(vision.IMAGE_SUFFIXES)
    return f"{sum(samples.ignored.values()):,} other files passed over: {_count(samples.ignored)} (read are {known})"


# One file


def inspect(path: str | os.PathLike[str], check: str = "headers") -> tuple[int, int, bool]:
    """Width and height of the upright picture, and whether it is `PLAIN`; ValueError with the path when damaged."""
    path = os.fspath(path)
    try:
        with Image.open(path) as image:
            vision.check_pixels(image)
            plain = image.mode in PLAIN.get(image.format, ())
            headers = check == "headers" and _ends_well(path)
            if headers or image.format == "WEBP":  # of a PNG, asking for EXIF decodes it
                turned = image.getexif().get(ORIENTATION_TAG, 1)
                plain = plain and not (image.format == "WEBP" and turned != 1)
            if headers:
                return *((image.height, image.width) if turned in (5, 6, 7, 8) else image.size), plain
    except FileNotFoundError:
        raise ValueError(f"{path}: no such picture") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path}: refused, {error}") from error
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not a picture in a known format") from None
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise anything on damaged headers
        raise ValueError(f"{path}: unreadable picture ({error})") from error
    return *vision.decode_image(path).size, plain


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


def _inspect_all(folder: Path, names: Sequence[str], check: str, workers: int) -> tuple[np.ndarray, list[str]]:
    """What `inspect` found (N, 3), and "" or what is wrong with each file. Unchanged files come from the index."""
    index = paths.home() / "index" / f"{hashlib.sha256(f'{folder}|{check}|{INDEX}'.encode()).hexdigest()[:24]}.npz"
    stats = np.array([_stat(folder / name) for name in names], np.int64).reshape(-1, 2)
    looks = np.zeros((len(names), 3), np.int32)
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


# Data sets that are files


def imagenet_labels() -> list[str]:
    """The names of ImageNet-1k's classes by index."""
    text = (Path(__file__).parent / "imagenet_labels.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def read_foolbox_images(*, home: str | os.PathLike[str] | None = None) -> dict[str, Samples]:
    """The 20 ImageNet photos of the data set foolbox-images, as the split "val"."""
    folder = data.prepare("foolbox-images", home=home) / "images"
    names = sorted(path for path in folder.iterdir() if path.suffix == ".jpg")
    return {
        "val": Samples(
            name="val",
            classes=imagenet_labels(),
            paths=[str(path) for path in names],
            labels=np.array([int(path.stem.rsplit("_", 1)[1]) for path in names], np.int64),
            sizes=np.array([inspect(path)[:2] for path in names], np.int32),
        )
    }
