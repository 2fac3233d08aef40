"""Picture files on disk: class folders, validated before training starts, with every fault listed at once.

    data/train/<class>/*.jpg     data/val/<class>/*.jpg       (also validation, valid or test for the second)

The sizes of all pictures are read along the way (the DALI pipelines compute their crops from them) and kept in a small
index below $DLX_HOME, so that the next start only looks at files that have changed.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlx import data, vision
from dlx.inspection import CHECKS, inspect, inspect_all
from dlx.loading import DataError

SPLITS = {"train": ("train",), "val": ("val", "validation", "valid", "test")}
LISTED = 50


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
    looks, reasons = inspect_all(folder, names, check, workers)
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
