"""Colours against colorsys and NumPy, ranges of values, labels and scores."""

from __future__ import annotations

import colorsys
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tf_ssd import preprocessing as pp
from tf_ssd.preprocessing.colour import _change_hsv

SEEDS = range(5)


@pytest.fixture(scope="module")
def picture():
    """Random colours, and the corners of the colour cube with greys."""
    image = np.random.default_rng(3).integers(0, 256, (12, 10, 3)).astype(np.float32)
    cube = list(itertools.product((0, 255), repeat=3)) + [(128, 128, 128), (7, 7, 9)]
    image[0, : len(cube)] = cube
    return image


def by_colorsys(image, change):
    pixels = [change(*colorsys.rgb_to_hsv(*(pixel / 255.0))) for pixel in image.reshape(-1, 3).astype(float)]
    return np.array([colorsys.hsv_to_rgb(*pixel) for pixel in pixels]).reshape(image.shape) * 255


@pytest.mark.parametrize("turn", [0.0, 0.02, -0.2, 0.37, 0.5, -0.5])
def test_hue_is_that_of_colorsys(picture, turn):
    expected = by_colorsys(picture, lambda h, s, v: ((h + turn) % 1.0, s, v))
    np.testing.assert_allclose(_change_hsv(picture, turn=tf.constant(turn)), expected, atol=2e-3)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.3, 4.0])
def test_saturation_is_that_of_colorsys(picture, factor):
    expected = by_colorsys(picture, lambda h, s, v: (h, min(s * factor, 1.0), v))
    np.testing.assert_allclose(_change_hsv(picture, factor=tf.constant(factor)), expected, atol=1e-3)
    both = by_colorsys(picture, lambda h, s, v: ((h + 0.1) % 1.0, min(s * factor, 1.0), v))
    np.testing.assert_allclose(_change_hsv(picture, tf.constant(factor), tf.constant(0.1)), both, atol=2e-3)


def brighter(image, amount):
    return image + 255 * amount


def stronger(image, amount):
    return (image - image.mean((0, 1))) * amount + image.mean((0, 1))


def more_colourful(image, amount):
    return by_colorsys(image, lambda h, s, v: (h, min(s * amount, 1), v))


def turned(image, amount):
    return by_colorsys(image, lambda h, s, v: ((h + amount) % 1, s, v))


RANGES = [{"min_delta": 0.8, "max_delta": 1.25}, {"min_delta": 0.0, "max_delta": 3.0}, {}]
# What each function does, its parameters, and the range of the amount for defaults.
ADJUSTMENTS = {
    "random_adjust_brightness": (brighter, [{"max_delta": 0.1}, {"max_delta": 1.0}, {}], 0.2),
    "random_adjust_contrast": (stronger, RANGES, (0.8, 1.25)),
    "random_adjust_saturation": (more_colourful, RANGES, (0.8, 1.25)),
    "random_adjust_hue": (turned, [{"max_delta": 0.1}, {"max_delta": 0.5}, {}], 0.02),
}


@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("case", range(3))
def test_adjustments_do_one_thing_by_an_amount_in_range(picture, name, case):
    """The amount is found again from the result by a search over grids, and the whole picture must agree with it."""
    change, options, default = ADJUSTMENTS[name]
    given = options[case]
    high = given.get("max_delta", default if np.isscalar(default) else default[1])
    low = -high if np.isscalar(default) else given.get("min_delta", default[0])
    amounts = []
    for seed in range(10):
        found = np.asarray(getattr(pp, name)(picture, seed=seed, **given))
        assert found.dtype == np.float32 and found.min() >= 0 and found.max() <= 255
        whole = name in ("random_adjust_contrast", "random_adjust_brightness")
        sample = picture[3:5]  # enough for colorsys, which is slow
        reference = picture if whole else sample
        compared = found if whole else found[3:5]

        def error(amount, reference=reference, compared=compared):
            return np.abs(np.clip(change(reference.astype(float), amount), 0, 255) - compared).sum()

        left, right = low, high
        for count in (201, 21, 21, 21, 21):
            grid = np.linspace(left, right, count)
            best = int(np.argmin([error(amount) for amount in grid]))
            left, right = grid[max(best - 1, 0)], grid[min(best + 1, count - 1)]
        amount = (left + right) / 2
        np.testing.assert_allclose(found, np.clip(change(picture.astype(float), amount), 0, 255), atol=0.05)
        amounts.append(amount)
    assert np.ptp(amounts) > 0.2 * (high - low)


@pytest.mark.parametrize("ordering", [0, 1])
def test_distort_color_applies_the_four_in_the_order_that_is_asked_for(picture, ordering):
    """Undone: the result equals the four adjustments with the amounts drawn, and not those in the other order."""
    from tf_ssd.preprocessing import colour
    from tf_ssd.preprocessing.cache import PreprocessorCache as Ids

    for seed in SEEDS:
        cache = Ids()
        found = np.asarray(pp.random_distort_color(picture, ordering, seed=seed, preprocess_vars_cache=cache))
        drawn = {key: float(next(iter(values.values()))) for key, values in cache._draws.items()}
        brightness = (2 * drawn[Ids.ADJUST_BRIGHTNESS] - 1) * 32 / 255
        contrast, saturation = 0.5 + drawn[Ids.ADJUST_CONTRAST], 0.5 + drawn[Ids.ADJUST_SATURATION]
        hue = (2 * drawn[Ids.ADJUST_HUE] - 1) * 0.2
        steps = [
            lambda x, b=brightness: x + b,
            lambda x, s=saturation: tf.image.adjust_saturation(x, s),
            lambda x, h=hue: tf.image.adjust_hue(x, h),
            lambda x, c=contrast: tf.image.adjust_contrast(x, c),
        ]
        order = {0: (0, 1, 2, 3), 1: (0, 3, 1, 2)}
        results = {}
        for which, sequence in order.items():
            image = tf.constant(picture / 255)
            for number in sequence:
                image = tf.clip_by_value(steps[number](image), 0, 1)
            results[which] = np.asarray(image) * 255
        np.testing.assert_allclose(found, results[ordering], atol=0.02)
        assert np.abs(found - results[1 - ordering]).max() > 0.5
    assert colour.GREY_WEIGHTS == (0.2989, 0.587, 0.114)
    with pytest.raises(ValueError, match="color_ordering must be one of 0, 1, got 2"):
        pp.random_distort_color(picture, 2)


@pytest.mark.parametrize(
    "name",
    [
        "random_adjust_hue",
        "random_adjust_saturation",
        "random_distort_color",
        "rgb_to_gray",
        "random_rgb_to_gray",
        "random_black_patches",
    ],
)
@pytest.mark.parametrize("channels", [1, 4])
def test_three_channels_are_needed(name, channels):
    with pytest.raises(ValueError, match="of three channels, got the shape"):
        getattr(pp, name)(np.zeros((4, 4, channels), np.float32))


@pytest.mark.parametrize(
    "name", ["random_adjust_brightness", "random_adjust_contrast", "random_pixel_value_scale", "random_adjust_hue"]
)
def test_bytes_come_back_as_floats_in_range(picture, name):
    as_bytes = getattr(pp, name)(picture.astype(np.uint8), seed=2)
    assert as_bytes.dtype == tf.float32
    np.testing.assert_array_equal(as_bytes, getattr(pp, name)(picture, seed=2))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_rgb_to_gray(picture, probability):
    weights = np.array([0.2989, 0.587, 0.114])
    grey = (picture @ weights)[..., None]
    np.testing.assert_allclose(pp.rgb_to_gray(picture), grey, rtol=1e-5)
    made = [np.asarray(pp.random_rgb_to_gray(picture, probability, seed=seed)) for seed in range(40)]
    changed = [not np.array_equal(image, picture) for image in made]
    for image in itertools.compress(made, changed):
        np.testing.assert_allclose(image, np.repeat(grey, 3, 2), rtol=1e-4, atol=1e-3)
    assert abs(sum(changed) - 40 * probability) <= 10 * min(probability, 1 - probability) * 2


def test_a_probability_of_zero_means_never(picture):
    class Zero:
        """A cache in which every draw is the smallest there is."""

        def get(self, function_id, key):
            return tf.constant(0.0)

    np.testing.assert_array_equal(pp.random_rgb_to_gray(picture, 0.0, preprocess_vars_cache=Zero()), picture)
    assert not np.array_equal(pp.random_rgb_to_gray(picture, 1e-9, preprocess_vars_cache=Zero()), picture)


@pytest.mark.parametrize("limits", [(0.9, 1.1), (0.5, 0.5), (1.0, 3.0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixel_value_scale(limits, channels):
    image = np.full((20, 30, channels), 100, np.float32)
    factors = np.asarray(pp.random_pixel_value_scale(image, *limits, seed=1)) / 100
    assert factors.min() >= limits[0] - 1e-6 and factors.max() <= min(limits[1], 2.55) + 1e-6
    if limits[0] < limits[1]:
        assert len(np.unique(factors)) > 0.5 * factors.size  # each pixel and channel its own
        assert abs(np.corrcoef(factors[:, :-1].ravel(), factors[:, 1:].ravel())[0, 1]) < 0.1
    with pytest.raises(ValueError, match="minval must not be greater than maxval, got 1.2 and 1.1"):
        pp.random_pixel_value_scale(image, minval=1.2)


@pytest.mark.parametrize("patches", [0, 1, 10])
@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ratio", [0.1, 0.35])
def test_black_patches(patches, probability, ratio):
    side = int(30 * ratio + 1e-6)
    for seed in SEEDS:
        image = np.asarray(
            pp.random_black_patches(np.full((30, 50, 3), 9, np.float32), patches, probability, ratio, seed)
        )
        assert set(np.unique(image)) <= {0, 9} and (image == image[..., :1]).all()
        black = image[..., 0] == 0
        count = black.sum() / side**2
        if not patches or not probability:
            assert not count
        elif patches == 1 and probability == 1:
            rows, columns = np.nonzero(black)
            assert count == 1 and np.ptp(rows) + 1 == side == np.ptp(columns) + 1  # a whole square
        else:
            assert count <= patches
        covered = np.zeros_like(black)  # every black pixel belongs to a whole black square
        for top, left in itertools.product(range(31 - side), range(51 - side)):
            if black[top : top + side, left : left + side].all():
                covered[top : top + side, left : left + side] = True
        np.testing.assert_array_equal(covered, black)


# ------------------------------------------------------------------------------------------------ values and labels


@pytest.mark.parametrize("original", [(0, 255), (-1, 1)])
@pytest.mark.parametrize("target", [(0, 1), (-1, 1), (3, -2)])
def test_normalize_image(picture, original, target):
    found = np.asarray(pp.normalize_image(picture, *original, *target))
    expected = np.interp(picture, original, target) if original == (0, 255) else None
    if expected is not None:
        np.testing.assert_allclose(found, expected, atol=1e-5)
    ends = np.asarray(pp.normalize_image(np.array(original, np.float32).reshape(1, 2, 1), *original, *target)).ravel()
    np.testing.assert_allclose(ends, target, atol=1e-6)


def test_simple_values(picture):
    assert pp.image_to_float(picture.astype(np.uint8)).dtype == tf.float32
    np.testing.assert_array_equal(pp.image_to_float(picture.astype(np.uint8)), picture)
    np.testing.assert_array_equal(pp.subtract_channel_mean(picture, [1, 2, 3]), picture - [1, 2, 3])
    with pytest.raises(ValueError, match="means has 2 values for 3 channels"):
        pp.subtract_channel_mean(picture, [1, 2])
    with pytest.raises(ValueError, match="means must be a list of values, got None"):
        pp.subtract_channel_mean(picture)
    with pytest.raises(ValueError, match="original_minval and original_maxval are both 1"):
        pp.normalize_image(picture, 1, 1, 0, 1)


@pytest.mark.parametrize("with_keypoints", [False, True])
def test_scale_boxes_to_pixel_coordinates(scene, with_keypoints):
    made = scene()
    tensors = made.tensors("image", "boxes", *(["keypoints"] if with_keypoints else []))
    found = pp.scale_boxes_to_pixel_coordinates(**tensors)
    assert len(found) == len(tensors)
    np.testing.assert_allclose(
        found[1], [[4, 6, 16, 26], [22, 10, 46, 30], [8, 40, 30, 62], [36, 44, 44, 58]], atol=1e-5
    )
    if with_keypoints:
        np.testing.assert_allclose(found[2][0], [[4.5, 6.5], [4.5, 25.5], [15.5, 6.5], [15.5, 25.5]], atol=1e-5)


EXTRAS = ("label_confidences", "multiclass_scores", "masks", "keypoints")


@pytest.mark.parametrize(
    "extras", [c for n in range(5) for c in itertools.combinations(EXTRAS, n)], ids=lambda e: "-".join(e) or "none"
)
@pytest.mark.parametrize("threshold", [0.0, 0.25, 9.0])
def test_retain_boxes_above_threshold(scene, threshold, extras):
    made = scene()
    made.label_weights = np.array([0.0, 0.3, np.nan, 0.25], np.float32)
    tensors = made.tensors("boxes", "labels", "label_weights", *extras)
    kept = {0.0: [1, 2, 3], 0.25: [1, 2], 9.0: [2]}[threshold]
    found = pp.retain_boxes_above_threshold(**tensors, threshold=threshold)
    assert len(found) == len(tensors)
    for value, given in zip(found, tensors.values(), strict=True):
        np.testing.assert_array_equal(value, given[kept])


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.8])
@pytest.mark.parametrize("count", [0, 200])
def test_jitter_boxes(ratio, count):
    boxes = np.tile(np.array([[0.2, 0.3, 0.4, 0.7]], np.float32), (count, 1))
    found = np.asarray(pp.random_jitter_boxes(boxes, ratio, seed=4))
    assert found.shape == (count, 4) and (found[:, :2] <= found[:, 2:]).all()
    if ratio < 0.5 and count:
        moved = (found - boxes) / [0.2, 0.4, 0.2, 0.4]
        assert np.abs(moved).max() <= ratio + 1e-5
        if ratio:
            assert (np.abs(moved).max(0) > 0.9 * ratio).all() and (np.abs(np.corrcoef(moved.T) - np.eye(4)) < 0.2).all()
    edge = np.asarray(pp.random_jitter_boxes(np.array([[0.0, 0.0, 1.0, 1.0]] * 20, np.float32), 0.3, seed=1))
    assert edge.min() == 0 and edge.max() == 1


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([1, 4], [0, 1, 0, 0, 1]), ([], [0] * 5), ([2, 2], [0, 0, 1, 0, 0]), ([0], [1, 0, 0, 0, 0])],
)
def test_one_hot_encoding(labels, expected):
    np.testing.assert_array_equal(pp.one_hot_encoding(np.array(labels, np.int64), num_classes=5), expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_softmax(temperature):
    logits = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    exponentials = np.exp(logits.astype(float) / temperature)
    expected = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(pp.convert_class_logits_to_softmax(logits, temperature), expected, rtol=1e-5)
    if temperature == 1.0:
        np.testing.assert_allclose(pp.convert_class_logits_to_softmax(logits), expected, rtol=1e-5)
