"""COCO detection data: a JSON file and a folder of pictures, read into arrays and validated before anything starts.

    annotations = coco.read("instances_val2017.json", "val2017")
    annotations.boxes[annotations.rows(5)]              # the boxes of picture 5: left, top, right, bottom in its pixels

Every bad entry is found in one pass. Strict, they are one ValueError; tolerant, bad entries are left out, boxes that
reach over the edge are cut there, and both are counted. A annotations, N pictures, C categories.

COCO does not say whether its boxes refer to a picture as stored or turned upright by its EXIF orientation. The width
and height in the JSON tell for quarter turns; where they cannot (half turns, mirrored or square pictures) the entry is
a fault unless `exif` decides.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import files, vision
from .inspection import Look, inspect_all

LISTED = 20
SLACK = 2.0  # pixels by which a box may reach over the edge of its picture, as rounded ones do; it is cut there
EXIF = ("auto", "upright", "stored")
LARGEST_SIDE = 1 << 20
# From an upright picture back to the stored one, by EXIF orientation.
TO_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@dataclass
class Annotations:
    """The pictures of a split and what is in them.

    `files` are names below `folder`; `image_ids` (N,), `sizes` (N, 2: width, height, of the frame that boxes refer to).
    `starts` (N + 1,): picture i has the annotations starts[i] to starts[i + 1] of `boxes` (A, 4 float64: left, top,
    right, bottom in pixels), `labels` (A,: 1 to C), `areas`, `iscrowd`, `annotation_ids`. `classes` and `category_ids`
    are in the order of the labels. `orientations` (N,): the EXIF orientation that boxes do NOT follow, else 1;
    `turned` (N,): whether the file has an orientation that they do follow; `plain` (N,): see `inspection.PLAIN`.
    `skipped` holds (file, reason) of pictures left out, `counts` how many entries had which fault or were cut.
    """

    path: Path
    folder: Path
    classes: list[str]
    category_ids: list[int]
    files: list[str]
    image_ids: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    areas: np.ndarray
    iscrowd: np.ndarray
    annotation_ids: np.ndarray
    orientations: np.ndarray
    turned: np.ndarray
    plain: np.ndarray
    skipped: list[tuple[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, index: int) -> slice:
        """Where in `boxes`, `labels` ... the annotations of picture `index` are."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def picture_path(self, index: int) -> str:
        return str(self.folder / self.files[index])

    def decode(self, index: int) -> Image.Image:
        """The RGB picture in the frame that its boxes refer to. ValueError names the file."""
        path = self.picture_path(index)
        image = vision.decode_image(path)
        if self.orientations[index] != 1:
            image = image.transpose(TO_STORED[int(self.orientations[index])])
        if image.size != tuple(self.sizes[index]):
            expected = "x".join(str(side) for side in self.sizes[index])
            raise ValueError(f"{path}: {image.width}x{image.height} pixels, its annotations are for {expected}")
        return image

    def subset(self, pictures: Sequence[int] | np.ndarray) -> Annotations:
        """Only these pictures, in this order."""
        pictures = np.asarray(pictures, np.int64)
        lengths = self.starts[pictures + 1] - self.starts[pictures]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(starts[-1]) - np.repeat(starts[:-1] - self.starts[pictures], lengths)
        per_picture = ("image_ids", "sizes", "orientations", "turned", "plain")
        per_box = ("boxes", "labels", "areas", "iscrowd", "annotation_ids")
        return Annotations(
            path=self.path,
            folder=self.folder,
            classes=self.classes,
            category_ids=self.category_ids,
            files=[self.files[index] for index in pictures],
            starts=starts,
            skipped=self.skipped,
            counts=self.counts,
            **{name: getattr(self, name)[pictures] for name in per_picture},
            **{name: getattr(self, name)[rows] for name in per_box},
        )


class _Faults:
    """What is wrong, by kind, in the order of the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.lines.append(text)

    def error(self, path: Path) -> ValueError:
        total = sum(self.counts.values())
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.counts.most_common())
        head = f"{path}: {total:,} fault{'s' if total > 1 else ''} ({kinds})"
        more = [f"  ... and {total - LISTED:,} more"] if total > LISTED else []
        advice = ["correct them, or read with tolerant, which leaves such entries out and counts them"]
        return ValueError("\n".join([head, *(f"  {line}" for line in self.lines[:LISTED]), *more, *advice]))


def read(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tolerant: bool = False,
    check: str = "headers",
    exif: str = "auto",
    workers: int = 8,
    classes: Sequence[str] | None = None,
) -> Annotations:
    """Read and validate `path` (JSON) and the pictures in `folder` that it names.

    `check`: see `inspection.inspect`. `classes`: names and order that the categories must have (a training's, for
    its validation). A file without its three lists, or without pictures or categories, is an error in any case.
    """
    if exif not in EXIF:
        raise ValueError(f"exif {exif!r} is none of {', '.join(EXIF)}")
    path, folder = Path(path).expanduser().absolute(), Path(folder).expanduser().absolute()
    content = _load(path)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder of pictures (named with {path})")
    faults = _Faults()
    names, category_ids = _categories(content["categories"], faults)
    if classes is not None and list(classes) != names:
        raise ValueError(f"{path}: its categories are {_short(names)}, not {_short(classes)}")
    if not names:
        faults.add("no category", "categories: the list holds no valid category")
        raise faults.error(path)
    images = _Images(content["images"], faults)
    images.look(folder, check, exif, workers, faults)
    table, clipped = _boxes(content["annotations"], images, {c: row + 1 for row, c in enumerate(category_ids)}, faults)
    if faults.lines and not tolerant:
        raise faults.error(path)
    good = np.flatnonzero(images.good)
    if not len(good):
        raise faults.error(path) if faults.lines else ValueError(f"{path}: holds no pictures")
    order = np.argsort(table["image"], kind="stable")
    table = {key: values[order] for key, values in table.items()}
    starts = np.searchsorted(table["image"], np.arange(len(images.files) + 1))
    result = Annotations(
        path=path,
        folder=folder,
        classes=names,
        category_ids=category_ids,
        files=images.files,
        image_ids=np.array(images.ids, np.int64),
        sizes=np.array(images.sizes, np.int32).reshape(-1, 2),
        starts=starts.astype(np.int64),
        boxes=table["box"],
        labels=table["label"],
        areas=table["area"],
        iscrowd=table["crowd"],
        annotation_ids=table["id"],
        orientations=images.orientations,
        turned=images.turned,
        plain=images.plain,
        skipped=images.skipped,
        counts=dict(faults.counts) | ({"box cut at the edge": clipped} if clipped else {}),
    )
    return result if len(good) == len(result) else result.subset(good)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such annotation file") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: not a COCO file: holds a {type(content).__name__}, expected an object with three lists"
        )
    for key in ("images", "annotations", "categories"):
        if not isinstance(content.get(key), list):
            found = type(content[key]).__name__ if key in content else "nothing"
            raise ValueError(f"{path}: not a COCO file: {key!r} must be a list, found {found}")
    return content


def _short(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" ... ({len(names)})" if len(names) > 8 else "")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Categories and pictures


def _categories(entries: list[Any], faults: _Faults) -> tuple[list[str], list[int]]:
    names: list[str] = []
    ids: list[int] = []
    for row, entry in enumerate(entries):
        if not (isinstance(entry, dict) and _is_id(entry.get("id")) and isinstance(entry.get("name"), str)):
            faults.add(
                "wrong type", f"categories[{row}]: needs an integer 'id' and a string 'name', found {_show(entry)}"
            )
        elif entry["id"] in ids:
            faults.add("duplicate category id", f"categories[{row}]: id {entry['id']} is there twice")
        elif entry["name"] in names:
            faults.add("duplicate category name", f"categories[{row}]: name {entry['name']!r} is there twice")
        else:
            names.append(entry["name"])
            ids.append(entry["id"])
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return [names[row] for row in order], [ids[row] for row in order]


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."


class _Images:
    """The pictures that the JSON names, whole entries only."""

    def __init__(self, entries: list[Any], faults: _Faults) -> None:
        self.ids: list[int] = []
        self.files: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        self.bad_ids: set[int] = set()  # of pictures left out: their annotations are not faults of their own
        self.skipped: list[tuple[str, str]] = []
        self.number: dict[int, int] = {}
        names: set[str] = set()
        for row, entry in enumerate(entries):
            kind, reason = self._fault(entry, names)
            if kind:
                if isinstance(entry, dict) and _is_id(entry.get("id")) and not self._again(entry):
                    self.bad_ids.add(entry["id"])
                faults.add(kind, f"images[{row}]: {reason}")
                continue
            names.add(entry["file_name"])
            self.number[entry["id"]] = len(self.ids)
            self.ids.append(entry["id"])
            self.files.append(entry["file_name"])
            self.sizes.append((entry["width"], entry["height"]))
        count = len(self.ids)
        self.good = np.array([number not in self.bad_ids for number in self.ids], bool)
        self.orientations = np.ones(count, np.uint8)
        self.turned = np.zeros(count, bool)
        self.plain = np.ones(count, bool)

    def _again(self, entry: dict[str, Any]) -> bool:
        """Whether an entry only repeats one: two pictures of one id would both be left out."""
        first = self.number.get(entry["id"])
        return first is not None and self.files[first] == entry.get("file_name")

    def _fault(self, entry: Any, names: set[str]) -> tuple[str, str]:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            return "wrong type", f"needs an integer 'id', found {_show(entry)}"
        name, number = entry.get("file_name"), entry["id"]
        if not isinstance(name, str) or not name or "\0" in name:
            return "wrong type", f"image {number}: 'file_name' must be a name, found {_show(name)}"
        if name.startswith("/") or ".." in name.split("/"):
            return "unsafe name", f"image {number}: {name!r} leads out of the folder of pictures"
        for key in ("width", "height"):
            side = entry.get(key)
            if not _is_id(side) or not 0 < side < LARGEST_SIDE:
                return "wrong type", f"image {number} ({name}): {key!r} must be a positive integer, found {_show(side)}"
        if number in self.number:
            return "duplicate image id", f"image id {number} is there twice ({self.files[self.number[number]]}, {name})"
        if name in names:
            return "duplicate file", f"image {number}: the file {name} is there twice"
        return "", ""

    def look(self, folder: Path, check: str, exif: str, workers: int, faults: _Faults) -> None:
        """Compare with the files."""
        looks, reasons = inspect_all(folder, self.files, check, workers)
        for row, reason in enumerate(reasons):
            kind = ""
            if reason:
                kind = "missing file" if reason.endswith("no such picture") else "unreadable picture"
            else:
                look = Look(*looks[row].tolist())
                kind, reason, follows = _frame(look, self.sizes[row], exif)
                reason = f"{folder / self.files[row]}: {reason}"
                self.orientations[row] = 1 if follows else look.orientation
                self.turned[row] = follows and look.orientation != 1
                self.plain[row] = look.plain
            if kind:
                faults.add(kind, f"image {self.ids[row]}: {reason}")
                self.skipped.append((str(folder / self.files[row]), reason))
                self.good[row] = False
                self.bad_ids.add(self.ids[row])


def _frame(look: Look, size: tuple[int, int], exif: str) -> tuple[str, str, bool]:
    """Kind and text of a fault, or "", and whether boxes refer to the upright picture (else: as stored)."""
    upright, stored = (look.width, look.height), look.stored_size
    allowed = {"upright": [upright], "stored": [stored], "auto": [upright, stored]}[exif]
    if tuple(size) not in allowed:
        found = " or ".join(f"{width}x{height}" for width, height in dict.fromkeys(allowed))
        return "wrong size", f"the JSON says {size[0]}x{size[1]}, the file is {found}", True
    if look.orientation == 1 or exif != "auto":
        return "", "", exif != "stored" or look.orientation == 1
    if upright == stored:
        text = f"EXIF orientation {look.orientation}: do boxes refer to the upright picture or to the stored one? "
        return "ambiguous orientation", text + "say so with exif 'upright' or 'stored'", True
    return "", "", tuple(size) == upright


# Boxes


def _boxes(
    entries: list[Any], images: _Images, label_of: dict[int, int], faults: _Faults
) -> tuple[dict[str, np.ndarray], int]:
    """The good annotations as columns, with the row of their picture; and how many boxes were cut at the edge."""
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [])
    seen: set[int] = set()
    for row, entry in enumerate(entries):
        kind, reason = _annotation_fault(entry, images, label_of, seen)
        if kind:
            faults.add(kind, f"annotations[{row}]: {reason}")
            continue
        seen.add(entry["id"])
        if entry["image_id"] in images.bad_ids:
            continue
        left, top, width, height = entry["bbox"]
        values = (
            images.number[entry["image_id"]],
            label_of[entry["category_id"]],
            (left, top, left + width, top + height),
            entry.get("area", width * height),
            bool(entry.get("iscrowd", 0)),
            entry["id"],
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    kinds = (np.int64, np.int64, np.float64, np.float64, bool, np.int64)
    names = ("image", "label", "box", "area", "crowd", "id")
    table = {name: np.array(c, kind) for name, c, kind in zip(names, columns, kinds, strict=True)}
    table["box"] = table["box"].reshape(-1, 4)
    return _clip(table, images, faults)


def _annotation_fault(entry: Any, images: _Images, label_of: dict[int, int], seen: set[int]) -> tuple[str, str]:
    if not isinstance(entry, dict) or not _is_id(entry.get("id")):
        return "wrong type", f"needs an integer 'id', found {_show(entry)}"
    name = f"annotation {entry['id']}"
    for key in ("image_id", "category_id"):
        if not _is_id(entry.get(key)):
            return "wrong type", f"{name}: {key!r} must be an integer, found {_show(entry.get(key))}"
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        return "wrong type", f"{name}: 'bbox' must be 4 numbers (x, y, width, height), found {_show(box)}"
    if not _is_number(entry.get("area", 0)) or entry.get("iscrowd", 0) not in (0, 1):
        return "wrong type", f"{name}: 'area' must be a number and 'iscrowd' 0 or 1"
    if entry["id"] in seen:
        return "duplicate annotation id", f"{name}: the id is there twice"
    if not all(map(math.isfinite, (*box, entry.get("area", 0)))):
        return "box not finite", f"{name}: box {box} holds NaN or infinity"
    if box[2] <= 0 or box[3] <= 0:
        kind = "inverted box" if min(box[2:]) < 0 else "empty box"
        return kind, f"{name}: {kind} {box} (x, y, width, height)"
    if entry["category_id"] not in label_of:
        return "unknown category", f"{name}: category {entry['category_id']} is not among the categories"
    if entry["image_id"] not in images.number and entry["image_id"] not in images.bad_ids:
        return "unknown image", f"{name}: image {entry['image_id']} is not among the images"
    return "", ""


def _clip(table: dict[str, np.ndarray], images: _Images, faults: _Faults) -> tuple[dict[str, np.ndarray], int]:
    """Boxes within their pictures. Those outside are dropped; more than `SLACK` over the edge is a fault, too."""
    sizes = np.array(images.sizes, np.float64).reshape(-1, 2)[table["image"]]
    limits = np.concatenate([sizes, sizes], 1)
    boxes = table["box"]
    inside = np.clip(boxes, 0, limits)
    over = np.abs(boxes - inside).max(1, initial=0)
    empty = (inside[:, 2] <= inside[:, 0]) | (inside[:, 3] <= inside[:, 1])
    for row in np.flatnonzero(empty | (over > SLACK)):
        where = "lies outside" if empty[row] else f"reaches {over[row]:.1f} pixels out of"
        picture = images.files[table["image"][row]]
        corners = [round(float(value), 2) for value in boxes[row]]
        size = f"{sizes[row, 0]:.0f}x{sizes[row, 1]:.0f}"
        text = f"annotation {table['id'][row]}: box {corners} (left, top, right, bottom) {where} {picture} of {size}"
        faults.add("box outside the picture", text)
    table["box"] = inside
    return {key: values[~empty] for key, values in table.items()}, int(((over > 0) & ~empty).sum())


# Folders


def find_splits(root: str | os.PathLike[str]) -> dict[str, tuple[Path, Path]]:
    """JSON and folder of the splits "train" and "val" below `root`, in COCO's own layout.

    annotations/instances_<split>*.json beside a folder <split>* (train2017 ...) or images/<split>*.
    """
    root = Path(root).expanduser().absolute()
    if not root.is_dir():
        raise ValueError(f"{root}: no such data folder")
    found = {}
    for split in ("train", "val"):
        listed = sorted((root / "annotations").glob(f"instances_{split}*.json"))
        if len(listed) > 1:
            names = ", ".join(path.name for path in listed)
            raise ValueError(
                f"{root / 'annotations'}: several files for {split}: {names}; name one file and its folder"
            )
        for path in listed:
            name = path.stem.removeprefix("instances_")
            folders = [root / name, root / "images" / name]
            folder = next((folder for folder in folders if folder.is_dir()), None)
            if folder is None:
                raise ValueError(f"{path}: its folder of pictures is missing, looked for {folders[0]} and {folders[1]}")
            found[split] = (path, folder)
    if not found:
        raise ValueError(f"{root}: holds no annotations/instances_train*.json or instances_val*.json")
    return found


# Writing


def write(
    path: str | os.PathLike[str],
    *,
    images: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
    categories: list[dict[str, Any]],
    info: dict[str, Any] | None = None,
) -> None:
    """Write a COCO file, whole or not at all. ValueError if it would hold NaN or infinity."""
    content = {"info": info or {}, "images": images, "annotations": annotations, "categories": categories}
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    except ValueError as error:
        raise ValueError(f"{path}: not written, {error}") from error
    files.atomic_write(path, text)
