"""SSD's crops (arXiv:1512.02325, section 2.2): one of several cases, each with its own share of an object to show.

Each parameter of p.CASES is a list with one value per case. The case is drawn, its values are looked up, and one crop
is made with them: the graph does not grow with the number of cases. What becomes of objects: see `crop`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import parameters as p
from .cache import PreprocessorCache as Ids
from .crop import Example, crop_to_aspect_ratio, crop_to_window, random_window
from .draws import AnyCache, Draws, Seed
from .pad import pad_by_ratio, pad_to_aspect_ratio
from .registry import step

__all__ = [
    "ssd_random_crop",
    "ssd_random_crop_fixed_aspect_ratio",
    "ssd_random_crop_pad",
    "ssd_random_crop_pad_fixed_aspect_ratio",
]

SEVEN = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
SIX = SEVEN[1:]
_PER_CASE = tuple(p.CASES)
_FIXED = {name: check for name, check in p.CASES.items() if name != "aspect_ratio_range"}
_RATIOS = ("min_padded_size_ratio", "max_padded_size_ratio")


def _choose(draws: Draws, **per_case: Any) -> dict[str, tf.Tensor]:
    """A case, each as likely: its number as `case`, and its values."""
    count = len(per_case["min_object_covered"])
    case = tf.cast(draws.uniform("case") * count, tf.int32)
    tables = {
        name: tf.constant(list(values), tf.bool if name == "clip_boxes" else tf.float32)
        for name, values in per_case.items()
    }
    return {"case": case, **{name: table[case] for name, table in tables.items()}}


def _crop(example: Example, draws: Draws, limits: dict[str, tf.Tensor]) -> Example:
    parts = draws.inner(Ids.STRICT_CROP_IMAGE, "strict")
    window, untouched = random_window(draws.inner(Ids.CROP_IMAGE, "crop"), example, limits, parts)
    return crop_to_window(example, window, untouched, limits["overlap_thresh"], limits["clip_boxes"])


@step(checks=p.CASES, cases=_PER_CASE)
def ssd_random_crop(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, min_object_covered: Any = SEVEN,
    aspect_ratio_range: Any = ((0.5, 2.0),) * 7, area_range: Any = ((0.1, 1.0),) * 7, overlap_thresh: Any = SEVEN,
    clip_boxes: Any = (True,) * 7, random_coef: Any = (0.15,) * 7, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """random_crop_image with the parameters of a random case. Returns as that."""
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    per_case = {
        "min_object_covered": min_object_covered, "aspect_ratio_range": aspect_ratio_range, "area_range": area_range,
        "overlap_thresh": overlap_thresh, "clip_boxes": clip_boxes, "random_coef": random_coef,
    }  # fmt: skip
    draws = Draws(Ids.SSD_CROP_SELECTOR_ID, list(per_case.values()), seed, preprocess_vars_cache)
    return _crop(example, draws, _choose(draws, **per_case)).present()


@step(
    checks=p.CASES
    | {
        "min_padded_size_ratio": p.list_of(p.pair(p.positive)),
        "max_padded_size_ratio": p.list_of(p.pair(p.positive)),
        "pad_color": p.list_of(p.colour),
    },
    cases=(*_PER_CASE, *_RATIOS, "pad_color"),
)
def ssd_random_crop_pad(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, min_object_covered: Any = SIX,
    aspect_ratio_range: Any = ((0.5, 2.0),) * 6, area_range: Any = ((0.1, 1.0),) * 6, overlap_thresh: Any = SIX,
    clip_boxes: Any = (True,) * 6, random_coef: Any = (0.15,) * 6, min_padded_size_ratio: Any = ((1.0, 1.0),) * 6,
    max_padded_size_ratio: Any = ((2.0, 2.0),) * 6, pad_color: Any = (None,) * 6, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """random_crop_pad_image with the parameters of a random case. Returns as that."""
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    per_case = {
        "min_object_covered": min_object_covered, "aspect_ratio_range": aspect_ratio_range, "area_range": area_range,
        "overlap_thresh": overlap_thresh, "clip_boxes": clip_boxes, "random_coef": random_coef,
        "min_padded_size_ratio": min_padded_size_ratio, "max_padded_size_ratio": max_padded_size_ratio,
    }  # fmt: skip
    draws = Draws(Ids.SSD_CROP_PAD_SELECTOR_ID, list(per_case.values()), seed, preprocess_vars_cache)
    limits = _choose(draws, **per_case)
    cropped = _crop(example, draws, limits)
    colour = _colour(pad_color, cropped.image, limits["case"])
    ratios = (limits["min_padded_size_ratio"], limits["max_padded_size_ratio"])
    return pad_by_ratio(cropped, example, draws.inner(Ids.PAD_IMAGE, "pad"), *ratios, colour).present()


def _colour(per_case: Any, image: tf.Tensor, case: tf.Tensor) -> tf.Tensor:
    """[C]: the case's colour; None is the mean of each channel."""
    mean = tf.reduce_mean(tf.cast(image, tf.float32), axis=[0, 1])
    colours = [mean if value is None else tf.broadcast_to(tf.cast(value, tf.float32), tf.shape(mean))
               for value in per_case]  # fmt: skip
    return tf.stack(colours)[case]


@step(checks=_FIXED | {"aspect_ratio": p.positive}, cases=tuple(_FIXED))
def ssd_random_crop_fixed_aspect_ratio(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, min_object_covered: Any = SIX,
    aspect_ratio: float = 1.0, area_range: Any = ((0.1, 1.0),) * 6, overlap_thresh: Any = SIX,
    clip_boxes: Any = (True,) * 6, random_coef: Any = (0.15,) * 6, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """ssd_random_crop with windows of one aspect ratio, then random_crop_to_aspect_ratio for those that were kept.

    The second crop keeps and cuts objects by the drawn case's `overlap_thresh` and `clip_boxes`.
    """
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    per_case = {
        "min_object_covered": min_object_covered, "aspect_ratio_range": ((aspect_ratio,) * 2,) * len(area_range),
        "area_range": area_range, "overlap_thresh": overlap_thresh, "clip_boxes": clip_boxes,
        "random_coef": random_coef,
    }  # fmt: skip
    draws = Draws(Ids.SSD_CROP_SELECTOR_ID, ["fixed", *per_case.values()], seed, preprocess_vars_cache)
    limits = _choose(draws, **per_case)
    second = draws.inner(Ids.CROP_TO_ASPECT_RATIO, "aspect")
    cropped = _crop(example, draws, limits)
    last = crop_to_aspect_ratio(cropped, second, aspect_ratio, limits["overlap_thresh"], limits["clip_boxes"])
    return last.present()


@step(
    checks=p.CASES | p.PADDED | {"aspect_ratio": p.positive},
    ordered=[_RATIOS],
    cases=_PER_CASE,
)
def ssd_random_crop_pad_fixed_aspect_ratio(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, min_object_covered: Any = SIX,
    aspect_ratio: float = 1.0, aspect_ratio_range: Any = ((0.5, 2.0),) * 6, area_range: Any = ((0.1, 1.0),) * 6,
    overlap_thresh: Any = SIX, clip_boxes: Any = (True,) * 6, random_coef: Any = (0.15,) * 6,
    min_padded_size_ratio: Any = (1.0, 1.0), max_padded_size_ratio: Any = (2.0, 2.0), seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """ssd_random_crop, then random_pad_to_aspect_ratio. Returns as random_crop_image."""
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    per_case = {
        "min_object_covered": min_object_covered, "aspect_ratio_range": aspect_ratio_range, "area_range": area_range,
        "overlap_thresh": overlap_thresh, "clip_boxes": clip_boxes, "random_coef": random_coef,
    }  # fmt: skip
    keyed = ["padded", *per_case.values(), aspect_ratio, min_padded_size_ratio, max_padded_size_ratio]
    draws = Draws(Ids.SSD_CROP_SELECTOR_ID, keyed, seed, preprocess_vars_cache)
    cropped = _crop(example, draws, _choose(draws, **per_case))
    second = draws.inner(Ids.PAD_TO_ASPECT_RATIO, "pad")
    padded = pad_to_aspect_ratio(cropped, second, aspect_ratio, min_padded_size_ratio, max_padded_size_ratio)
    return padded.present()
