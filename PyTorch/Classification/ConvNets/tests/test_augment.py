"""Augmentation: the draws, boxes, AutoAugment, erasing, mixup."""

import numpy as np
import pytest
from PIL import Image

from convnets import augment
from dlx.draws import draws, permutation


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def test_draws_depend_on_seed_epoch_index_and_stream_only():
    whole = draws(1, 2, np.arange(1000), 7)
    assert whole.shape == (1000, 7) and whole.min() >= 0 and whole.max() < 1
    np.testing.assert_array_equal(draws(1, 2, np.array([17, 5]), 7), whole[[17, 5]])
    np.testing.assert_array_equal(draws(1, 2, 5, 3)[0], whole[5, :3])
    for other in ((2, 2, 0), (1, 3, 0), (1, 2, augment.ERASE), (-1, 2, 0)):
        other = draws(*other[:2], np.arange(1000), 7, other[2])
        assert abs(np.corrcoef(whole.ravel(), other.ravel())[0, 1]) < 0.05
    assert len(np.unique(whole)) == whole.size


def test_draws_are_uniform_and_independent():
    values = draws(0, 0, np.arange(20000), 4)
    np.testing.assert_allclose(values.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(values.var(0), 1 / 12, atol=0.003)
    assert np.abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.03
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.03


def test_draws_never_change():
    """Golden values: a change here changes every recorded run."""
    np.testing.assert_allclose(draws(7, 3, 11, 3)[0], GOLDEN_DRAWS, rtol=0, atol=1e-15)
    assert permutation(7, 3, 8).tolist() == GOLDEN_ORDER


GOLDEN_DRAWS = [0.05453547754175492, 0.14340363486096175, 0.24989789916406568]
GOLDEN_ORDER = [3, 4, 1, 5, 0, 6, 2, 7]


def test_permutation():
    first, second = permutation(1, 0, 500), permutation(1, 1, 500)
    assert sorted(first) == sorted(second) == list(range(500))
    assert (first != second).sum() > 450 and (first != np.arange(500)).sum() > 450
    np.testing.assert_array_equal(first, permutation(1, 0, 500))


def test_crop_boxes_follow_the_paper():
    count = 5000
    sizes = np.tile([[640, 480]], (count, 1))
    values = draws(0, 0, np.arange(count), augment.GEOMETRY_DRAWS)
    left, top, width, height = augment.crop_boxes(sizes, values).T
    assert (left >= 0).all() and (top >= 0).all() and (left + width <= 640).all() and (top + height <= 480).all()
    area, aspect = width * height / (640 * 480), width / height
    assert 0.075 < area.min() < 0.09 and area.max() > 0.95
    assert 0.74 < aspect.min() < 0.77 and 1.29 < aspect.max() < 1.35
    assert 0.40 < area.mean() < 0.50, "less than 0.54 since large upright boxes do not fit"
    assert abs(augment.flips(values).mean() - 0.5) < 0.03
    assert len(np.unique(left)) > 300 and len(np.unique(top)) > 200


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (3, 2), (2, 300), (5000, 20)])
def test_crop_boxes_of_odd_pictures(size):
    values = draws(0, 0, np.arange(200), augment.GEOMETRY_DRAWS)
    left, top, width, height = augment.crop_boxes(np.tile([size], (200, 1)), values).T
    assert (width >= 1).all() and (height >= 1).all() and (left >= 0).all() and (top >= 0).all()
    assert (left + width <= size[0]).all() and (top + height <= size[1]).all()
    image = augment.random_resized_crop(noise(*size), 16, values[0], Image.Resampling.BILINEAR)
    assert image.size == (16, 16)


def test_crop_falls_back_to_the_centre():
    values = np.full((1, augment.GEOMETRY_DRAWS), 0.999)
    assert augment.crop_boxes(np.array([[100, 20]]), values).tolist() == [[36, 0, 27, 20]]
    assert augment.crop_boxes(np.array([[20, 100]]), values).tolist() == [[0, 36, 20, 27]]


def test_crop_cuts_the_box():
    image = noise(60, 40)
    values = draws(0, 0, np.arange(40), augment.GEOMETRY_DRAWS)
    boxes, mirrored = augment.crop_boxes(np.tile([[60, 40]], (40, 1)), values), augment.flips(values)
    assert 5 < mirrored.sum() < 35
    for row in range(40):
        left, top, width, height = boxes[row]
        box = image.crop((left, top, left + width, top + height)).resize((24, 24), Image.Resampling.BILINEAR)
        expected = np.asarray(box)[:, ::-1] if mirrored[row] else np.asarray(box)
        found = augment.random_resized_crop(image, 24, values[row], Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(np.asarray(found), expected)


# AutoAugment


def test_policy_is_the_papers():
    assert len(augment.IMAGENET_POLICY) == 25
    names = {name for policy in augment.IMAGENET_POLICY for name, _, _ in policy}
    assert names == set(augment.OPERATIONS)
    for policy in augment.IMAGENET_POLICY:
        assert all(0 <= probability <= 1 and 0 <= level <= 9 for _, probability, level in policy)


@pytest.mark.parametrize("name", sorted(augment.OPERATIONS))
@pytest.mark.parametrize("sign", [1, -1])
def test_operations(name, sign):
    image = noise(20, 30)
    found = augment.OPERATIONS[name](image, 1.0, sign)
    assert found.size == image.size and found.mode == "RGB"
    if name in ("shear_x", "rotate", "color", "contrast", "sharpness"):
        assert np.abs(np.asarray(augment.OPERATIONS[name](image, 0.0, sign)).astype(int) - np.asarray(image)).max() <= 1
        assert (np.asarray(found) != np.asarray(augment.OPERATIONS[name](image, 1.0, -sign))).any()
    if name not in ("autocontrast", "equalize"):
        assert (np.asarray(found) != np.asarray(image)).any()


def test_operations_have_the_papers_ranges():
    image = noise(16, 16)
    pixels = np.asarray(image)
    apply = {name: np.asarray(op(image, 1.0, 1)) for name, op in augment.OPERATIONS.items()}
    np.testing.assert_array_equal(apply["posterize"], pixels & 0xF0)
    np.testing.assert_array_equal(apply["solarize"], 255 - pixels)
    np.testing.assert_array_equal(apply["invert"], 255 - pixels)
    half = np.asarray(augment.OPERATIONS["solarize"](image, 0.5, 1))
    np.testing.assert_array_equal(half, np.where(pixels < 128, pixels, 255 - pixels))
    np.testing.assert_array_equal(
        apply["rotate"], np.asarray(image.rotate(30, Image.Resampling.BILINEAR, fillcolor=(128,) * 3))
    )
    grey = np.asarray(augment.OPERATIONS["color"](image, 1.0, -1)).astype(int)
    assert (grey.max(2) - grey.min(2)).mean() < 0.2 * (pixels.max(2) - pixels.min(2).astype(int)).mean()


def test_auto_augment_obeys_its_draws():
    image = noise(24, 24)
    first = (0 + 0.5) / 25
    never = augment.auto_augment(image, np.array([first, 0.99, 0.99, 0, 0]))
    np.testing.assert_array_equal(np.asarray(never), np.asarray(image))
    posterize = augment.auto_augment(image, np.array([first, 0.39, 0.99, 0, 0]))
    np.testing.assert_array_equal(np.asarray(posterize), np.asarray(augment.OPERATIONS["posterize"](image, 8 / 9, 1)))
    one, other = (augment.auto_augment(image, np.array([first, 0.99, 0.0, 0, sign])) for sign in (0.1, 0.9))
    assert (np.asarray(one) != np.asarray(other)).any(), "rotated to either side"
    values = draws(0, 0, np.arange(300), augment.POLICY_DRAWS, augment.POLICY)
    results = [augment.auto_augment(image, row).tobytes() for row in values]
    assert results == [augment.auto_augment(image, row).tobytes() for row in values]
    assert len(set(results)) > 30 and (values[:, 0] * 25).astype(int).max() == 24


# Erasing, mixup


def test_erase_boxes():
    values = draws(0, 0, np.arange(4000), augment.ERASE_DRAWS, augment.ERASE)
    left, top, width, height = augment.erase_boxes(32, 32, values).T
    assert (left + width <= 32).all() and (top + height <= 32).all() and min(left.min(), top.min()) == 0
    area = width * height / 1024
    assert abs((area > 0).mean() - 0.5) < 0.03 and area.max() <= 0.3
    assert ((width > 0) == (height > 0)).all()


def test_mixup_weight():
    weights = [augment.mixup_weight(0.2, 1, 0, batch) for batch in range(2000)]
    assert weights[3] == augment.mixup_weight(0.2, 1, 0, 3) and 0 <= min(weights) and max(weights) <= 1
    assert abs(np.mean(weights) - 0.5) < 0.03 and abs(np.var(weights) - 0.25 / 1.4) < 0.01
    assert augment.mixup_weight(0, 1, 0, 3) == 1
    with pytest.raises(ValueError, match="-1"):
        augment.mixup_weight(-1, 0, 0, 0)
