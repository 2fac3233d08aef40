"""Crops, and what they do to objects: `random_crop_image` and `random_crop_to_aspect_ratio`.

An object stays if the window shows at least the share `overlap_thresh` of its box, and any of it at all. With
`clip_boxes` its box is cut off at the window's edges and its keypoints outside become NaN; without, boxes and keypoints
keep their places, which may lie outside the picture. Masks are cut with the picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from . import parameters as p
from .boxes import boxes_in, clip, covered, hide_outside, keypoints_in
from .cache import PreprocessorCache as Ids
from .draws import AnyCache, Draws, Seed
from .registry import step
from .shapes import as_floats, present, size_of
from .window import WHOLE, sample_window

__all__ = ["random_crop_image", "random_crop_to_aspect_ratio"]


@dataclass(frozen=True)
class Example:
    """A picture [H, W, C] and what belongs to its N objects, in the order in which functions take and return it."""

    image: Any
    boxes: Any
    labels: Any = None
    label_weights: Any = None
    label_confidences: Any = None
    multiclass_scores: Any = None
    masks: Any = None
    keypoints: Any = None

    def tensors(self) -> Example:
        return Example(*(None if value is None else tf.convert_to_tensor(value) for value in _values(self)))

    def present(self) -> tuple[tf.Tensor, ...]:
        return present(*_values(self))


def _values(example: Example) -> tuple[Any, ...]:
    """The fields as they are (`dataclasses.astuple` would copy every tensor)."""
    return tuple(getattr(example, name) for name in Example.__dataclass_fields__)


def crop_to_window(example: Example, window: Any, untouched: Any, overlap_thresh: Any, clip_boxes: Any) -> Example:
    """Cut to the window [4], given as fractions and rounded to whole pixels. Where `untouched` (a scalar bool), all
    of the example stays as it is. `overlap_thresh` and `clip_boxes` may be tensors."""
    image, boxes = example.image, example.boxes
    height, width = size_of(image)
    rows, columns = as_floats((height, width))
    window = tf.where(untouched, tf.constant(WHOLE), window)
    corners = tf.cast(tf.round(window * tf.stack([rows, columns, rows, columns])), tf.int32)
    top, left = tf.minimum(corners[0], height - 1), tf.minimum(corners[1], width - 1)
    bottom, right = tf.maximum(corners[2], top + 1), tf.maximum(corners[3], left + 1)
    # What was really cut, so that boxes stay on their objects to the pixel.
    exact = tf.cast(tf.stack([top, left, bottom, right]), tf.float32) / tf.stack([rows, columns, rows, columns])
    shown = covered(boxes, exact)
    kept = tf.where(untouched | ((shown > 0) & (shown >= overlap_thresh - 1e-6)))[:, 0]

    def objects(values: Any) -> Any:
        return None if values is None else tf.gather(values, kept)

    cut = tf.convert_to_tensor(clip_boxes) & ~tf.convert_to_tensor(untouched)
    new_boxes = boxes_in(objects(boxes), exact)
    keypoints = objects(example.keypoints)
    if keypoints is not None:
        keypoints = keypoints_in(keypoints, exact)
        keypoints = tf.where(cut, hide_outside(keypoints), keypoints)
    masks = objects(example.masks)
    cropped = image[top:bottom, left:right]
    cropped.set_shape([None, None, image.shape[2]])
    return Example(
        cropped, tf.where(cut, clip(new_boxes), new_boxes), objects(example.labels), objects(example.label_weights),
        objects(example.label_confidences), objects(example.multiclass_scores),
        None if masks is None else masks[:, top:bottom, left:right], keypoints,
    )  # fmt: skip


def random_window(draws: Draws, example: Example, limits: dict[str, Any], parts: Draws) -> tuple[tf.Tensor, tf.Tensor]:
    """(window, untouched) of a random crop. `limits`: the parameters of p.CROP, numbers or tensors."""

    def make() -> tuple[tf.Tensor, tf.Tensor]:
        return sample_window(
            parts, size_of(example.image), example.boxes, limits["min_object_covered"], limits["aspect_ratio_range"],
            limits["area_range"],
        )  # fmt: skip

    window, found = parts.remember("window", make)
    chance = limits["random_coef"]
    if not tf.is_tensor(chance) and chance == 0:
        return window, ~found
    return window, ~found | (draws.uniform("keep") < chance)


@step(checks=p.CROP)
def random_crop_image(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, min_object_covered: float = 1.0,
    aspect_ratio_range: Any = (0.75, 1.33), area_range: Any = (0.1, 1.0), overlap_thresh: float = 0.3,
    clip_boxes: bool = True, random_coef: float = 0.0, seed: Seed = None, preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Crop a window that shows at least the share `min_object_covered` of one object.

    With probability `random_coef`, and where none of 100 windows suits, the example stays as it is. Returns picture,
    boxes, labels and then what else was given. The module's docstring says what becomes of objects.
    """
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    limits = {
        "min_object_covered": min_object_covered, "aspect_ratio_range": aspect_ratio_range, "area_range": area_range,
        "random_coef": random_coef,
    }  # fmt: skip
    draws = Draws(Ids.CROP_IMAGE, list(limits.values()), seed, preprocess_vars_cache)
    window, untouched = random_window(draws, example, limits, draws.inner(Ids.STRICT_CROP_IMAGE, "strict"))
    return crop_to_window(example, window, untouched, overlap_thresh, clip_boxes).present()


@step(checks={"aspect_ratio": p.positive, "overlap_thresh": p.fraction, "clip_boxes": p.flag})
def random_crop_to_aspect_ratio(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, aspect_ratio: float = 1.0,
    overlap_thresh: float = 0.3, clip_boxes: bool = True, seed: Seed = None, preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Crop the largest window of width / height = `aspect_ratio`, at a random place. Returns as random_crop_image."""
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    draws = Draws(Ids.CROP_TO_ASPECT_RATIO, [aspect_ratio], seed, preprocess_vars_cache)
    return crop_to_aspect_ratio(example, draws, aspect_ratio, overlap_thresh, clip_boxes).present()


def crop_to_aspect_ratio(
    example: Example, draws: Draws, aspect_ratio: Any, overlap_thresh: Any, clip_boxes: Any
) -> Example:
    """The crop of `random_crop_to_aspect_ratio`; the limits may be tensors."""
    height, width = as_floats(size_of(example.image))
    rows = tf.clip_by_value(tf.round(width / aspect_ratio), 1.0, height)
    columns = tf.clip_by_value(tf.round(height * aspect_ratio), 1.0, width)
    sides, cut = tf.stack([height, width]), tf.stack([rows, columns])
    corner = tf.floor(draws.uniform("corner", [2]) * (sides - cut + 1))
    window = tf.concat([corner / sides, (corner + cut) / sides], 0)
    return crop_to_window(example, window, tf.constant(False), overlap_thresh, clip_boxes)
