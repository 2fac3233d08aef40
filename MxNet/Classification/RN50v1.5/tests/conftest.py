"""A small data set that a network learns in a few steps, packed once."""

from __future__ import annotations

import numpy as np
import pytest

from rn50_mxnet import packing

CLASSES = ["ant", "bee", "cat"]


def items(split: str, count: int, size: int = 28, channels: int = 1) -> list[packing.Item]:
    """Coarse patterns, one a class, under noise."""
    patterns = np.random.default_rng(1).integers(0, 160, (len(CLASSES), 4, 4, channels))
    found = []
    for number in range(count):
        rng = np.random.default_rng([number, len(split)])
        coarse = patterns[number % len(CLASSES)].repeat(size // 4, 0).repeat(size // 4, 1)
        pixels = (coarse + rng.integers(0, 95, coarse.shape)).astype(np.uint8)
        pixels = pixels[..., 0] if channels == 1 else pixels
        read = lambda pixels=pixels: packing.encode_array(pixels)  # noqa: E731
        found.append(packing.Item(f"{split}{number}", number % len(CLASSES), read))
    return found


@pytest.fixture(scope="session")
def grey(tmp_path_factory):
    """40 training and 23 validation pictures of 28 x 28, grey: no batch size divides them."""
    folder = tmp_path_factory.mktemp("grey")
    return packing.make(folder, CLASSES, {"train": items("train", 40), "val": items("val", 23)}, 1, 1, {})


@pytest.fixture(scope="session")
def colour(tmp_path_factory):
    """The same in colour, 40 x 40."""
    folder = tmp_path_factory.mktemp("colour")
    splits = {"train": items("train", 40, 40, 3), "val": items("val", 23, 40, 3)}
    return packing.make(folder, CLASSES, splits, 3, 1, {})
