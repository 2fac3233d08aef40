"""Resizing against sampling written out in NumPy, and the sizes against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tf_ssd import preprocessing as pp
from tf_ssd.preprocessing.resize import METHODS, resize, resize_masks


def places(size, target, align_corners):
    """Where each pixel of the target lies among the pixels of the source."""
    at = np.arange(target, dtype=float)
    if align_corners:
        return at * ((size - 1) / (target - 1) if target > 1 else 0)
    return (at + 0.5) * size / target - 0.5


def along(image, axis, target, align_corners, nearest):
    size = image.shape[axis]
    at = np.clip(places(size, target, align_corners), 0, size - 1)
    if nearest:
        at = np.floor(at + 0.5) if align_corners else np.floor(places(size, target, False) + 0.5)
        return np.take(image, np.clip(at, 0, size - 1).astype(int), axis)
    low = np.floor(at).astype(int)
    share = (at - low).reshape([-1 if i == axis else 1 for i in range(image.ndim)])
    return np.take(image, low, axis) * (1 - share) + np.take(image, np.minimum(low + 1, size - 1), axis) * share


def sampled(image, size, align_corners, nearest=False):
    return along(along(image, 0, size[0], align_corners, nearest), 1, size[1], align_corners, nearest)


@pytest.fixture(scope="module")
def picture():
    return np.random.default_rng(1).integers(0, 256, (21, 34, 3)).astype(np.float32)


@pytest.mark.parametrize("size", [(21, 34), (40, 60), (9, 13), (1, 50)])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "nearest", 0, 1])
def test_sampling(picture, method, align_corners, size):
    nearest = method in ("nearest", 1)
    found = np.asarray(resize(picture, size, method, align_corners))
    np.testing.assert_allclose(found, sampled(picture.astype(float), size, align_corners, nearest), atol=2e-3)


@pytest.mark.parametrize("method", [*METHODS, 0, 1, 2, 3])
@pytest.mark.parametrize("align_corners", [False, True])
def test_every_method_keeps_a_flat_picture_flat(method, align_corners):
    found = np.asarray(resize(np.full((10, 14, 2), 50, np.float32), (23, 9), method, align_corners))
    np.testing.assert_allclose(found, 50, rtol=1e-5)
    np.testing.assert_array_equal(
        resize(np.eye(6, dtype=np.float32)[..., None], (6, 6), method, align_corners)[..., 0], np.eye(6)
    )


def test_area_is_the_mean_and_masks_keep_their_values(picture):
    found = np.asarray(resize(picture[:20], (10, 17), "area"))
    np.testing.assert_allclose(found, picture[:20].reshape(10, 2, 17, 2, 3).mean((1, 3)), rtol=1e-5)
    masks = np.random.default_rng(0).integers(0, 5, (3, 20, 30)).astype(np.uint8)
    resized = np.asarray(resize_masks(masks, (33, 11)))
    assert resized.dtype == np.uint8 and set(np.unique(resized)) <= set(np.unique(masks))
    np.testing.assert_array_equal(resized[2], sampled(masks[2][..., None], (33, 11), False, True)[..., 0])
    assert resize_masks(masks[:0], (5, 6)).shape == (0, 5, 6)


def expected_range(size, low, high):
    scale = Fraction(1)
    if low is not None:
        scale = Fraction(low, min(size))
    if high is not None:
        scale = min(scale, Fraction(high, max(size)))
    return tuple(max(round(side * scale), 1) for side in size)


@pytest.mark.parametrize("size", [(21, 34), (40, 40), (60, 17)])
@pytest.mark.parametrize("low", [None, 20, 50])
@pytest.mark.parametrize("high", [None, 30, 64])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("with_masks", [False, True])
def test_resize_to_range(size, low, high, pad, with_masks):
    generator = np.random.default_rng(2)
    image = generator.integers(0, 256, (*size, 3)).astype(np.float32)
    masks = generator.integers(0, 2, (2, *size)).astype(np.uint8) if with_masks else None
    options = {"min_dimension": low, "max_dimension": high, "pad_to_max_dimension": pad}
    if pad and high is None:
        with pytest.raises(ValueError, match="pad_to_max_dimension needs max_dimension"):
            pp.resize_to_range(image, masks, **options)
        return
    if low and high and low > high:
        low_side = expected_range(size, low, high)
        assert max(low_side) == high
    found = pp.resize_to_range(image, masks, per_channel_pad_value=(1, 2, 3), **options)
    assert len(found) == 2 + with_masks
    wanted = expected_range(size, low, high)
    assert tuple(found[-1]) == (*wanted, 3)
    outer = (high, high) if pad else wanted
    assert found[0].shape == (*outer, 3)
    picture = np.asarray(found[0])
    np.testing.assert_allclose(
        picture[: wanted[0], : wanted[1]], sampled(image.astype(float), wanted, False), atol=2e-3
    )
    around = np.ones(outer, bool)
    around[: wanted[0], : wanted[1]] = False
    assert (picture[around] == [1, 2, 3]).all()
    if with_masks:
        assert found[1].shape == (2, *outer) and not np.asarray(found[1])[:, around].any()


@pytest.mark.parametrize("method", [*METHODS, 2])
@pytest.mark.parametrize("align_corners", [False, True])
def test_resize_to_range_by_every_method(picture, method, align_corners):
    found = pp.resize_to_range(picture, min_dimension=30, max_dimension=40, method=method, align_corners=align_corners)
    np.testing.assert_array_equal(found[0], resize(picture, (25, 40), method, align_corners))


def test_sizes_are_exact_for_every_small_picture():
    """Rounded in floats of 32 or 64 bits, some of these would be one pixel off."""
    sizes = [(height, width) for height in range(1, 60, 7) for width in range(1, 60, 5)]
    for size in [*sizes, (13, 26), (52, 26), (11, 110), (15, 30), (27, 18), (29, 58)]:
        image = np.zeros((*size, 1), np.float32)
        for low, high in ((23, 47), (75, 125), (None, 20)):
            found = pp.resize_to_range(image, min_dimension=low, max_dimension=high)[-1]
            assert tuple(found[:2]) == expected_range(size, low, high)
        floor = tuple(side * max(min(size), 23) // min(size) for side in size)
        assert tuple(pp.resize_to_min_dimension(image, min_dimension=23)[-1][:2]) == floor


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("low", [10, 21, 50])
def test_resize_to_min_dimension(picture, low, method, with_masks):
    masks = np.ones((2, 21, 34), np.uint8) if with_masks else None
    found = pp.resize_to_min_dimension(picture, masks, low, method)
    size = (21, 34) if low <= 21 else (50, math.floor(34 * 50 / 21))
    assert tuple(found[-1]) == (*size, 3) and len(found) == 2 + with_masks
    np.testing.assert_array_equal(found[0], resize(picture, size, method, True))
    if with_masks:
        assert found[1].shape == (2, *size)


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize("align_corners", [None, False, True])
@pytest.mark.parametrize("method", METHODS)
def test_resize_image(picture, method, align_corners, with_masks):
    masks = np.ones((2, 21, 34), np.uint8) if with_masks else None
    options = {} if align_corners is None else {"align_corners": align_corners}
    found = pp.resize_image(picture, masks, 13, 40, method, **options)
    np.testing.assert_array_equal(found[0], resize(picture, (13, 40), method, align_corners is not False))
    assert tuple(found[-1]) == (13, 40, 3) and len(found) == 2 + with_masks


def test_random_resize_method_uses_all_four(picture):
    seen = set()
    for seed in range(40):
        found = np.asarray(pp.random_resize_method(picture, (30, 20), seed=seed))
        matches = [name for name in METHODS if np.allclose(found, resize(picture, (30, 20), name), atol=1e-3)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == set(METHODS)


def test_default_sizes():
    image = np.zeros((300, 400, 1), np.float32)
    assert tuple(pp.resize_image(image)[0].shape) == (600, 1024, 1)
    assert tuple(pp.resize_to_min_dimension(image)[0].shape) == (600, 800, 1)
    assert tuple(pp.resize_to_range(image)[0].shape) == (300, 400, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "cubic"},
            "method must be one of bilinear, nearest, bicubic, area or one of 0, 1, 2, 3, got 'cubic'",
        ),
        ({"min_dimension": 0}, "min_dimension must be null or a whole number of at least 1, got 0"),
        ({"align_corners": 1}, "align_corners must be true or false, got 1"),
        (
            {"max_dimension": 9, "pad_to_max_dimension": True, "per_channel_pad_value": [1, 2]},
            "a value for each of 3 channels",
        ),
    ],
)
def test_wrong_parameters(picture, options, message):
    with pytest.raises(ValueError, match=message):
        pp.resize_to_range(picture, **options)
