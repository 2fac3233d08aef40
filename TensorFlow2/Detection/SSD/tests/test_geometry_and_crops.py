"""Flips, turns, crops and pads: whatever is given moves with the picture, in every combination of arguments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tf_ssd import preprocessing as pp

SEEDS = range(4)
EXTRAS = ("label_weights", "label_confidences", "multiclass_scores", "masks", "keypoints")
ALL = ("image", "boxes", "labels", *EXTRAS)
MIRROR = [1, 0, 3, 2]  # of the corners, left to right
UPSIDE = [2, 3, 0, 1]


def subsets(names):
    return [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


def call(function, tensors, **options):
    """The results of a function by the names of the arguments that they belong to."""
    results = function(**tensors, **options)
    results = results if isinstance(results, tuple | list) else (results,)
    assert len(results) >= len(tensors)
    return dict(zip(tensors, (np.asarray(value) for value in results), strict=False))


# ------------------------------------------------------------------------------------------------ flips and turns

TURNS = {
    "random_horizontal_flip": (lambda image: image[:, ::-1], MIRROR),
    "random_vertical_flip": (lambda image: image[::-1], UPSIDE),
    "random_rotation90": (np.rot90, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("extras", subsets(("boxes", "masks", "keypoints")), ids="-".join)
def test_flips_and_turns(scene, on_objects, name, extras):
    changed, permutation = TURNS[name]
    made = scene()
    tensors = made.tensors("image", *extras)
    options = {"keypoint_flip_permutation": permutation} if name.endswith("flip") and "keypoints" in extras else {}
    outcomes = set()
    for seed in range(6):
        found = call(getattr(pp, name), tensors, seed=seed, **options)
        turned = not np.array_equal(found["image"], made.image)
        outcomes.add(turned)
        np.testing.assert_array_equal(found["image"], changed(made.image) if turned else made.image)
        full = {"boxes": made.boxes, **found, "labels": made.labels}
        if "boxes" in extras:
            on_objects(full, permutation if turned else (0, 1, 2, 3))
        if "masks" in extras:
            np.testing.assert_array_equal(found["masks"], [made_mask(found["image"], n) for n in made.labels])
        if not turned:
            assert all(np.array_equal(found[key], tensors[key]) for key in tensors)
    assert outcomes == {True, False}


def made_mask(image, number):
    return image[..., 0] == 20 * number


@pytest.mark.parametrize("name", TURNS)
def test_turning_back_gives_the_example_again(scene, name):
    """A flip is its own inverse, and four quarter turns are none."""
    permutation = TURNS[name][1]
    options = {"keypoint_flip_permutation": permutation} if name.endswith("flip") else {}
    tensors = scene().tensors("image", "boxes", "masks", "keypoints")
    seed = next(
        s for s in range(20) if not np.array_equal(getattr(pp, name)(tensors["image"], seed=s)[0], tensors["image"])
    )
    found = tensors
    for _ in range(2 if options else 4):
        found = call(getattr(pp, name), found, seed=seed, **options)
    for key, value in tensors.items():
        np.testing.assert_allclose(found[key], value, atol=1e-6)


@pytest.mark.parametrize("name", ["random_horizontal_flip", "random_vertical_flip"])
def test_keypoints_need_a_permutation(scene, name):
    function, tensors = getattr(pp, name), scene().tensors("image", "keypoints")
    with pytest.raises(ValueError, match="keypoints need keypoint_flip_permutation"):
        function(**tensors)
    with pytest.raises(ValueError, match="2 entries for 4 keypoints"):
        function(**tensors, keypoint_flip_permutation=[1, 0])
    with pytest.raises(ValueError, match="keypoint_flip_permutation must be null or a list that holds each"):
        function(**tensors, keypoint_flip_permutation=[1, 1, 0, 0])


def test_hidden_keypoints_stay_hidden(scene):
    tensors = scene().tensors("image", "boxes", "keypoints")
    tensors["keypoints"][0, 2] = np.nan
    for seed in SEEDS:
        found = call(pp.random_horizontal_flip, tensors, seed=seed, keypoint_flip_permutation=[0, 1, 2, 3])
        assert np.isnan(found["keypoints"][0, 2]).all() and np.isnan(found["keypoints"]).sum() == 2
        assert np.isnan(call(pp.random_rotation90, tensors, seed=seed)["keypoints"]).sum() == 2
        assert np.isnan(call(pp.random_pad_image, tensors, seed=seed)["keypoints"]).sum() == 2


# ---------------------------------------------------------------------------------------------------------- crops

CROPS = {
    "random_crop_image": {"min_object_covered": 0.4},
    "random_crop_to_aspect_ratio": {"aspect_ratio": 0.8},
    "random_crop_pad_image": {"min_object_covered": 0.4, "pad_color": 255},
    "ssd_random_crop": {},
    "ssd_random_crop_pad": {"pad_color": [255] * 6},
    "ssd_random_crop_fixed_aspect_ratio": {"aspect_ratio": 1.25},
    "ssd_random_crop_pad_fixed_aspect_ratio": {"aspect_ratio": 1.25},
}


@pytest.mark.parametrize("name", CROPS)
@pytest.mark.parametrize("extras", subsets(EXTRAS), ids=lambda extras: "-".join(extras) or "none")
def test_crops_keep_what_belongs_together(scene, on_objects, name, extras):
    tensors = scene().tensors("image", "boxes", "labels", *extras)
    shapes = set()
    for seed in SEEDS:
        found = call(getattr(pp, name), tensors, seed=seed, **CROPS[name])
        on_objects(found)
        shapes.add(found["image"].shape)
    assert len(shapes) > 1 or name == "random_crop_to_aspect_ratio"


@pytest.mark.parametrize("clip_boxes", [True, False])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("coefficient", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["random_crop_image", "ssd_random_crop", "random_crop_pad_image"])
def test_limits_of_crops(scene, on_objects, name, coefficient, overlap, clip_boxes):
    """Which objects stay, what is cut off, and how often the example stays as it is."""
    made = scene()
    tensors = made.tensors(*ALL)
    options = {
        "overlap_thresh": overlap,
        "clip_boxes": clip_boxes,
        "random_coef": coefficient,
        "min_object_covered": 0.1,
    }
    ranges = {"area_range": (0.1, 0.5), "aspect_ratio_range": (0.6, 1.6)}
    options |= ranges if coefficient < 1 else {}
    if name == "ssd_random_crop":
        options = {key: [value] * 2 for key, value in options.items()}
        options = {"area_range": [(0.1, 1.0)] * 2, "aspect_ratio_range": [(0.5, 2.0)] * 2} | options
    if name == "random_crop_pad_image":
        options |= {"max_padded_size_ratio": (1.0, 1.0), "pad_color": 255}
    whole = 0
    for seed in range(12):
        found = call(getattr(pp, name), tensors, seed=seed, **options)
        untouched = np.array_equal(found["image"], made.image)
        whole += untouched
        if clip_boxes or name != "random_crop_pad_image":
            on_objects(found, clipped=clip_boxes)
        else:  # the part of a box that the crop cut away reaches into the padding, and none of the object is there
            contain_their_objects(found)
        if untouched:
            assert all(np.array_equal(found[key], tensors[key]) for key in tensors)
            continue
        kept = set(found["labels"])
        for number in made.labels:
            left = (found["image"][..., 0] == 20 * number).sum() / (made.image[..., 0] == 20 * number).sum()
            assert (number in kept) == (left > 0 and left >= overlap - 1e-6), (number, left)
    assert whole == 12 if coefficient == 1 else whole == 0 if coefficient == 0 else 0 < whole < 12


def contain_their_objects(found):
    height, width = found["image"].shape[:2]
    for box, number in zip(found["boxes"], found["labels"], strict=True):
        rows, columns = np.nonzero(made_mask(found["image"], number))
        assert box[0] * height <= rows.min() + 1e-3 and box[2] * height >= rows.max() + 1 - 1e-3
        assert box[1] * width <= columns.min() + 1e-3 and box[3] * width >= columns.max() + 1 - 1e-3


def test_a_box_that_reaches_out_of_the_picture_stays_so_if_nothing_is_cropped(scene):
    tensors = scene().tensors("image", "boxes", "labels")
    tensors["boxes"] = tensors["boxes"] * 2 - 0.4
    found = call(pp.random_crop_image, tensors, random_coef=1.0, seed=1)
    np.testing.assert_array_equal(found["boxes"], tensors["boxes"])


@pytest.mark.parametrize("area", [(0.1, 0.3), (0.5, 0.5), (0.9, 1.0)])
@pytest.mark.parametrize("aspect", [(0.5, 0.5), (0.75, 1.33), (1.0, 2.0)])
def test_windows_keep_to_their_ranges(area, aspect):
    image = np.zeros((120, 90, 1), np.float32)
    options = {"min_object_covered": 0.0, "area_range": area, "aspect_ratio_range": aspect}
    fitting = area[0] * 120 * 90 * aspect[0] <= 90**2 and area[0] * 120 * 90 / aspect[1] <= 120**2
    for seed in range(6):
        crop = np.asarray(
            pp.random_crop_image(image, np.zeros((0, 4), np.float32), np.zeros(0), seed=seed, **options)[0]
        )
        height, width = crop.shape[:2]
        if not fitting:
            assert (height, width) == (120, 90)
            continue
        assert (height - 0.5) * (width - 0.5) <= area[1] * 120 * 90 and (height + 0.5) * (width + 0.5) >= area[
            0
        ] * 120 * 90
        assert (width + 0.5) / (height - 0.5) >= aspect[0] and (width - 0.5) / (height + 0.5) <= aspect[1]


@pytest.mark.parametrize("covered", [0.1, 0.5, 0.9, 1.0])
def test_windows_show_enough_of_an_object(scene, covered):
    made = scene()
    for seed in range(12):
        options = {"min_object_covered": covered, "overlap_thresh": 0.0, "area_range": (0.1, 0.6)}
        image = call(pp.random_crop_image, made.tensors("image", "boxes", "labels"), seed=seed, **options)["image"]
        shares = [(image[..., 0] == 20 * n).sum() / (made.image[..., 0] == 20 * n).sum() for n in made.labels]
        assert max(shares) >= covered - 1e-6


@pytest.mark.parametrize("coefficient", [0.0, 1e-6])
def test_an_impossible_crop_leaves_the_example_as_it_is(scene, coefficient):
    """Also what a crop would drop or cut: a box without an area, one that reaches out of the picture."""
    tensors = scene(ids=(1, 2, 3)).tensors(*ALL)
    tensors["boxes"] = np.array([[0, 0, 1, 1], [0.5, 0.5, 0.5, 0.6], [-0.1, 0, 1.2, 0.9]], np.float32)
    options = {"min_object_covered": 1.0, "area_range": (0.1, 0.5), "random_coef": coefficient}
    found = call(pp.random_crop_image, tensors, seed=3, **options)
    for key, value in tensors.items():
        np.testing.assert_array_equal(found[key], value)


def test_no_objects_and_degenerate_boxes(scene, on_objects):
    empty = scene(ids=()).tensors(*ALL)
    one = scene(ids=(2,)).tensors("image", "boxes", "labels")
    one["boxes"] = np.concatenate([one["boxes"], [[0.5, 0.2, 0.5, 0.6]], [[np.nan] * 4]]).astype(np.float32)
    one["labels"] = np.array([2, 5, 5])
    for name, options in CROPS.items():
        for seed in range(3):
            found = call(getattr(pp, name), empty, seed=seed, **options)
            assert [len(found[key]) for key in found if key != "image"] == [0] * 7
            assert found["masks"].shape[1:] == found["image"].shape[:2]
    for seed in range(3):
        found = call(pp.random_crop_image, one, min_object_covered=0.5, area_range=(0.2, 0.5), seed=seed)
        assert set(found["labels"]) <= {2}
        on_objects(found)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.7, 4 / 3])
@pytest.mark.parametrize("clip_boxes", [True, False])
def test_crop_to_aspect_ratio_is_the_largest_window(scene, on_objects, ratio, clip_boxes):
    tensors = scene().tensors(*ALL)
    expected = (round(64 / ratio), 64) if ratio > 64 / 48 else (48, round(48 * ratio))
    corners = set()
    for seed in range(6):
        found = call(pp.random_crop_to_aspect_ratio, tensors, aspect_ratio=ratio, clip_boxes=clip_boxes,
                     overlap_thresh=0.0, seed=seed)  # fmt: skip
        assert found["image"].shape[:2] == expected
        corners.add(found["image"][..., 2].tobytes())
        on_objects(found, clipped=clip_boxes)
    assert len(corners) > 1 or ratio == 4 / 3


# ----------------------------------------------------------------------------------------------------------- pads


@pytest.mark.parametrize("extras", subsets(("masks", "keypoints")), ids=lambda extras: "-".join(extras) or "none")
@pytest.mark.parametrize("colour", [None, 7, [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("limits", [(None, None), ((60, 70), (61, 71)), ((50, 70), (90, 90)), ((20, 20), None)])
def test_pad_image(scene, on_objects, limits, colour, extras):
    made = scene()
    tensors = made.tensors("image", "boxes", *extras)
    low, high = limits
    smallest, largest = np.maximum(low or (48, 64), (48, 64)), np.array(high or (96, 128))
    for seed in SEEDS:
        found = call(pp.random_pad_image, tensors, min_image_size=low, max_image_size=high, pad_color=colour, seed=seed)
        height, width = found["image"].shape[:2]
        assert (smallest <= (height, width)).all() and ((height, width) < largest).all()  # the bound is exclusive
        on_objects(found | {"labels": made.labels})
        top, left = find(found["image"], made.image)
        around = np.ones((height, width), bool)
        around[top : top + 48, left : left + 64] = False
        expected = made.image.mean((0, 1)) if colour is None else np.broadcast_to(colour, 3)
        np.testing.assert_allclose(found["image"][around], np.tile(expected, (around.sum(), 1)), rtol=1e-4)


def find(picture, part):
    """Row and column where the part stands in the picture."""
    places = [
        (top, left)
        for top in range(picture.shape[0] - part.shape[0] + 1)
        for left in range(picture.shape[1] - part.shape[1] + 1)
        if np.array_equal(picture[top, left : left + part.shape[1]], part[0])
        and np.array_equal(picture[top : top + part.shape[0], left : left + part.shape[1]], part)
    ]
    assert len(places) == 1
    return places[0]


def test_pad_colours_need_a_value_for_each_channel(scene):
    with pytest.raises(ValueError, match="pad_color must have a value for each of 3 channels"):
        pp.random_pad_image(**scene().tensors("image", "boxes"), pad_color=[1, 2], seed=0)


@pytest.mark.parametrize("extras", subsets(("masks", "keypoints")), ids=lambda extras: "-".join(extras) or "none")
@pytest.mark.parametrize("ratio", [0.5, 1.0, 4 / 3, 2.0])
@pytest.mark.parametrize("sizes", [((1.0, 1.0), (2.0, 2.0)), ((1.0, 1.0), (1.0, 1.0)), ((1.5, 1.5), (3.0, 3.0))])
def test_pad_to_aspect_ratio(scene, on_objects, sizes, ratio, extras):
    made = scene()
    low, high = sizes
    fitted = np.maximum((48, 64), (64 / ratio, 48 * ratio))
    for seed in SEEDS:
        found = call(pp.random_pad_to_aspect_ratio, made.tensors("image", "boxes", *extras), aspect_ratio=ratio,
                     min_padded_size_ratio=low, max_padded_size_ratio=high, seed=seed)  # fmt: skip
        height, width = found["image"].shape[:2]
        assert abs(width - height * ratio) <= 0.5 + 0.5 * ratio
        np.testing.assert_array_equal(found["image"][:48, :64], made.image)
        assert not found["image"][48:].any() and not found["image"][:, 64:].any()
        assert height <= max(48 * high[0], fitted[0]) + 0.5 and width <= max(64 * high[1], fitted[1]) + 0.5
        on_objects(found | {"labels": made.labels})


@pytest.mark.parametrize("low", [1.0, 1.5])
def test_crop_pad_sizes_are_ratios_of_the_sides_before_the_crop(scene, low):
    sizes = {"min_padded_size_ratio": (low, low), "max_padded_size_ratio": (2.0, 2.0)}
    for seed in range(8):
        found = call(pp.random_crop_pad_image, scene().tensors("image", "boxes", "labels"), min_object_covered=0.2,
                     seed=seed, **sizes)  # fmt: skip
        height, width = found["image"].shape[:2]
        assert 48 * low <= height < 96 and 64 * low <= width < 128


# ---------------------------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize("ratios", [(0.5, 2.0), (0.7, 0.7), (2.0, 2.0)])
def test_image_scale(scene, ratios, with_masks):
    made = scene()
    tensors = made.tensors("image", *(["masks"] if with_masks else []))
    for seed in SEEDS:
        found = call(pp.random_image_scale, tensors, min_scale_ratio=ratios[0], max_scale_ratio=ratios[1], seed=seed)
        height, width = found["image"].shape[:2]
        assert int(48 * ratios[0] + 1e-6) <= height <= 48 * ratios[1] and abs(width / height - 64 / 48) < 0.06
        if ratios[0] == ratios[1]:
            assert (height, width) == (int(48 * ratios[0] + 1e-6), int(64 * ratios[0] + 1e-6))
        for row in range(4 if with_masks else 0):  # masks lie on their objects, to a pixel
            mask, (top, bottom, left, right) = found["masks"][row], box_of(made.masks[row])
            scaled = np.array([top / 48 * height, bottom / 48 * height, left / 64 * width, right / 64 * width])
            np.testing.assert_allclose(box_of(mask), scaled, atol=1.5)
            assert set(np.unique(mask)) <= {0, 1} and mask.shape == (height, width)


def box_of(mask):
    rows, columns = np.nonzero(mask)
    return np.array([rows.min(), rows.max() + 1, columns.min(), columns.max() + 1])


def test_wrong_shapes_are_named(scene):
    made = scene()
    with pytest.raises(ValueError, match=r"random_crop_image: masks must have the shape \[objects, height, width\]"):
        pp.random_crop_image(**made.tensors("image", "boxes", "labels"), masks=made.masks[0])
    with pytest.raises(ValueError, match=r"boxes must have the shape \[objects, 4\], got \(4, 3\)"):
        pp.random_crop_image(made.image, tf.zeros([4, 3]), made.labels)
    with pytest.raises(ValueError, match="missing a required argument: 'labels'"):
        pp.random_crop_image(made.image, made.boxes)
