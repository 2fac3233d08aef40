"""Draws: their distribution, their independence, and their replay from a cache on pictures of any size."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ssd import preprocessing as pp
from tf_ssd.preprocessing import fields
from tf_ssd.preprocessing.cache import IDS, StepCache
from tf_ssd.preprocessing.cache import PreprocessorCache as Cache
from tf_ssd.preprocessing.draws import Draws, fold

COUNT = 3000
RANDOM = sorted(name for name in pp.STEPS if name.startswith(("random", "ssd")) and name != "random_jitter_boxes")
OPTIONS = {
    "random_horizontal_flip": {"keypoint_flip_permutation": [1, 0, 3, 2]},
    "random_vertical_flip": {"keypoint_flip_permutation": [2, 3, 0, 1]},
    "random_resize_method": {"target_size": (24, 30)},
    "random_rgb_to_gray": {"probability": 0.5},
    "random_crop_image": {"min_object_covered": 0.3},
}
EVERYTHING = pp.get_default_func_arg_map(True, True, True, True, True)


def run(example, steps, cache=None, seed=None):
    options = [(pp.STEPS[name].function, dict(given)) for name, given in steps]
    found = pp.preprocess(example, options, EVERYTHING, cache, seed)
    return {key: np.asarray(value) for key, value in found.items()}


def same(first, second):
    return all(np.array_equal(first[key], second[key], equal_nan=first[key].dtype.kind == "f") for key in first)


def over_seeds(function, count=COUNT):
    """The function's value for many seeds, in one graph."""
    seeds = tf.stack([tf.range(count, dtype=tf.int64), tf.fill([count], tf.constant(7, tf.int64))], 1)
    return np.asarray(tf.function(lambda: tf.map_fn(function, seeds, fn_output_signature=tf.float32))())


def kolmogorov(sample, other=None):
    """Kolmogorov-Smirnov statistic against uniform in [0, 1), or against another sample; above 1.95 once in 1000."""
    sample = np.sort(sample)
    if other is None:
        steps = np.arange(len(sample) + 1) / len(sample)
        return max(np.abs(sample - steps[:-1]).max(), np.abs(steps[1:] - sample).max()) * len(sample) ** 0.5
    both = np.concatenate([sample, np.sort(other)])
    first, second = (np.searchsorted(np.sort(s), both, side="right") / len(s) for s in (sample, other))
    return np.abs(first - second).max() * (len(sample) * len(other) / (len(sample) + len(other))) ** 0.5


# --------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("name", ["random_horizontal_flip", "random_vertical_flip", "random_rotation90"])
def test_half_are_flipped(name):
    image = tf.constant([[[0.0], [1.0]], [[2.0], [3.0]]])
    first = over_seeds(lambda seed: getattr(pp, name)(image, seed=seed)[0][0, 0, 0])
    assert abs((first != 0).mean() - 0.5) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06  # pictures that follow each other are independent


def test_functions_with_one_seed_are_independent():
    image = tf.constant([[[0.0], [1.0]], [[2.0], [3.0]]])
    both = over_seeds(
        lambda seed: pp.random_vertical_flip(pp.random_horizontal_flip(image, seed=seed)[0], seed=seed)[0][0, 0, 0]
    )
    shares = [(both == outcome).mean() for outcome in range(4)]
    np.testing.assert_allclose(shares, 0.25, atol=0.03)


def test_amounts_are_uniform():
    flat = tf.fill([2, 2, 3], 100.0)
    brightness = over_seeds(lambda seed: pp.random_adjust_brightness(flat, 0.2, seed=seed)[0, 0, 0])
    assert kolmogorov((brightness - 49) / 102) < 1.95
    two = tf.constant([[[100.0], [120.0]]])
    contrast = over_seeds(lambda seed: pp.random_adjust_contrast(two, seed=seed)[0, 1, 0])
    assert kolmogorov(((contrast - 110) / 10 - 0.8) / 0.45) < 1.95
    sides = over_seeds(
        lambda seed: tf.cast(tf.shape(pp.random_image_scale(tf.zeros([200, 2, 1]), seed=seed)[0])[0], tf.float32)
    )
    assert kolmogorov((sides + 0.5) / 200 / 1.5 - 1 / 3) < 1.95
    grey = over_seeds(lambda seed: pp.random_rgb_to_gray(tf.constant([[[255.0, 0.0, 0.0]]]), 0.1, seed=seed)[0, 0, 1])
    assert abs((grey > 0).mean() - 0.1) < 0.02


def test_pads_lie_anywhere():
    image, boxes = tf.ones([4, 4, 1]), tf.constant([[0.0, 0.0, 1.0, 1.0]])

    def place(seed):
        padded, moved = pp.random_pad_image(image, boxes, max_image_size=[40, 40], pad_color=0, seed=seed)
        size = tf.cast(tf.shape(padded)[:2], tf.float32)
        return tf.concat([size, moved[0, :2] * size], 0)

    height, width, top, left = over_seeds(place, 2000).T
    assert set(height) == set(range(4, 40)) == set(width)  # 40 is excluded
    free_y, free_x = np.maximum(height - 4, 1), np.maximum(width - 4, 1)
    some = (free_y > 8) & (free_x > 8)
    fractions = [
        ((top + 0.5) / free_y)[some],
        ((left + 0.5) / free_x)[some],
        (height - 4 + 0.5)[some],
        (width - 4)[some],
    ]
    assert (np.abs(np.corrcoef(fractions) - np.eye(4)) < 0.1).all()  # x and y, sizes and places: all independent
    assert (top <= free_y - 1).all() and (left <= free_x - 1).all() and kolmogorov(fractions[0]) < 2.2


def test_windows_are_distributed_as_those_of_tensorflow():
    """tf.image's sampler, an independent implementation of the same procedure, without objects."""
    size, options = [90, 120, 1], {"aspect_ratio_range": (0.75, 1.33), "area_range": (0.1, 1.0)}
    image, none = tf.zeros(size), tf.zeros([0, 4])

    def own(seed):
        return tf.cast(
            tf.shape(pp.random_crop_image(image, none, tf.zeros([0]), seed=seed, **options)[0])[:2], tf.float32
        )

    def theirs(seed):
        _, sides, _ = tf.image.stateless_sample_distorted_bounding_box(
            size, tf.zeros([1, 0, 4]), seed=seed, min_object_covered=0.0, use_image_if_no_bounding_boxes=True, **options
        )
        return tf.cast(sides[:2], tf.float32)

    ours, reference = over_seeds(own, 1500), over_seeds(theirs, 1500)
    for measure in (lambda s: s[:, 0] * s[:, 1], lambda s: s[:, 1] / s[:, 0], lambda s: s[:, 0]):
        assert kolmogorov(measure(ours), measure(reference)) < 1.95


def test_windows_lie_anywhere():
    """Also at the last row and column; y and x are independent."""
    places = np.stack(np.meshgrid(np.arange(9), np.arange(12), indexing="ij"), 2).astype(np.float32)
    options = {"aspect_ratio_range": (1.0, 1.0), "area_range": (1 / 3, 1 / 3), "min_object_covered": 0.0}
    corner = over_seeds(
        lambda seed: pp.random_crop_image(places, tf.zeros([0, 4]), tf.zeros([0]), seed=seed, **options)[0][0, 0], 2000
    )
    for found, count in zip(corner.T, (4, 7), strict=True):  # a window of 6 x 6
        shares = [(found == place).mean() for place in range(count)]
        np.testing.assert_allclose(shares, 1 / count, atol=0.03)
    assert abs(np.corrcoef(corner.T)[0, 1]) < 0.08


def test_crops_cases_and_chances():
    """Each of SSD's cases is as likely, and the example stays as it is with the chance of its case."""
    image, boxes = tf.zeros([20, 20, 3]), tf.constant([[0.2, 0.2, 0.6, 0.6]])
    options = {
        "min_object_covered": [0.0] * 3, "aspect_ratio_range": [(1.0, 1.0)] * 3, "overlap_thresh": [0.0] * 3,
        "clip_boxes": [True] * 3, "area_range": [(0.25, 0.25), (0.49, 0.49), (0.81, 0.81)],
        "random_coef": [0.0, 0.0, 0.6],
    }  # fmt: skip
    side = over_seeds(
        lambda seed: tf.cast(
            tf.shape(pp.ssd_random_crop(image, boxes, tf.zeros(1), seed=seed, **options)[0])[0], tf.float32
        )
    )
    shares = [(side == value).mean() for value in (10, 14, 18, 20)]
    np.testing.assert_allclose(shares, [1 / 3, 1 / 3, 0.4 / 3, 0.6 / 3], atol=0.03)
    default = over_seeds(
        lambda seed: tf.cast(
            tf.shape(pp.ssd_random_crop(tf.zeros([50, 50, 3]), boxes, tf.zeros(1), seed=seed)[0])[0], tf.float32
        ),
        1000,
    )
    assert 0.12 < (default == 50).mean() < 0.25


def test_patches_are_drawn_by_their_probability_and_lie_anywhere():
    counts = over_seeds(
        lambda seed: tf.reduce_sum(
            tf.cast(pp.random_black_patches(tf.ones([20, 20, 3]), 1, 0.3, 0.1, seed)[..., 0] == 0, tf.float32)
        ),
        1500,
    )
    assert set(counts) == {0, 4} and abs((counts == 4).mean() - 0.3) < 0.04
    black = over_seeds(
        lambda seed: tf.cast(pp.random_black_patches(tf.ones([20, 20, 3]), 1, 1.0, 0.1, seed)[..., 0] == 0, tf.float32),
        1500,
    )
    rows, columns = black.any(2).argmax(1), black.any(1).argmax(1)
    assert set(rows) == set(range(19)) == set(columns)
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.08


def test_streams_are_independent_and_seeds_of_every_form_work():
    draws = [over_seeds(lambda seed, name=name: Draws("x", [], seed, None).uniform(name), 2000) for name in "abc"]
    assert all(kolmogorov(sample) < 1.95 for sample in draws)
    assert (np.abs(np.corrcoef(draws) - np.eye(3)) < 0.08).all()
    flat = {"image": tf.fill([1, 1, 1, 3], 100.0)}
    once = (pp.random_adjust_brightness, {"max_delta": 0.1})

    def both(seed):
        """The draws of two equal steps, from the sum and from the first one alone."""
        one, two = (pp.preprocess(flat, [once] * count, seed=seed)["image"][0, 0, 0, 0] for count in (1, 2))
        return tf.stack([one - 100, two - one])

    first, second = over_seeds(both, 2000).T
    assert kolmogorov(first / 51 + 0.5) < 1.95 and kolmogorov(second / 51 + 0.5) < 1.95
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
    forms = [3, (3, 0), [3, 0], tf.constant(3), tf.constant([3, 0], tf.int32), np.int64(3)]
    assert len({tuple(fold(form, "a").numpy()) for form in forms}) == 1
    assert len({tuple(fold(seed, word).numpy()) for seed in range(9) for word in "abc"}) == 27
    with pytest.raises(ValueError, match="seed must be an int or two ints"):
        fold([1, 2, 3], "a")
    with pytest.raises(ValueError, match=r"seed must have shape \[2\]"):
        fold(tf.zeros([3], tf.int64), "a")


def test_without_a_seed_every_call_draws_anew(scene):
    example = scene().example()
    results = [run(example, [("random_adjust_brightness", {})])["image"] for _ in range(3)]
    assert not np.array_equal(results[0], results[1]) and not np.array_equal(results[1], results[2])
    fixed = []
    for _ in range(2):
        tf.random.set_seed(5)
        fixed.append(run(example, [("random_adjust_brightness", {})])["image"])
    np.testing.assert_array_equal(*fixed)


@pytest.mark.parametrize("name", [*RANDOM, "random_jitter_boxes"])
def test_a_seed_fixes_every_function_and_another_seed_changes_it(scene, name):
    example = scene().example()
    steps = [(name, OPTIONS.get(name, {}))]
    first = run(example, steps, seed=3)
    assert same(first, run(example, steps, seed=3))
    assert any(not same(first, run(example, steps, seed=seed)) for seed in range(4, 16))


# ----------------------------------------------------------------------------------------------------------- cache


def test_the_cache_itself():
    cache = Cache()
    assert len(IDS) == 23 and cache.get(Cache.SELECTOR, "a") is None
    cache.update(Cache.SELECTOR, "a", 3)
    assert cache.get(Cache.SELECTOR, "a") == 3 and cache.get(Cache.SELECTOR, "b") is None
    assert cache.get(Cache.CROP_IMAGE, "a") is None
    StepCache(cache, 2).update(Cache.SELECTOR, "a", 4)
    assert cache.get(Cache.SELECTOR, "a") == 3 and StepCache(cache, 2).get(Cache.SELECTOR, "a") == 4
    assert StepCache(cache, 1).get(Cache.SELECTOR, "a") is None
    cache.clear()
    assert cache.get(Cache.SELECTOR, "a") is None and len(cache) == 0
    for call in (lambda: cache.get("flip", "a"), lambda: cache.update("flip", "a", 1)):
        with pytest.raises(ValueError, match="unknown function id 'flip'"):
            call()


@pytest.mark.parametrize("name", RANDOM)
def test_a_cached_draw_is_replayed_whatever_the_seed(scene, name):
    example, steps = scene().example(), [(name, OPTIONS.get(name, {}))]
    for seed in range(4):
        cache = Cache()
        first = run(example, steps, cache, seed)
        assert len(cache) > 0
        assert same(first, run(example, steps, cache, seed + 100)) and same(first, run(example, steps, cache))
        assert same(first, run(example, steps, None, seed))  # a cache changes no draw
        cache.clear()
    others = [run(example, steps, cache, seed + 100) for cache, seed in ((Cache(), s) for s in range(12))]
    assert any(not same(first, other) for other in others)


EXACT = ["random_horizontal_flip", "random_vertical_flip", "random_rotation90", "random_crop_image", "ssd_random_crop",
         "random_crop_to_aspect_ratio", "ssd_random_crop_fixed_aspect_ratio", "random_rgb_to_gray",
         "random_adjust_brightness", "random_adjust_contrast", "random_adjust_hue", "random_adjust_saturation",
         "random_distort_color", "random_pixel_value_scale"]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_replay_on_a_picture_twice_the_size_is_the_result_twice_the_size(scene, name):
    """Old behaviour kept pixels: a window of the small picture, a field of noise of its shape."""
    small, large = scene(1), scene(2)
    for seed in range(5):
        cache, steps = Cache(), [(name, OPTIONS.get(name, {}))]
        first = run(small.example(), steps, cache, seed)
        second = run(large.example(), steps, cache, seed + 1)
        doubled = np.kron(first["image"][0], np.ones((2, 2, 1)))
        if name in ("random_crop_to_aspect_ratio", "ssd_random_crop_fixed_aspect_ratio"):  # an offset of half a pixel
            difference = np.abs(np.subtract(second["image"].shape[1:3], doubled.shape[:2]))
            assert (difference <= 1).all()
            np.testing.assert_array_equal(second[fields.CLASSES], first[fields.CLASSES])
            np.testing.assert_allclose(second[fields.BOXES], first[fields.BOXES], atol=0.06)
            continue
        np.testing.assert_allclose(second["image"][0], doubled, atol=1e-2)
        for field in (fields.BOXES, fields.CLASSES, fields.WEIGHTS, fields.SCORES, fields.KEYPOINTS):
            shift = 0.5 / 24 if field == fields.KEYPOINTS else 1e-5
            np.testing.assert_allclose(second[field], first[field], atol=shift, equal_nan=True)
        np.testing.assert_array_equal(second[fields.MASKS], np.kron(first[fields.MASKS], np.ones((1, 2, 2))))


@pytest.mark.parametrize("name", ["random_crop_image", "ssd_random_crop", "random_crop_to_aspect_ratio"])
def test_a_window_between_the_pixels_of_another_picture_is_rounded_with_its_boxes(scene, on_objects, name):
    """The boxes follow what was really cut, not the window that was kept."""
    for seed in range(8):
        cache, options = Cache(), [(name, OPTIONS.get(name, {}) | ({"aspect_ratio": 0.7} if "aspect" in name else {}))]
        run(scene(3).example(), options, cache, seed)
        for factor in (1, 2):
            found = run(scene(factor).example(), options, cache, seed + 1)
            tensors = {"boxes": found[fields.BOXES], "labels": found[fields.CLASSES], "masks": found[fields.MASKS]}
            on_objects({"image": found["image"][0], **tensors})


def inner_frame(image):
    """The frame of what is not background, as fractions; the background is -1."""
    rows, columns = np.nonzero((image != -1).any(2))
    height, width = image.shape[:2]
    return np.array(
        [rows.min() / height, columns.min() / width, (rows.max() + 1) / height, (columns.max() + 1) / width]
    )


PADS = {
    "random_pad_image": {"pad_color": -1},
    "random_crop_pad_image": {"pad_color": -1, "min_object_covered": 0.3},
    "ssd_random_crop_pad": {"pad_color": [-1] * 6},
}


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("name", PADS)
def test_replay_of_pads_on_another_size(scene, on_objects, name, factor):
    for seed in range(6):
        cache, steps = Cache(), [(name, PADS[name])]
        first = run(scene(1).example(), steps, cache, seed)
        second = run(scene(factor).example(), steps, cache, seed + 1)
        sides = np.array(second["image"].shape[1:3]) / first["image"].shape[1:3]
        np.testing.assert_allclose(sides, factor, rtol=0.04)
        np.testing.assert_allclose(inner_frame(second["image"][0]), inner_frame(first["image"][0]), atol=0.04)
        np.testing.assert_allclose(second[fields.BOXES], first[fields.BOXES], atol=0.04)
        np.testing.assert_array_equal(second[fields.CLASSES], first[fields.CLASSES])
        on_objects({"image": second["image"][0], "boxes": second[fields.BOXES], "labels": second[fields.CLASSES],
                    "masks": second[fields.MASKS]})  # fmt: skip


@pytest.mark.parametrize(
    "name", ["random_image_scale", "random_pad_to_aspect_ratio", "ssd_random_crop_pad_fixed_aspect_ratio"]
)
def test_replay_of_sizes_on_another_size(scene, name):
    for seed in range(5):
        cache = Cache()
        first = run(scene(1).example(), [(name, {})], cache, seed)
        second = run(scene(2).example(), [(name, {})], cache, seed + 1)
        np.testing.assert_allclose(np.array(second["image"].shape[1:3]) / first["image"].shape[1:3], 2, rtol=0.05)
        np.testing.assert_allclose(second[fields.BOXES], first[fields.BOXES], atol=0.05)


def test_replay_of_patches_on_another_size(scene):
    for seed in range(5):
        cache, step = Cache(), [("random_black_patches", {"size_to_image_ratio": 0.25})]
        small, large = scene(1), scene(2)
        small.image, large.image = np.ones_like(small.image), np.ones_like(large.image)
        first = run(small.example(), step, cache, seed)["image"][0, ..., 0] == 0
        second = run(large.example(), step, cache, seed + 1)["image"][0, ..., 0] == 0
        doubled = np.kron(first, np.ones((2, 2))).astype(bool)
        assert (second & doubled).sum() / max((second | doubled).sum(), 1) > 0.75


def test_noise_is_replayed_at_every_size():
    cache = Cache()
    small = np.asarray(
        pp.random_pixel_value_scale(np.full((8, 6, 3), 100, np.float32), seed=1, preprocess_vars_cache=cache)
    )
    large = np.asarray(pp.random_pixel_value_scale(np.full((16, 12, 3), 100, np.float32), preprocess_vars_cache=cache))
    odd = np.asarray(pp.random_pixel_value_scale(np.full((11, 9, 3), 100, np.float32), preprocess_vars_cache=cache))
    np.testing.assert_array_equal(large, np.kron(small, np.ones((2, 2, 1), np.float32)))
    assert set(odd.ravel()) <= set(small.ravel())


# -------------------------------------------------------------------------------- defects that are not to come back


def test_nothing_leaks_from_a_cached_call(scene):
    """Old: `preprocess` put the cache into the caller's options, where calls without a cache found it."""
    options = [(pp.random_adjust_brightness, {"max_delta": 0.3}), (pp.random_horizontal_flip, {})]
    example = scene().example()
    kept, given = dict(example), [(function, dict(keywords)) for function, keywords in options]
    cache = Cache()
    first = pp.preprocess(example, options, None, cache, 1)
    assert options == given and example.keys() == kept.keys() and all(example[key] is kept[key] for key in kept)
    count = len(cache)
    second = pp.preprocess(example, options, None, None, 2)
    third = pp.preprocess(example, options, None, None, 2)
    assert not np.array_equal(first["image"], second["image"]) and len(cache) == count
    np.testing.assert_array_equal(second["image"], third["image"])


def test_the_same_step_twice_is_two_draws():
    """Old: one draw for both, so brightness went the same way twice."""
    flat = {"image": np.full((1, 2, 2, 3), 100, np.float32)}
    once = (pp.random_adjust_brightness, {"max_delta": 0.1})
    apart = []
    for seed in range(12):
        cache = Cache()
        one = np.asarray(pp.preprocess(flat, [once], None, cache, seed)["image"]) - 100
        two = np.asarray(pp.preprocess(flat, [once, once], None, cache, seed)["image"]) - 100
        apart.append(abs(two[0, 0, 0, 0] - 2 * one[0, 0, 0, 0]))
        assert len(cache) == 2
        np.testing.assert_array_equal(pp.preprocess(flat, [once, once], None, cache, seed + 9)["image"], two + 100)
    assert max(apart) > 10


def test_brightness_within_distort_color_is_not_the_one_beside_it(scene):
    """Old: both used the draw ADJUST_BRIGHTNESS, though their ranges differ."""
    steps = [
        ("random_distort_color", {}),
        ("random_adjust_brightness", {}),
        ("random_distort_color", {"color_ordering": 1}),
    ]
    cache = Cache()
    run(scene().example(), steps, cache, 1)
    values = [float(value) for value in cache._draws[Cache.ADJUST_BRIGHTNESS].values()]
    assert len(values) == 3 == len(set(values))
    wider = Cache()
    flat = {"image": np.full((1, 2, 2, 3), 100, np.float32)}
    results = [run(flat, [("random_adjust_brightness", {"max_delta": d})], wider, 1)["image"].max() for d in (0.1, 0.2)]
    assert len(wider) == 2 and results[0] != results[1]


def operations(function):
    graph = tf.function(function).get_concrete_function().graph
    names = [node.op for node in graph.as_graph_def().node]
    return names + [node.op for part in graph.as_graph_def().library.function for node in part.node_def]


@pytest.mark.parametrize("name", RANDOM)
def test_a_hit_builds_nothing_random(scene, name):
    """Old: pads and crops to an aspect ratio drew again and threw the draw away."""
    example, steps, cache = scene().example(), [(name, OPTIONS.get(name, {}))], Cache()
    options = [(pp.STEPS[name].function, given) for name, given in steps]
    first = pp.preprocess(example, options, EVERYTHING, cache, 1)
    built = operations(lambda: pp.preprocess(example, options, EVERYTHING, cache, 2))
    assert not [operation for operation in built if operation.startswith(("StatelessRandom", "Random"))]
    missed = operations(lambda: pp.preprocess(example, options, EVERYTHING, Cache(), 2))
    assert [operation for operation in missed if operation.startswith("StatelessRandom")]
    replayed = tf.function(lambda: pp.preprocess(example, options, EVERYTHING, cache, 2))()
    np.testing.assert_allclose(replayed["image"], first["image"], atol=1e-3)


def test_asking_leaves_no_trace():
    """Old: `get` made entries in a defaultdict."""
    cache = Cache()
    for function_id in IDS:
        assert cache.get(function_id, "key") is None
    assert cache._draws == {}


def test_pairs_inside_a_graph(scene):
    """Old: draws were made and kept inside tf.cond, whose tensors cannot be used outside."""
    steps = [("random_horizontal_flip", OPTIONS["random_horizontal_flip"]), ("ssd_random_crop_pad", {}),
             ("random_rotation90", {}), ("random_pad_image", {}), ("random_distort_color", {})]  # fmt: skip
    options = [(pp.STEPS[name].function, given) for name, given in steps]
    small = scene().example()

    @tf.function
    def pair(seed):
        cache = Cache()
        return [pp.preprocess(small, options, EVERYTHING, cache, seed + shift) for shift in (0, 1)]

    images = []
    for seed in range(4):
        left, right = pair(tf.constant([seed, 5], tf.int64))
        for key in left:
            np.testing.assert_array_equal(left[key], right[key])
        images.append(left["image"])
    assert len({image.shape for image in images}) > 1


def test_a_draw_of_another_graph_is_an_error_with_a_remedy(scene):
    example, cache = scene().example(), Cache()

    def step(seed):
        return pp.preprocess(example, [(pp.random_adjust_brightness, {})], None, cache, seed)["image"]

    first = tf.function(step)(tf.constant([1, 2], tf.int64))
    with pytest.raises(ValueError, match=r"belongs to another traced tf.function .* call clear\(\) first"):
        step(3)
    with pytest.raises(ValueError, match="belongs to another traced"):
        tf.function(step)(tf.constant([1, 2], tf.int64))
    cache.clear()
    np.testing.assert_allclose(step(tf.constant([1, 2], tf.int64)), first, rtol=1e-5)


def test_masks_of_image_scale_are_objects_first(scene):
    """Old: masks were taken as [H, W, N]."""
    made = scene()
    image, masks = pp.random_image_scale(made.image, made.masks, 2.0, 2.0, seed=1)
    assert masks.shape == (4, *image.shape[:2])


def test_crop_to_aspect_ratio_does_without_weights(scene, on_objects):
    """Old: it insisted on label_weights."""
    made = scene()
    found = pp.random_crop_to_aspect_ratio(
        made.image, made.boxes, made.labels, aspect_ratio=0.5, overlap_thresh=0.0, seed=1
    )
    on_objects(dict(zip(("image", "boxes", "labels"), found, strict=True)))
    example = {key: value for key, value in made.example().items() if key != fields.WEIGHTS}
    arguments = pp.get_default_func_arg_map(include_label_weights=False)
    found = pp.preprocess(example, [(pp.random_crop_to_aspect_ratio, {})], arguments, seed=1)
    assert found["image"].shape == (1, 48, 48, 3)


@pytest.mark.parametrize("clip_boxes", [False, True])
def test_fixed_aspect_ratio_obeys_clip_boxes_and_overlap(scene, clip_boxes):
    """Old: the second crop got the tuple of all cases' clip_boxes, always true, and no overlap_thresh."""
    made = scene()
    sides = {"min_object_covered": [0.0], "area_range": [(1.0, 1.0)], "random_coef": [1.0], "aspect_ratio": 0.3}
    reached, dropped = False, 0
    for seed in range(10):
        options = {"overlap_thresh": [0.9], "clip_boxes": [clip_boxes], "seed": seed, **sides}
        found = pp.ssd_random_crop_fixed_aspect_ratio(made.image, made.boxes, made.labels, **options)
        image, boxes, labels = (np.asarray(value) for value in found)
        assert image.shape[:2] == (48, 14)
        reached |= bool(((boxes < -1e-6) | (boxes > 1 + 1e-6)).any())
        for number in made.labels:
            share = (image[..., 0] == 20 * number).sum() / (made.image[..., 0] == 20 * number).sum()
            assert (number in labels) == (share >= 0.9)
            dropped += 0.3 < share < 0.9
        options["overlap_thresh"] = [0.0]
        loose = pp.ssd_random_crop_fixed_aspect_ratio(made.image, made.boxes, made.labels, **options)
        reached |= bool(((loose[1] < -1e-6) | (loose[1] > 1 + 1e-6)).numpy().any())
    assert dropped and reached == (not clip_boxes)


def test_softmax_gets_its_scores_from_the_default_map(scene):
    """Old: the map's default left the only argument out, and the function failed on None."""
    found = pp.preprocess(scene().example(), [(pp.convert_class_logits_to_softmax, {})], pp.get_default_func_arg_map())
    np.testing.assert_allclose(np.sum(found[fields.SCORES], axis=1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="needs multiclass_scores"):
        pp.convert_class_logits_to_softmax(None)


def test_resize_to_range_without_a_minimum():
    """Old: min_dimension=None was a crash."""
    assert pp.resize_to_range(np.zeros((40, 20, 3), np.float32), max_dimension=20)[0].shape == (20, 10, 3)
