"""The data a training or an evaluation sees: a user's COCO files, a generated set of scenes, or synthetic batches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlx import coco, scene_sets
from dlx.loading import DataError


@dataclass
class Split:
    """One split. Training leaves out crowds (regions of many objects); `annotations` holds them for the evaluation.

    `empty` counts pictures without objects that were left out.
    """

    name: str
    annotations: coco.Annotations
    empty: int = 0
    _starts: np.ndarray = field(init=False, repr=False)
    _boxes: np.ndarray = field(init=False, repr=False)
    _labels: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        single = ~self.annotations.iscrowd
        self._boxes, self._labels = self.annotations.boxes[single], self.annotations.labels[single]
        self._starts = np.concatenate([[0], np.cumsum(single)])[self.annotations.starts]

    def __len__(self) -> int:
        return len(self.annotations)

    @property
    def classes(self) -> list[str]:
        return self.annotations.classes

    @property
    def category_ids(self) -> list[int]:
        return self.annotations.category_ids

    @property
    def skipped(self) -> list[tuple[str, str]]:
        return self.annotations.skipped

    @property
    def object_counts(self) -> np.ndarray:
        """(N,) objects in each picture."""
        return np.diff(self._starts)

    @property
    def most(self) -> int:
        """Objects of the picture with the most, at least 1: the rows of a batch's boxes."""
        return max(1, int(self.object_counts.max(initial=0)))

    def objects(self, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Boxes (N, M, 4) in pixels and labels (N, M) of these pictures, M the most among them; label 0: no object."""
        first, counts = self._starts[pictures], self.object_counts[pictures]
        columns = np.arange(max(1, counts.max(initial=0)))
        present = columns < counts[:, None]
        rows = np.where(present, first[:, None] + columns, 0)
        if not len(self._boxes):
            return np.zeros((*rows.shape, 4)), np.zeros(rows.shape, np.int64)
        return self._boxes[rows] * present[..., None], self._labels[rows] * present

    def without_empty(self) -> Split:
        """Only the pictures that hold objects."""
        kept = np.flatnonzero(self.object_counts)
        if not len(kept):
            raise DataError(f"{self.annotations.path}: not one picture holds an object")
        return Split(self.name, self.annotations.subset(kept), empty=len(self) - len(kept))


@dataclass
class Synthetic:
    """`size` samples that are made up, `objects` in each, for measuring speed."""

    name: str
    classes: list[str]
    size: int
    objects: int = 8
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    @property
    def category_ids(self) -> list[int]:
        return list(range(1, len(self.classes) + 1))


AnySplit = Split | Synthetic


def open_data(
    data: str | os.PathLike[str],
    *,
    files: Mapping[str, tuple[str | os.PathLike[str], str | os.PathLike[str]]] | None = None,
    home: str | os.PathLike[str] | None = None,
    tolerant: bool = False,
    check: str = "headers",
    exif: str = "auto",
    keep_empty: bool = False,
    train_scenes: int | None = None,
    val_scenes: int | None = None,
    num_classes: int = 80,
    num_samples: int = 12800,
) -> dict[str, AnySplit]:
    """The splits "train" and "val" of `data`, validated; ValueError lists every fault.

    `data`: "fashion-scenes" or "stamp-scenes" (made if they are not here, `train_scenes` and `val_scenes` of them),
    "synthetic" (of the last two options), or a folder in COCO's layout; `files`, (JSON, folder of pictures) by split,
    stands in for a layout of one's own. `tolerant`, `check`, `exif`: see `coco.read`. Training pictures without objects
    are left out unless `keep_empty`.
    """
    if data == "synthetic":
        classes = [f"class_{number}" for number in range(1, num_classes + 1)]
        return {name: Synthetic(name, classes, num_samples) for name in ("train", "val")}
    if not files:
        folder = data
        if data in scene_sets.NAMES:
            folder = scene_sets.prepare(str(data), home=home, train=train_scenes, val=val_scenes)
        files = coco.find_splits(folder)
    splits: dict[str, AnySplit] = {}
    for name, (path, pictures) in files.items():
        classes = splits["train"].classes if "train" in splits else None
        options = {"tolerant": tolerant, "check": check, "exif": exif, "classes": classes}
        split = Split(name, coco.read(Path(path), Path(pictures), **options))
        splits[name] = split.without_empty() if name == "train" and not keep_empty else split
    return splits


def split_of(splits: Mapping[str, AnySplit], name: str) -> AnySplit:
    """DataError with the names there are, if `name` is not one."""
    if name not in splits:
        raise DataError(f"the data has no split {name!r}, only {', '.join(splits)}")
    return splits[name]
