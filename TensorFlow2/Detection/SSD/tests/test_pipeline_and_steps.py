"""`preprocess`, its argument map, graphs, XLA and tf.data; steps in YAML and their table."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf
import yaml

from tf_ssd import preprocessing as pp
from tf_ssd.preprocessing import __main__ as command
from tf_ssd.preprocessing import fields
from tf_ssd.preprocessing.steps import load_steps, parse_steps

EVERYTHING = pp.get_default_func_arg_map(True, True, True, True, True)
NEEDED = {
    "normalize_image": {"original_minval": 0, "original_maxval": 255, "target_minval": -1, "target_maxval": 1},
    "random_horizontal_flip": {"keypoint_flip_permutation": [1, 0, 3, 2]},
    "random_vertical_flip": {"keypoint_flip_permutation": [2, 3, 0, 1]},
    "random_resize_method": {"target_size": (24, 30)},
    "subtract_channel_mean": {"means": [1, 2, 3]},
    "one_hot_encoding": {"num_classes": 6},
    "resize_to_range": {"min_dimension": 20, "max_dimension": 50},
    "resize_image": {"new_height": 30, "new_width": 20},
    "resize_to_min_dimension": {"min_dimension": 60},
}
# What each function is documented to have, independently of the code: arguments and defaults.
SIX, SEVEN = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0), (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
CROP = {"min_object_covered": 1.0, "aspect_ratio_range": (0.75, 1.33), "area_range": (0.1, 1.0), "overlap_thresh": 0.3,
        "clip_boxes": True, "random_coef": 0.0}  # fmt: skip
RATIOS = {"min_padded_size_ratio": (1.0, 1.0), "max_padded_size_ratio": (2.0, 2.0)}
EMPTY = inspect.Parameter.empty


def cases(shares):
    count = len(shares)
    return {"min_object_covered": shares, "aspect_ratio_range": ((0.5, 2.0),) * count,
            "area_range": ((0.1, 1.0),) * count, "overlap_thresh": shares, "clip_boxes": (True,) * count,
            "random_coef": (0.15,) * count}  # fmt: skip


def without(mapping, name):
    return {key: value for key, value in mapping.items() if key != name}


KNOWN = {
    "normalize_image": dict.fromkeys(NEEDED["normalize_image"], EMPTY),
    "retain_boxes_above_threshold": {"threshold": 0.0},
    "random_horizontal_flip": {"keypoint_flip_permutation": None},
    "random_vertical_flip": {"keypoint_flip_permutation": None},
    "random_rotation90": {},
    "random_pixel_value_scale": {"minval": 0.9, "maxval": 1.1},
    "random_image_scale": {"min_scale_ratio": 0.5, "max_scale_ratio": 2.0},
    "random_rgb_to_gray": {"probability": 0.1},
    "random_adjust_brightness": {"max_delta": 0.2},
    "random_adjust_contrast": {"min_delta": 0.8, "max_delta": 1.25},
    "random_adjust_hue": {"max_delta": 0.02},
    "random_adjust_saturation": {"min_delta": 0.8, "max_delta": 1.25},
    "random_distort_color": {"color_ordering": 0},
    "random_jitter_boxes": {"ratio": 0.05},
    "random_crop_image": CROP,
    "random_pad_image": {"min_image_size": None, "max_image_size": None, "pad_color": None},
    "random_crop_pad_image": CROP | RATIOS | {"pad_color": None},
    "random_crop_to_aspect_ratio": {"aspect_ratio": 1.0, "overlap_thresh": 0.3, "clip_boxes": True},
    "random_pad_to_aspect_ratio": {"aspect_ratio": 1.0} | RATIOS,
    "random_black_patches": {"max_black_patches": 10, "probability": 0.5, "size_to_image_ratio": 0.1},
    "random_resize_method": {"target_size": EMPTY},
    "resize_to_range": {"min_dimension": None, "max_dimension": None, "method": "bilinear", "align_corners": False,
                        "pad_to_max_dimension": False, "per_channel_pad_value": (0, 0, 0)},
    "resize_to_min_dimension": {"min_dimension": 600, "method": "bilinear"},
    "resize_image": {"new_height": 600, "new_width": 1024, "method": "bilinear", "align_corners": True},
    "image_to_float": {}, "scale_boxes_to_pixel_coordinates": {}, "rgb_to_gray": {},
    "subtract_channel_mean": {"means": None}, "one_hot_encoding": {"num_classes": None},
    "convert_class_logits_to_softmax": {"temperature": 1.0},
    "ssd_random_crop": cases(SEVEN),
    "ssd_random_crop_pad": cases(SIX) | {key: (value,) * 6 for key, value in (*RATIOS.items(), ("pad_color", None))},
    "ssd_random_crop_fixed_aspect_ratio": without(cases(SIX), "aspect_ratio_range") | {"aspect_ratio": 1.0},
    "ssd_random_crop_pad_fixed_aspect_ratio": cases(SIX) | RATIOS | {"aspect_ratio": 1.0},
}  # fmt: skip


def steps(*names):
    return [(pp.STEPS[name].function, dict(NEEDED.get(name, {}))) for name in names]


@pytest.mark.parametrize("name", KNOWN)
def test_arguments_and_defaults(name):
    parameters = inspect.signature(getattr(pp, name)).parameters
    own = {key: value.default for key, value in parameters.items()
           if key not in (*fields.ARGUMENTS, "seed", "random_seed", "preprocess_vars_cache")}  # fmt: skip
    assert own == KNOWN[name]
    tensors = [key for key in parameters if key in fields.ARGUMENTS]
    assert tensors == sorted(tensors, key=list(fields.ARGUMENTS).index)
    drawn = name.startswith(("random", "ssd"))
    assert drawn == bool({"seed", "random_seed"} & parameters.keys())
    assert ("preprocess_vars_cache" in parameters) == (drawn and name != "random_jitter_boxes")


def test_every_function_is_known():
    assert pp.STEPS.keys() == KNOWN.keys()
    assert EVERYTHING.keys() == {step.function for step in pp.STEPS.values()}


@pytest.mark.parametrize("name", KNOWN)
def test_a_graph_gives_what_eager_gives(scene, name):
    """Also for pictures whose size the graph does not know."""
    example = scene().example()
    specification = {key: tf.TensorSpec([None] * value.ndim, value.dtype) for key, value in example.items()}
    specification["image"] = tf.TensorSpec([1, None, None, 3])
    specification[fields.BOXES], specification[fields.KEYPOINTS] = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 4, 2])

    @tf.function(input_signature=[specification, tf.TensorSpec([2], tf.int64)])
    def graph(tensors, seed):
        return pp.preprocess(tensors, steps(name), EVERYTHING, seed=seed)

    for seed in range(3):
        expected = pp.preprocess(example, steps(name), EVERYTHING, seed=(seed, 1))
        for key, value in graph(example, tf.constant([seed, 1], tf.int64)).items():
            assert value.dtype == expected[key].dtype
            np.testing.assert_allclose(value, expected[key], atol=1e-3, equal_nan=True)


# Steps whose results have shapes that do not depend on draws or values; XLA compiles no other.
COMPILED = [name for name in KNOWN if name.startswith(("random_adjust", "resize")) or name in (
    "normalize_image", "random_horizontal_flip", "random_vertical_flip", "random_pixel_value_scale",
    "random_rgb_to_gray", "random_distort_color", "random_jitter_boxes", "random_black_patches", "image_to_float",
    "scale_boxes_to_pixel_coordinates", "subtract_channel_mean", "one_hot_encoding", "rgb_to_gray",
    "convert_class_logits_to_softmax")]  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_xla(scene, name):
    example = scene().example()
    plain = tf.function(lambda seed: pp.preprocess(example, steps(name), EVERYTHING, seed=seed))
    compiled = tf.function(lambda seed: pp.preprocess(example, steps(name), EVERYTHING, seed=seed), jit_compile=True)
    for seed in range(2):
        seed = tf.constant([seed, 3], tf.int64)
        expected, found = plain(seed), compiled(seed)
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], atol=2e-2 if key == "image" else 1e-4)


def test_a_quarter_turn_of_a_square_compiles(scene):
    image, boxes = np.random.default_rng(0).random((8, 8, 3), np.float32), scene().boxes
    compiled = tf.function(lambda seed: pp.random_rotation90(image, boxes, seed=seed), jit_compile=True)
    for seed in range(4):
        seed = tf.constant([seed, 0], tf.int64)
        for found, expected in zip(compiled(seed), pp.random_rotation90(image, boxes, seed=seed), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)


LONG = ["random_horizontal_flip", "ssd_random_crop_pad", "random_rotation90", "random_distort_color",
        "random_black_patches", "random_jitter_boxes", "resize_image", "normalize_image"]  # fmt: skip


@pytest.mark.parametrize("parallel", [None, 2])
def test_tf_data_gives_the_same_pictures_on_any_number_of_threads(scene, parallel):
    example = scene().example()

    def change(number):
        return pp.preprocess(example, steps(*LONG), EVERYTHING, seed=tf.stack([tf.constant(3, tf.int64), number]))

    found = list(tf.data.Dataset.range(6).map(change, num_parallel_calls=parallel))
    for number, changed in enumerate(found):
        expected = pp.preprocess(example, steps(*LONG), EVERYTHING, seed=(3, number))
        for key in expected:
            np.testing.assert_allclose(changed[key], expected[key], atol=1e-2, equal_nan=True)
    assert len({changed["image"].numpy().tobytes() for changed in found}) == 6


def test_a_long_list_keeps_labels_on_objects(scene, on_objects):
    names = ["random_horizontal_flip", "random_crop_to_aspect_ratio", "random_rotation90", "random_pad_image",
             "ssd_random_crop", "random_vertical_flip", "random_pad_to_aspect_ratio"]  # fmt: skip
    options = steps(*names)
    options[3][1]["pad_color"] = 255
    for seed in range(10):
        found = pp.preprocess(scene().example(), options, EVERYTHING, seed=seed)
        tensors = {argument: found[name] for argument, name in fields.ARGUMENTS.items() if argument != "keypoints"}
        on_objects(tensors | {"image": found["image"][0]})


# ------------------------------------------------------------------------------------------------------ preprocess


def test_the_argument_map_follows_its_flags():
    crop = pp.random_crop_image
    assert pp.get_default_func_arg_map()[crop] == (
        "image", "groundtruth_boxes", "groundtruth_classes", "groundtruth_weights", None, None, None, None)  # fmt: skip
    for number, (flag, name) in enumerate({
        "include_label_weights": "groundtruth_weights", "include_label_confidences": "groundtruth_confidences",
        "include_multiclass_scores": "multiclass_scores", "include_instance_masks": "groundtruth_instance_masks",
        "include_keypoints": "groundtruth_keypoints"}.items()):  # fmt: skip
        flags = {"include_label_weights": False} | {flag: True}
        expected = [name if place == number else None for place in range(5)]
        assert list(pp.get_default_func_arg_map(**flags)[crop][3:]) == expected
    assert pp.get_default_func_arg_map()[pp.random_horizontal_flip] == ("image", "groundtruth_boxes", None, None)
    assert pp.get_default_func_arg_map()[pp.resize_to_range] == ("image", None)
    assert pp.get_default_func_arg_map(False)[pp.retain_boxes_above_threshold][2] == "groundtruth_weights"


def test_own_functions_take_part(scene):
    def shift(image, boxes, by, seed=None, preprocess_vars_cache=None):
        assert seed.shape == (2,) and preprocess_vars_cache is not None
        return image + by, boxes

    def plain(image):
        return image * 2

    made = scene()
    arguments = EVERYTHING | {shift: (fields.IMAGE, fields.BOXES), plain: (fields.IMAGE,)}
    cache = pp.PreprocessorCache()
    found = pp.preprocess(made.example(), [(shift, {"by": 1}), (plain, {})], arguments, cache, 1)
    np.testing.assert_array_equal(found["image"][0], (made.image + 1) * 2)
    assert found["image"].shape == (1, 48, 64, 3)


def test_entries_that_no_step_knows_are_passed_on_and_an_image_is_not_needed(scene):
    example = {**scene().example(), "source_id": "a.jpg"}
    assert pp.preprocess(example, steps("random_adjust_hue"), seed=1)["source_id"] == "a.jpg"
    found = pp.preprocess({fields.BOXES: scene().boxes}, steps("random_jitter_boxes"), seed=1)
    assert list(found) == [fields.BOXES]
    assert pp.preprocess(example, [])["image"].shape == (1, 48, 64, 3)


def test_seeds_of_steps_are_folded_into_that_of_the_call():
    flat = {"image": np.full((1, 2, 2, 3), 100, np.float32)}

    def value(call=None, own=None):
        options = {} if own is None else {"seed": own}
        return float(
            np.asarray(pp.preprocess(flat, [(pp.random_adjust_brightness, options)], seed=call)["image"]).max()
        )

    assert value(1) == value(1) != value(2) and value(1, 5) == value(1, 5) != value(1, 6)
    assert value(1, 5) != value(2, 5) and value(1, 5) != value(1)
    assert value(None, 5) == value(None, 5) != value(None, 6)
    patches = [(pp.random_black_patches, {"random_seed": 3})]
    np.testing.assert_array_equal(*[pp.preprocess(flat, patches)["image"] for _ in range(2)])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, [(len, {})], r"step 1 \(len\): the function is not in func_arg_map"),
        ({fields.BOXES: None}, "random_jitter_boxes", r"step 1 \(random_jitter_boxes\): the example has no ground"),
        ({"image": np.zeros((4, 4, 3))}, [], r"of rank 4, \[1, height, width, channels\], got the shape \(4, 4, 3\)"),
        ({"image": np.zeros((2, 4, 4, 3))}, [], r"must be a single one"),
        ({}, [(pp.random_adjust_hue, {}), (pp.random_adjust_hue, {"max_delta": 2})],
         r"step 2 \(random_adjust_hue\): random_adjust_hue: max_delta must be a number .* at most 0.5, got 2"),
        ({}, [(pp.random_crop_image, {"min_objct_covered": 1})], "unexpected keyword argument 'min_objct_covered'"),
        ({}, [(pp.ssd_random_crop, {"clip_boxes": [True]})], "needs as many values of each case's parameters"),
    ],
)  # fmt: skip
def test_faults_name_the_step(scene, change, options, message):
    example = {key: value for key, value in (scene().example() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        pp.preprocess(example, steps(options) if isinstance(options, str) else options, EVERYTHING)


def test_a_function_that_returns_too_little_is_an_error(scene):
    def lost(image, boxes):
        return image

    with pytest.raises(ValueError, match=r"step 1 \(lost\): returned 1 values for image, groundtruth_boxes"):
        pp.preprocess(scene().example(), [(lost, {})], {lost: (fields.IMAGE, fields.BOXES)})


# ------------------------------------------------------------------------------------------------------------ YAML


def test_steps_from_a_file(tmp_path, scene):
    path = tmp_path / "augment.yaml"
    path.write_text(
        "steps:\n  - random_rotation90\n  - random_crop_image: {min_object_covered: 0.0, area_range: [0.75, 1.0]}\n"
        "  - random_adjust_hue:\n  - ssd_random_crop_pad:\n      pad_color: [null, 1, [1, 2, 3], null, 1, 1]\n"
        "  - random_black_patches: {random_seed: 4}\n  - resize_image: {new_height: 32, new_width: 32}\n"
    )
    found = load_steps(path)
    assert [function.__name__ for function, _ in found] == [
        "random_rotation90", "random_crop_image", "random_adjust_hue", "ssd_random_crop_pad", "random_black_patches",
        "resize_image"]  # fmt: skip
    assert found[1] == (pp.random_crop_image, {"min_object_covered": 0.0, "area_range": [0.75, 1.0]})
    assert pp.preprocess(scene().example(), found, EVERYTHING, seed=1)["image"].shape == (1, 32, 32, 3)
    assert command.main([str(path)]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [random_horizontl_flip]",
         "step 1: no step 'random_horizontl_flip'; did you mean 'random_horizontal_flip'?"),
        ("steps: [rgb_to_gray, random_crop_image: {min_object_coverd: 1}]",
         "step 2 (random_crop_image): min_object_coverd: random_crop_image has no parameter 'min_object_coverd'; "
         "did you mean 'min_object_covered'?"),
        ("steps: [random_crop_image: {min_object_covered: 1.5}]",
         "step 1 (random_crop_image): min_object_covered: min_object_covered must be a number at least 0 "
         "and at most 1, got 1.5"),
        ("steps: [random_crop_image: {area_range: [0.9, 0.1]}]",
         "area_range must be a list of two values, the smaller one first, got [0.9, 0.1]"),
        ("steps: [random_crop_image: {area_range: 0.5}]", "area_range must be a list of two values, got 0.5"),
        ("steps: [random_crop_image: {clip_boxes: 1}]", "clip_boxes must be true or false, got 1"),
        ("steps: [normalize_image: {original_minval: 0}]",
         "original_maxval: original_maxval is missing, which normalize_image needs"),
        ("steps: [subtract_channel_mean]", "means: means must be a list of values, got None"),
        ("steps: [random_rgb_to_gray: {probability: often}]",
         "probability must be a number at least 0 and at most 1, got 'often'"),
        ("steps: [random_rgb_to_gray: {probability: .nan}]",
         "probability must be a number at least 0 and at most 1, got nan"),
        ("steps: [random_image_scale: {min_scale_ratio: 3}]",
         "min_scale_ratio must not be greater than max_scale_ratio, got 3 and 2.0"),
        ("steps: [random_crop_pad_image: {min_padded_size_ratio: [1, 3]}]",
         "must not be greater than max_padded_size_ratio"),
        ("steps: [ssd_random_crop: {random_coef: [0.1]}]", "random_coef: ssd_random_crop needs as many values"),
        ("steps: [ssd_random_crop: {random_coef: [2, 1, 1, 1, 1, 1, 1]}]",
         "random_coef must be a list of values, each a number at least 0"),
        ("steps: [random_adjust_hue: {seed: a}]", "seed: seed must be a whole number, got 'a'"),
        ("steps: [random_resize_method: {target_size: [3, 0]}]",
         "target_size must be a list of two values, each a whole number of at least 1"),
        ("steps: [random_pad_image: {min_image_size: [3]}]",
         "min_image_size must be a list of two values or null or a whole number"),
        ("steps: [random_crop_image: 3]", "step 1 (random_crop_image): expected parameters as key: value, got 3"),
        ("steps: [{a: 1, b: 2}]", "step 1: expected a name, or one name with its parameters"),
        ("steps: {a: 1}", "steps must be a list"),
        ("step: []", "expected the one key 'steps', found: step"),
        ("- a", "expected the one key 'steps', found: list"),
        ("steps: [", "not valid YAML"),
    ],
)  # fmt: skip
def test_faults_name_file_step_and_key(tmp_path, capsys, text, message):
    path = tmp_path / "steps.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_steps(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
    assert command.main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_the_list_of_steps(capsys):
    assert command.main(["--list-steps"]) == 0
    text = capsys.readouterr().out
    blocks = {block.splitlines()[0]: block for block in text.strip().split("\n\n")}
    assert blocks.keys() == KNOWN.keys()
    for name, block in blocks.items():
        shown = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in block.splitlines()[3:]}
        assert shown.keys() == KNOWN[name].keys()
        for key, value in KNOWN[name].items():
            plain = yaml.safe_load(shown[key]) if value is not EMPTY else EMPTY
            assert (shown[key] == "(required)") if value is EMPTY else plain == as_lists(value)
    with pytest.raises(SystemExit):
        command.main([])


def as_lists(value):
    return [as_lists(item) for item in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("name", KNOWN)
def test_the_defaults_of_every_step_can_be_written_as_yaml(name):
    given = {key: as_lists(value) for key, value in KNOWN[name].items() if value is not EMPTY}
    given |= {key: as_lists(value) for key, value in NEEDED.get(name, {}).items()}
    ((function, options),) = parse_steps(yaml.safe_load(yaml.safe_dump([{name: given}])))
    assert function is pp.STEPS[name].function and options == given
