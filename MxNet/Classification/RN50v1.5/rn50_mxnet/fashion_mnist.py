"""Fashion-MNIST as RecordIO: the data that the quick start, the tests and the README's numbers are about."""

from __future__ import annotations

from pathlib import Path

from dlx import data as datasets
from dlx import paths
from dlx.files import lock

from .data import META, Dataset, open_dataset
from .packing import Item, Splits, encode_array, make

FASHION_MNIST = "fashion-mnist"
FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def fashion_mnist_folder() -> Path:
    """Where the prepared Fashion-MNIST lies."""
    return paths.home() / "recordio" / "fashion-mnist-1"


def fashion_mnist_items(source: str | None = None) -> tuple[list[str], Splits]:
    """The 60,000 and 10,000 pictures as items, PNG and so without loss."""
    where = datasets.prepare(FASHION_MNIST, source=source)
    splits: Splits = {}
    for name, prefix in (("train", "train"), ("val", "t10k")):
        images = datasets.read_idx(where / f"{prefix}-images-idx3-ubyte.gz")
        labels = datasets.read_idx(where / f"{prefix}-labels-idx1-ubyte.gz")
        splits[name] = [
            Item(f"{name}/{row}", int(label), lambda image=image: encode_array(image, compress_level=1))
            for row, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
    return list(FASHION_CLASSES), splits


def prepare_fashion_mnist(source: str | None = None, seed: int = 1) -> Dataset:
    """Fashion-MNIST's RecordIO files, made once."""
    folder = fashion_mnist_folder()
    with lock(folder.with_suffix(".lock"), message="waiting for another process that packs Fashion-MNIST"):
        if (folder / META).is_file():
            return open_dataset(folder)
        classes, splits = fashion_mnist_items(source)
        return make(folder, classes, splits, 1, seed, {"encoding": "png"})
