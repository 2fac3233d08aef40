"""Pictures and their order: Fashion-MNIST, class folders of picture files, synthetic; nothing here needs Paddle.

    data/train/<class>/*.jpg     data/val/<class>/*.jpg       (also validation or test for the second)

Order and augmentation are functions of (seed, epoch, sample), so neither workers, devices nor a restart change them.
N batch, H height, W width, C channels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlx import data as datasets
from dlx import vision
from dlx.draws import draws, permutation
from dlx.inspection import inspect_all

FASHION_CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
                   "Ankle boot"]  # fmt: skip
FOLDERS = {"train": ("train",), "val": ("val", "validation", "test")}
SHIFT = 2  # pixels, of pictures in memory
SHOWN_FAULTS = 20


class DataError(ValueError):
    """Data that cannot be used; the message lists the faults with their paths."""


@dataclass
class Arrays:
    """A split in memory: uint8 images (N, H, W, C), int64 labels (N,)."""

    name: str
    classes: list[str]
    images: np.ndarray
    labels: np.ndarray
    mean: tuple[float, ...] = (0.286,)  # Fashion-MNIST's, of its training pictures
    std: tuple[float, ...] = (0.353,)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        return self.images.shape[-1]

    def batch(self, epoch: int, indices: np.ndarray, size: int, resize: int, seed: int, augment: bool) -> np.ndarray:
        """uint8 (N, C, size, size); augmented by a shift of up to two pixels (black comes in) and a mirror."""
        chosen = self.images[indices]
        height, width = chosen.shape[1:3]
        if (height, width) != (size, size):
            raise ValueError(f"{self.name} has pictures of {width} x {height}; image_size {size} is not offered")
        if augment:
            values = draws(seed, epoch, indices, 3)
            offset = (values[:, :2] * (2 * SHIFT + 1)).astype(np.int64)
            padded = np.pad(chosen, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
            rows = offset[:, :1] + np.arange(height)
            columns = offset[:, 1:2] + np.arange(width)
            columns = np.where(values[:, 2:] < 0.5, columns[:, ::-1], columns)
            chosen = padded[np.arange(len(indices))[:, None, None], rows[:, :, None], columns[:, None, :]]
        return np.ascontiguousarray(chosen.transpose(0, 3, 1, 2))


@dataclass
class Synthetic:
    """Pictures made up from their label and number, so that a model can learn them."""

    name: str
    classes: list[str]
    size: int
    channels: int = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __len__(self) -> int:
        return self.size

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self.size) % len(self.classes)

    def batch(self, epoch: int, indices: np.ndarray, size: int, resize: int, seed: int, augment: bool) -> np.ndarray:
        """uint8 (N, C, size, size): a coarse pattern of the class, brightened by a draw of the sample."""
        patterns = draws(0, 0, self.labels[indices], self.channels * 16).reshape(-1, self.channels, 4, 4)
        cells = np.arange(size) * 4 // size
        light = draws(seed, 0, indices, 1)[:, :, None, None]
        return ((patterns[:, :, cells[:, None], cells] * 0.75 + light * 0.25) * 255).astype(np.uint8)


@dataclass
class Pictures:
    """Picture files. `plain` (N,) tells which of them DALI decodes as Pillow does."""

    name: str
    classes: list[str]
    paths: list[str]
    labels: np.ndarray
    sizes: np.ndarray  # (N, 2): width and height of the upright picture
    plain: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    channels: int = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, epoch: int, indices: np.ndarray, size: int, resize: int, seed: int, augment: bool) -> np.ndarray:
        """uint8 (N, 3, size, size); augmented by a random resized crop and a mirror."""
        out = np.empty((len(indices), 3, size, size), np.uint8)
        for row, index in enumerate(indices):
            picture = vision.decode_image(self.paths[index])
            if augment:
                left, top, width, height, mirror = self.window(epoch, int(index), seed)
                box = (left, top, left + width, top + height)
                picture = picture.resize((size, size), vision.INTERPOLATIONS["bilinear"], box=box)
                pixels = np.asarray(picture)[:, ::-1] if mirror else np.asarray(picture)
            else:
                pixels = np.asarray(vision.resize_and_crop(picture, resize, size))
            out[row] = pixels.transpose(2, 0, 1)
        return out

    def window(self, epoch: int, index: int, seed: int) -> tuple[int, int, int, int, bool]:
        """left, top, width, height and mirrored, of the sample's random crop (Szegedy et al. 2015): 8 to 100 % of the
        area at an aspect ratio of 3/4 to 4/3; the largest centred one where none of ten tries fits."""
        full_width, full_height = (int(value) for value in self.sizes[index])
        values = draws(seed, epoch, index, 41)[0]
        mirror = bool(values[40] < 0.5)
        for area, ratio, across, down in values[:40].reshape(10, 4):
            target = full_width * full_height * (0.08 + 0.92 * area)
            aspect = np.exp((2 * ratio - 1) * np.log(4 / 3))
            width, height = round(np.sqrt(target * aspect)), round(np.sqrt(target / aspect))
            if 0 < width <= full_width and 0 < height <= full_height:
                left, top = int(across * (full_width - width + 1)), int(down * (full_height - height + 1))
                return left, top, width, height, mirror
        width = min(full_width, int(full_height * 4 / 3))
        height = min(full_height, int(full_width * 4 / 3))
        return (full_width - width) // 2, (full_height - height) // 2, width, height, mirror


Split = Arrays | Synthetic | Pictures


def open_data(
    data: str, data_dir: str | None = None, *, num_classes: int = 1000, num_samples: int = 12800, check: str = "headers"
) -> dict[str, Split]:
    """The splits by name: "train" and "val" of a data set, or those that a folder has."""
    if data_dir is not None:
        return dict(read_folder(data_dir, check=check))
    if data == "fashion-mnist":
        return dict(read_fashion_mnist())
    if data == "synthetic":
        classes = [f"class_{number}" for number in range(num_classes)]
        return {
            name: Synthetic(name, classes, count)
            for name, count in (("train", num_samples), ("val", max(num_classes, num_samples // 8)))
        }
    raise ValueError(f"data {data!r} is neither fashion-mnist nor synthetic; your own pictures are --data_dir FOLDER")


def read_fashion_mnist() -> dict[str, Arrays]:
    """60,000 training and 10,000 test pictures (28 x 28, grey), fetched if they are not here."""
    folder = datasets.prepare("fashion-mnist")
    splits = {}
    for name, prefix in (("train", "train"), ("val", "t10k")):
        images = datasets.read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = datasets.read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz").astype(np.int64)
        if len(images) != len(labels):
            raise DataError(f"{folder}: {len(images)} {name} images but {len(labels)} labels")
        splits[name] = Arrays(name, FASHION_CLASSES, images[..., None], labels)
    return splits


def read_folder(root: str | os.PathLike[str], check: str = "headers") -> dict[str, Pictures]:
    """The splits below `root`. DataError lists all faults together: classes without pictures or in one split only,
    and unreadable files. `check`: "headers" opens each file, "full" decodes it."""
    base = Path(root).expanduser().absolute()
    if not base.is_dir():
        raise DataError(f"{base}: no such data folder")
    faults: list[str] = []
    splits: dict[str, Pictures] = {}
    for split, names in FOLDERS.items():
        folder = next((base / name for name in names if (base / name).is_dir()), None)
        if folder is not None:
            splits[split] = _read_split(split, folder, check, faults)
    if not splits:
        raise DataError(f"{base}: holds neither a folder train nor val with one folder per class inside")
    sets = [set(split.classes) for split in splits.values()]
    if len(sets) == 2:
        faults += [f"{base}: class {name!r} is in one of train and val only" for name in sorted(sets[0] ^ sets[1])]
    if faults:
        rest = len(faults) - SHOWN_FAULTS
        tail = [f"  and {rest} more"] if rest > 0 else []
        raise DataError("\n".join([f"{base}: {len(faults)} fault(s) in the data", *faults[:SHOWN_FAULTS], *tail]))
    return splits


def _read_split(split: str, folder: Path, check: str, faults: list[str]) -> Pictures:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    faults += [] if classes else [f"{folder}: holds no class folders"]
    names, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(
            path.relative_to(folder).as_posix()
            for path in (folder / name).rglob("*")
            if path.suffix.lower() in vision.IMAGE_SUFFIXES and not path.name.startswith(".")
        )
        faults += [] if found else [f"{folder / name}: class without pictures"]
        names += found
        labels += [label] * len(found)
    looks, reasons = inspect_all(folder, names, check)
    faults += [reason for reason in reasons if reason]
    paths = [str(folder / name) for name in names]
    return Pictures(split, classes, paths, np.array(labels, np.int64), looks[:, :2], looks[:, 2] > 0)


@dataclass(frozen=True)
class Order:
    """Which samples a process takes in which batch.

    Training: global batch b of an epoch is the same samples on any number of processes, the ragged tail is left out.
    Evaluation: every sample once over all processes; the last batches are filled up with -1.
    """

    count: int
    batch_size: int
    train: bool
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        needed = self.batch_size * self.world_size
        if self.count < (needed if self.train else 1):
            raise DataError(f"{self.count} samples do not fill one batch of {needed}: lower --batch_size")

    def __len__(self) -> int:
        together = self.batch_size * self.world_size
        return self.count // together if self.train else -(-self.count // together)

    def table(self, epoch: int) -> np.ndarray:
        """int64 (batches, batch_size) of sample numbers."""
        together = len(self) * self.batch_size * self.world_size
        if self.train:
            order = permutation(self.seed, epoch, self.count)[:together]
            return order.reshape(len(self), self.world_size, self.batch_size)[:, self.rank]
        order = np.full(together, -1, np.int64)
        order[: self.count] = np.arange(self.count)
        return order.reshape(len(self), self.batch_size, self.world_size)[:, :, self.rank]


class Batches:
    """The batches of one epoch from `start` on; an item is (uint8 (N, C, size, size), int64 labels (N,))."""

    def __init__(
        self, split: Split, order: Order, size: int, resize: int, augment: bool, epoch: int = 0, start: int = 0
    ) -> None:
        self.split, self.order, self.size, self.resize, self.augment = split, order, size, resize, augment
        self.epoch, self.table = epoch, order.table(epoch)[start:]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        row = self.table[number]
        given = np.maximum(row, 0)  # padding is any picture with the label -1
        images = self.split.batch(self.epoch, given, self.size, self.resize, self.order.seed, self.augment)
        return images, np.where(row >= 0, self.split.labels[given], -1).astype(np.int64)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[number] for number in range(len(self)))
