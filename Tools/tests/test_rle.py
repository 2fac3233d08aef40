"""Masks in COCO's run lengths, against pycocotools where it is there, else against stored text."""

from __future__ import annotations

import numpy as np
import pytest

from dlx import rle


def masks() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    made = [np.zeros((5, 4), bool), np.ones((5, 4), bool), np.eye(7, dtype=bool), np.zeros((1, 1), bool)]
    made += [generator.random((height, width)) < share for height, width, share in ((40, 30, 0.5), (3, 200, 0.02))]
    disc = np.hypot(*np.mgrid[-300:301, -400:401]) < 250  # runs long enough for three groups of bits
    return [*made, disc, ~disc]


def test_round_trip_and_plain_form():
    for mask in masks():
        assert np.array_equal(rle.decode(rle.encode(mask)), mask)
        runs = rle.run_lengths(mask)
        assert runs.sum() == mask.size and runs[1::2].sum() == mask.sum()
        assert np.array_equal(rle.decode({"size": list(mask.shape), "counts": runs.tolist()}), mask)


def test_runs_go_down_the_columns_and_begin_with_zeros():
    mask = np.array([[1, 0], [1, 1], [0, 1]], bool)
    assert rle.run_lengths(mask).tolist() == [0, 2, 2, 2]
    assert rle.encode(mask) == {"size": [3, 2], "counts": "0220"}


def test_agrees_with_pycocotools():
    reference = pytest.importorskip("pycocotools.mask", reason="pycocotools is not here")
    for mask in masks():
        expected = reference.encode(np.asfortranarray(mask.astype(np.uint8)))
        ours = rle.encode(mask)
        assert ours["counts"] == expected["counts"].decode() and ours["size"] == list(expected["size"])
        assert reference.area(ours) == mask.sum()
        assert np.array_equal(rle.decode(expected), mask)


@pytest.mark.parametrize(
    "value, words",
    [
        ({"size": [2, 2], "counts": [1, 2]}, "add up to 3, not to 2 x 2"),
        ({"size": [2, 2], "counts": [5, -1]}, "add up"),
        ({"size": [2], "counts": [4]}, "not a run-length"),
        ({"counts": [4]}, "not a run-length"),
        ({"size": [2, 2], "counts": "~"}, "character"),
        ({"size": [2, 2], "counts": "P"}, "end too early"),
    ],
)
def test_refuses(value, words):
    with pytest.raises(ValueError, match=words):
        rle.decode(value)
