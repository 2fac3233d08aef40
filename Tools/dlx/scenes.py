"""Detection data by cut and paste: objects with masks pasted on backgrounds, written as JPEG and COCO JSON with masks.

Dwibedi, Misra, Hebert, Cut, Paste and Learn, ICCV 2017 (without blending). Every scene is a function of (seed, split,
number), whatever the number of processes. An object's mask, box and area are of what is visible of it; a place where it
would hide an earlier one, or lie outside, by more than `min_visible` allows is not taken.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image
from tqdm import tqdm

from . import coco, files, rle
from .draws import draws

SPLITS = ("train", "val")
STAMP = "scenes.json"
PART = 100  # scenes that are done or not done when making them is interrupted
VERSION = 1  # of how scenes come about: another one makes other pictures
ATTEMPTS = 12  # places tried for an object before it is given up
MIN_PIXELS = 24  # that must be visible of an object


@dataclass(frozen=True)
class SceneOptions:
    """Of a set: scenes per split, sides in pixels, objects a scene, an object's longer side as a share of the scene's
    shorter one (log-uniform), rotation in degrees to both sides, the least visible share of an object, JPEG quality.
    """

    train: int = 2000
    val: int = 400
    seed: int = 0
    min_side: int = 300
    max_side: int = 300
    min_objects: int = 1
    max_objects: int = 8
    min_scale: float = 0.12
    max_scale: float = 0.6
    rotation: float = 25.0
    flip: bool = True
    min_visible: float = 0.25
    quality: int = 90

    def __post_init__(self) -> None:
        if min(self.train, self.val) < 1:
            raise ValueError(f"a set needs scenes in both splits, got train {self.train}, val {self.val}")
        for low, high in (("min_side", "max_side"), ("min_objects", "max_objects"), ("min_scale", "max_scale")):
            if not 0 < getattr(self, low) <= getattr(self, high):
                raise ValueError(f"need 0 < {low} <= {high}, got {getattr(self, low)} and {getattr(self, high)}")
        if not 0 < self.min_visible <= 1 or not 1 <= self.quality <= 95:
            raise ValueError(f"need 0 < min_visible <= 1 and quality 1 to 95, got {self.min_visible}, {self.quality}")


class Item(NamedTuple):
    """A cut-out: label 0 to C - 1, its name, uint8 (H, W, 4) with alpha."""

    label: int
    name: str
    pixels: np.ndarray


class Source(Protocol):
    """What scenes are made of. It goes to worker processes by pickle, so it holds paths rather than pictures.

    `identity` tells two sources of different pictures apart.
    """

    name: str
    classes: list[str]
    identity: str

    def background(self, split: str, width: int, height: int, generator: np.random.Generator) -> np.ndarray:
        """uint8 (height, width, 3)."""
        ...

    def item(self, split: str, generator: np.random.Generator) -> Item: ...


class Placed(NamedTuple):
    """An object in a scene: its label, name, bool (H, W) visible mask, and the visible share of its pixels."""

    label: int
    name: str
    mask: np.ndarray
    visibility: float


def scene_generator(seed: int, split: str, number: int) -> np.random.Generator:
    """The random numbers of one scene."""
    first, second = (draws(seed, 0, number, 2, SPLITS.index(split))[0] * 2**32).astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([first, second])))


# One scene


def compose(
    source: Source, split: str, options: SceneOptions, generator: np.random.Generator
) -> tuple[np.ndarray, list[Placed]]:
    """A scene, uint8 (H, W, 3), and its objects in the order they were pasted."""
    width, height = (int(side) for side in generator.integers(options.min_side, options.max_side + 1, 2))
    scene = source.background(split, width, height, generator)
    placed: list[Placed] = []
    sizes: list[int] = []  # pixels of each object if nothing hid it
    for _ in range(int(generator.integers(options.min_objects, options.max_objects + 1))):
        item = source.item(split, generator)
        cut_out = transform(item.pixels, min(width, height), options, generator)
        solid = cut_out[..., 3] >= 128
        whole = int(solid.sum())
        for _ in range(ATTEMPTS):
            left, top = _corner(cut_out.shape, width, height, generator)
            mask = np.zeros((height, width), bool)
            inner, outer = _overlap(cut_out.shape, width, height, left, top)
            mask[inner] = solid[outer]
            left_over = [int((other.mask & ~mask).sum()) for other in placed]
            if mask.sum() >= _least(options, whole) and all(
                pixels >= _least(options, size) for pixels, size in zip(left_over, sizes, strict=True)
            ):
                _paste(scene, cut_out, inner, outer)
                placed = [
                    other._replace(mask=other.mask & ~mask, visibility=pixels / size)
                    for other, pixels, size in zip(placed, left_over, sizes, strict=True)
                ]
                placed.append(Placed(item.label, item.name, mask, mask.sum() / whole))
                sizes.append(whole)
                break
    return scene, placed


def _least(options: SceneOptions, pixels: int) -> float:
    """Pixels that must be visible of an object that has so many."""
    return max(MIN_PIXELS, options.min_visible * pixels)


def transform(pixels: np.ndarray, side: int, options: SceneOptions, generator: np.random.Generator) -> np.ndarray:
    """A cut-out in a random size, turned, perhaps mirrored, in slightly other colours; cropped to what is solid."""
    low, high = np.log(options.min_scale), np.log(options.max_scale)
    longer = side * np.exp(generator.uniform(low, high))
    angle = generator.uniform(-options.rotation, options.rotation)
    mirrored = options.flip and generator.random() < 0.5
    gains = generator.uniform(0.8, 1.2) * generator.uniform(0.92, 1.08, 3)
    scale = longer / max(pixels.shape[:2])
    size = [max(4, round(length * scale)) for length in pixels.shape[1::-1]]
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    if mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = image.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    turned = np.array(image)
    turned[..., :3] = np.clip(turned[..., :3] * gains, 0, 255)
    rows, columns = (np.flatnonzero((turned[..., 3] >= 16).any(axis)) for axis in (1, 0))
    if not len(rows):
        return turned
    return turned[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _corner(shape: tuple[int, ...], width: int, height: int, generator: np.random.Generator) -> tuple[int, int]:
    """Left and top; the centre is inside the scene, and seldom much of the object outside."""
    corner = []
    for extent, length in ((width, shape[1]), (height, shape[0])):
        margin = 0.15 * length
        low, high = -margin, extent - length + margin
        corner.append(round(generator.uniform(low, high) if low < high else (extent - length) / 2))
    return corner[0], corner[1]


def _overlap(
    shape: tuple[int, ...], width: int, height: int, left: int, top: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """(rows, columns) of the scene that a cut-out at this place covers, and the same of the cut-out."""
    top_edge, bottom_edge = max(0, top), min(height, top + shape[0])
    left_edge, right_edge = max(0, left), min(width, left + shape[1])
    inner = slice(top_edge, bottom_edge), slice(left_edge, right_edge)
    return inner, (slice(top_edge - top, bottom_edge - top), slice(left_edge - left, right_edge - left))


def _paste(scene: np.ndarray, cut_out: np.ndarray, inner: tuple[slice, slice], outer: tuple[slice, slice]) -> None:
    part = cut_out[outer].astype(np.float32)
    share = part[..., 3:] / 255
    mixed = scene[inner] * (1 - share) + part[..., :3] * share
    scene[inner] = np.rint(mixed).astype(np.uint8)


def bounding_box(mask: np.ndarray) -> list[int]:
    """COCO's x, y, width, height around the pixels of a mask that holds some."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    corner = [int(columns[0]), int(rows[0])]
    return [*corner, int(columns[-1]) + 1 - corner[0], int(rows[-1]) + 1 - corner[1]]


# Many scenes


def generate(
    folder: str | os.PathLike[str], source: Source, options: SceneOptions, processes: int | None = None
) -> Path:
    """A folder in COCO's layout with the set, made whole or not at all; what an interrupted run made is kept and used.

    annotations/instances_{train,val}.json, {train,val}/000000.jpg, and scenes.json, which says how it was made. A set
    that is there is left alone if it is the same, else ValueError.
    """
    folder = Path(folder).expanduser().absolute()
    wanted = request(source, options)
    with files.lock(folder.with_name(folder.name + ".lock"), message=f"waiting for another process to make {folder}"):
        if folder.is_dir() and any(folder.iterdir()):
            found = _read(folder / STAMP)
            if found.get("request") == wanted:
                return folder
            raise ValueError(f"{folder}: holds something else than the {source.name} asked for; choose another folder")
        partial = folder.with_name(folder.name + ".partial")
        if _read(partial / "request.json") != wanted:
            shutil.rmtree(partial, ignore_errors=True)
        for name in (*SPLITS, "parts", "annotations"):
            (partial / name).mkdir(parents=True, exist_ok=True)
        files.atomic_write(partial / "request.json", json.dumps(wanted))
        _make_parts(partial, source, options, processes)
        _assemble(partial, source, options, wanted)
        if folder.is_dir():
            folder.rmdir()
        os.replace(partial, folder)
    return folder


def request(source: Source, options: SceneOptions) -> dict[str, Any]:
    """What fully determines a set."""
    asked = {"set": source.name, "version": VERSION, "source": source.identity, "classes": source.classes}
    return asked | {"options": asdict(options)}


def identity(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over a generated set's annotations and recipe, for run records. ValueError if `folder` is none."""
    folder = Path(folder)
    if not (folder / STAMP).is_file():
        raise ValueError(f"{folder}: not a generated set of scenes")
    return hashlib.sha256((folder / STAMP).read_bytes()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _parts(options: SceneOptions) -> Iterator[tuple[str, int, int]]:
    """(split, first scene, scenes)."""
    for split in SPLITS:
        total = getattr(options, split)
        yield from ((split, first, min(PART, total - first)) for first in range(0, total, PART))


def _part_file(folder: Path, split: str, first: int) -> Path:
    return folder / "parts" / f"{split}-{first:06d}.json"


def _make_parts(folder: Path, source: Source, options: SceneOptions, processes: int | None) -> None:
    jobs = [part for part in _parts(options) if not _part_file(folder, part[0], part[1]).is_file()]
    processes = min(processes or os.cpu_count() or 1, max(1, len(jobs)))
    total, left = options.train + options.val, sum(count for _, _, count in jobs)
    with tqdm(total=total, initial=total - left, unit="scene", desc=source.name, disable=None) as bar:
        if processes == 1:
            for job in jobs:
                bar.update(_make_part(folder, source, options, job))
            return
        # Not forked: the caller may have threads, of which a forked child has none but all their locks.
        context = multiprocessing.get_context("spawn")
        workers = ProcessPoolExecutor(processes, context, _start_worker, (folder, source, options))
        try:
            for made in workers.map(_work, jobs):
                bar.update(made)
        finally:
            workers.shutdown(cancel_futures=True)  # parts that were begun are finished, and kept


_worker: tuple[Path, Source, SceneOptions] | None = None


def _start_worker(folder: Path, source: Source, options: SceneOptions) -> None:
    global _worker
    _worker = (folder, source, options)
    # Ctrl-C goes to all processes: a worker that it hit while it took a job would leave the others waiting for ever.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(job: tuple[str, int, int]) -> int:
    return _make_part(*_worker, job)


def _make_part(folder: Path, source: Source, options: SceneOptions, job: tuple[str, int, int]) -> int:
    split, first, count = job
    scenes = []
    for number in range(first, first + count):
        scene, placed = compose(source, split, options, scene_generator(options.seed, split, number))
        name = f"{number:06d}.jpg"
        Image.fromarray(scene).save(folder / split / name, quality=options.quality)
        objects = [
            {
                "category_id": o.label + 1,
                "bbox": bounding_box(o.mask),
                "area": int(o.mask.sum()),
                "iscrowd": 0,
                "segmentation": rle.encode(o.mask),
                "visibility": round(float(o.visibility), 4),
                "item": o.name,
            }
            for o in placed
        ]
        scenes.append({"file_name": name, "width": scene.shape[1], "height": scene.shape[0], "objects": objects})
    files.atomic_write(_part_file(folder, split, first), json.dumps(scenes, separators=(",", ":")))
    return count


def _assemble(folder: Path, source: Source, options: SceneOptions, wanted: dict[str, Any]) -> None:
    """The JSON of each split out of its parts, and the stamp."""
    categories = [{"id": row + 1, "name": name} for row, name in enumerate(source.classes)]
    stamp: dict[str, Any] = {"request": wanted, "splits": {}}
    for split in SPLITS:
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for part, first, _ in _parts(options):
            if part != split:
                continue
            for scene in json.loads(_part_file(folder, split, first).read_text()):
                number = len(images) + 1
                for found in scene.pop("objects"):
                    annotations.append({"id": len(annotations) + 1, "image_id": number, **found})
                images.append({"id": number, **scene})
        path = folder / "annotations" / f"instances_{split}.json"
        coco.write(
            path, images=images, annotations=annotations, categories=categories, info={"description": source.name}
        )
        stamp["splits"][split] = {
            "scenes": len(images), "objects": len(annotations), "annotations_sha256": files.sha256(path)
        }  # fmt: skip
    files.atomic_write(folder / STAMP, json.dumps(stamp, indent=1) + "\n")
    shutil.rmtree(folder / "parts")
    (folder / "request.json").unlink()
