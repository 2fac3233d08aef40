"""Pictures from RecordIO through ImageRecordIter or DALI, and synthetic ones: one interface for all.

    dataset = open_dataset("/data/mine")
    loader = build_loader(dataset, "train", batch_size=64, image_size=224, train=True, seed=1)
    for images, labels in loader.epoch(3, start_batch=10):     # resume in the middle of epoch 3
        ...

Images are float32 N C S S with values 0 ... 255 (the network's step normalises), labels float32 (N,). In training the
order and the augmentation depend on (seed, epoch) alone and the ragged tail is dropped. In evaluation every picture
comes once over all workers; the last batch is shorter.

A dataset is a folder with train.rec, train.idx, val.rec, val.idx and dataset.json, all written by `prepare`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mxnet as mx
import numpy as np

from dlx.draws import draws

from . import recordio
from .recordio import RecordError

BACKENDS = ("mxnet", "dali-cpu", "dali-gpu", "synthetic")
AUGMENTATIONS = ("none", "standard")
META = "dataset.json"
SMALL = 64  # below, pictures are shifted by PAD and mirrored; from here on a random part of them is scaled
PAD = 2
Batch = tuple[mx.nd.NDArray, mx.nd.NDArray]


@dataclass(frozen=True)
class Dataset:
    """A checked folder; ``folder`` None is synthetic. ``counts`` has the pictures of each split."""

    folder: Path | None
    classes: list[str]
    channels: int
    counts: dict[str, int]
    skipped: dict[str, int] = field(default_factory=dict)
    sha256: str = ""

    def path(self, split: str) -> Path:
        """The split's .rec file. RecordError names the splits there are."""
        if split not in self.counts:
            raise RecordError(f"{self.folder or 'synthetic'}: no split {split!r}, only {', '.join(self.counts)}")
        return Path(self.folder or "") / f"{split}.rec"


def synthetic(num_classes: int = 1000, num_samples: int = 12800, channels: int = 3) -> Dataset:
    """Noise with labels, made once and fed again and again: what is measured is the network."""
    names = [f"class_{number}" for number in range(num_classes)]
    return Dataset(None, names, channels, {"train": num_samples, "val": num_samples})


def open_dataset(folder: str | os.PathLike[str], *, check: bool = False) -> Dataset:
    """Read dataset.json and check the files behind it: their sizes, or with ``check`` every record.

    RecordError names the file. A folder without dataset.json, of somebody else's im2rec, gets a full check, for which
    `classes.txt` (a name a line) must say what the labels mean.
    """
    folder = Path(folder)
    meta = folder / META
    if not meta.is_file():
        return _foreign(folder)
    try:
        content = json.loads(meta.read_text())
        classes, splits, channels = content["classes"], content["splits"], content["channels"]
        sizes = {name: (split["records"], split["bytes"]) for name, split in splits.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{meta}: not the description of a data set ({error!r})") from None
    counts = {}
    for name, (records, size) in sizes.items():
        path = folder / f"{name}.rec"
        if check or not path.is_file() or path.stat().st_size != size:
            found = len(recordio.check(path, len(classes)))  # names what is wrong, where something is
            if found != records:
                raise RecordError(f"{path}: {found} records, {META} says {records}")
        counts[name] = records
    skipped = {name: len(split.get("skipped", [])) for name, split in splits.items()}
    return Dataset(folder, list(classes), channels, counts, skipped, content.get("sha256", ""))


def _foreign(folder: Path) -> Dataset:
    names = folder / "classes.txt"
    splits = [name for name in ("train", "val") if (folder / f"{name}.rec").is_file()]
    if not splits or not names.is_file():
        raise RecordError(f"{folder}: neither {META} nor train.rec/val.rec with classes.txt; run `prepare` first")
    classes = [line for line in names.read_text().splitlines() if line.strip()]
    counts = {name: len(recordio.check(folder / f"{name}.rec", len(classes))) for name in splits}
    return Dataset(folder, classes, 3, counts)


class Loader:
    """Batches of a split for one of ``num_workers`` workers. ``len`` is the batches of an epoch, equal on all."""

    def __init__(self, dataset: Dataset, split: str, batch_size: int, train: bool, rank: int, num_workers: int) -> None:
        dataset.path(split)
        self.dataset, self.split, self.batch_size, self.train = dataset, split, batch_size, train
        self.rank, self.num_workers = rank, num_workers
        count = dataset.counts[split]
        self.samples = self.share(count, rank, num_workers)
        least = min(self.share(count, other, num_workers) for other in range(num_workers))
        if not train:  # MXNet's iterator does not make a batch of fewer pictures than it asks for
            self.batch_size = batch_size = max(1, min(batch_size, self.samples))
        self.batches = least // batch_size if train else -(-self.samples // batch_size)
        if train and not self.batches:
            raise RecordError(
                f"{dataset.path(split)}: {count} pictures make no batch of {batch_size} for each of {num_workers} "
                "workers"
            )

    def __len__(self) -> int:
        return self.batches

    @staticmethod
    def share(count: int, rank: int, num_workers: int) -> int:
        """How many of ``count`` pictures a worker reads: all the same number, but the last one what is left."""
        share = -(-count // num_workers)
        return min(share, max(0, count - rank * share))

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from ``start_batch`` on."""
        raise NotImplementedError


class RecordLoader(Loader):
    """ImageRecordIter: MXNet decodes in its own threads.

    Each epoch has an iterator of its own, seeded by (seed, epoch): so an epoch does not depend on those before it.
    """

    def __init__(self, dataset: Dataset, split: str, options: dict, **general) -> None:
        super().__init__(dataset, split, **general)
        self.options = options

    def _iterator(self, number: int) -> mx.io.DataIter:
        size, resize, workers, seed = (self.options[key] for key in ("size", "resize", "workers", "seed"))
        path = self.dataset.path(self.split)
        settings = {
            "path_imgrec": str(path), "path_imgidx": str(recordio.index_path(path)), "label_width": 1,
            "data_shape": (self.dataset.channels, size, size), "batch_size": self.batch_size, "round_batch": True,
            "num_parts": self.num_workers, "part_index": self.rank, "preprocess_threads": max(1, workers),
            "prefetch_buffer": 4, "verbose": False, "ctx": "cpu",
        }  # fmt: skip
        if self.train:
            order, pixels = (int(value * 2**31) for value in draws(seed, number, 0, 2)[0])
            settings |= {"shuffle": True, "seed": order, "seed_aug": pixels}
        if self.train and self.options["augmentation"] == "standard":
            settings["rand_mirror"] = True
            if size < SMALL:
                settings |= {"pad": PAD, "fill_value": 0, "rand_crop": True, "resize": resize}
            else:
                settings |= {
                    "random_resized_crop": True, "min_random_area": 0.08, "max_random_area": 1.0,
                    "min_aspect_ratio": 3 / 4, "max_aspect_ratio": 4 / 3,
                }  # fmt: skip
        else:
            settings["resize"] = resize
        return mx.io.ImageRecordIter(**settings)

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        for index, batch in enumerate(self._iterator(number)):
            if index >= self.batches:
                return
            if index < start_batch:
                continue
            images, labels = batch.data[0], batch.label[0].reshape((-1,))
            if batch.pad and not self.train:
                kept = self.batch_size - batch.pad
                images, labels = images[:kept], labels[:kept]
            yield images, labels


class SyntheticLoader(Loader):
    """The same noise in every batch."""

    def __init__(self, dataset: Dataset, split: str, size: int, **general) -> None:
        super().__init__(dataset, split, **general)
        shape = (self.batch_size, dataset.channels, size, size)
        values = draws(0, 0, 0, int(np.prod(shape)))[0].reshape(shape)
        self.images = mx.nd.array(values * 255)
        self.labels = mx.nd.array(np.arange(self.batch_size) % len(dataset.classes))

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        for _ in range(start_batch, self.batches):
            yield self.images, self.labels


def default_resize(size: int) -> int:
    """The short side before evaluation's crop of ``size`` pixels."""
    return size + 32 if size >= SMALL else size


def build_loader(
    dataset: Dataset,
    split: str,
    *,
    batch_size: int,
    image_size: int,
    train: bool,
    backend: str = "mxnet",
    augmentation: str = "standard",
    resize: int | None = None,
    seed: int = 0,
    workers: int = 2,
    rank: int = 0,
    num_workers: int = 1,
) -> Loader:
    """The loader of a split. ``workers`` are decoding threads. Evaluation scales the short side to ``resize`` pixels
    and cuts out the centre; so does training without augmentation."""
    if backend not in BACKENDS:
        raise ValueError(f"data backend {backend!r} is none of {', '.join(BACKENDS)}")
    if augmentation not in AUGMENTATIONS:
        raise ValueError(f"augmentation {augmentation!r} is none of {', '.join(AUGMENTATIONS)}")
    resize = resize or default_resize(image_size)
    if resize < image_size:
        raise ValueError(f"resize {resize} is smaller than image_size {image_size}")
    general = {"batch_size": batch_size, "train": train, "rank": rank, "num_workers": num_workers}
    if backend == "synthetic" or dataset.folder is None:
        return SyntheticLoader(dataset, split, image_size, **general)
    options = {"size": image_size, "resize": resize, "augmentation": augmentation, "seed": seed, "workers": workers}
    if backend == "mxnet":
        return RecordLoader(dataset, split, options, **general)
    from . import dali  # imported here, since DALI is an option

    return dali.DaliLoader(dataset, split, options, gpu=backend == "dali-gpu", **general)
