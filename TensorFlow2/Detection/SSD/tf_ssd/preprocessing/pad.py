"""Padding: pictures on a larger background, so that objects become smaller."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import parameters as p
from .boxes import boxes_in, keypoints_in
from .cache import PreprocessorCache as Ids
from .crop import Example, crop_to_window, random_window
from .draws import AnyCache, Draws, Seed
from .registry import step
from .shapes import as_floats, present, size_of

__all__ = ["random_crop_pad_image", "random_pad_image", "random_pad_to_aspect_ratio"]

_RATIOS = [("min_padded_size_ratio", "max_padded_size_ratio")]


def place(example: Example, size: tf.Tensor, top: Any, left: Any, colour: Any) -> Example:
    """The picture at row `top`, column `left` of a background of `size` (height, width); masks get 0 around them.

    `colour`: one value or one per channel; None is the mean of each channel. Labels and the like stay as they are.
    """
    image = example.image
    height, width = size_of(image)
    if colour is None:
        colour = tf.reduce_mean(tf.cast(image, tf.float32), axis=[0, 1])
    colour = tf.cast(colour, image.dtype)
    channels = image.shape[2]
    if colour.shape.rank and channels not in (None, 1) and colour.shape[0] not in (None, 1, channels):
        raise ValueError(f"pad_color must have a value for each of {channels} channels, got the shape {colour.shape}")
    below, beside = size[0] - top - height, size[1] - left - width

    def fill(rows: Any, columns: Any) -> tf.Tensor:
        return tf.broadcast_to(colour, tf.stack([rows, columns, tf.shape(image)[2]]))

    middle = tf.concat([fill(height, left), image, fill(height, beside)], axis=1)
    padded = tf.concat([fill(top, size[1]), middle, fill(below, size[1])], axis=0)
    padded.set_shape([None, None, channels])
    # The background as a window of the picture: an enlarged frame.
    rows, columns = as_floats((height, width))
    high = tf.cast(size, tf.float32)
    y, x = tf.cast(top, tf.float32), tf.cast(left, tf.float32)
    window = tf.stack([-y / rows, -x / columns, (high[0] - y) / rows, (high[1] - x) / columns])
    masks, keypoints = example.masks, example.keypoints
    return Example(
        padded, boxes_in(example.boxes, window), example.labels, example.label_weights, example.label_confidences,
        example.multiclass_scores,
        None if masks is None else tf.pad(masks, [[0, 0], [top, below], [left, beside]]),
        None if keypoints is None else keypoints_in(keypoints, window),
    )  # fmt: skip


def random_place(example: Example, draws: Draws, smallest: Any, largest: Any, colour: Any) -> Example:
    """On a background whose sides are whole numbers in [smallest, largest), at a random place of it.

    Sides below the picture's are raised to it. The same for equal limits, which leave nothing to draw.
    """
    own = tf.stack(size_of(example.image))
    low = tf.maximum(tf.cast(smallest, tf.int32), own)
    high = tf.maximum(tf.cast(largest, tf.int32), low)
    sides, corner = draws.uniform("sides", [2]), draws.uniform("corner", [2])
    size = low + tf.cast(sides * tf.cast(high - low, tf.float32), tf.int32)
    offset = tf.cast(corner * tf.cast(size - own, tf.float32), tf.int32)
    return place(example, size, offset[0], offset[1], colour)


@step(checks={"min_image_size": p.size, "max_image_size": p.size, "pad_color": p.colour})
def random_pad_image(
    image: Any, boxes: Any, masks: Any = None, keypoints: Any = None, min_image_size: Any = None,
    max_image_size: Any = None, pad_color: Any = None, seed: Seed = None, preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Put the picture at a random place of a larger background.

    Sides are drawn in [min_image_size, max_image_size), by default from the picture's size to twice that. `pad_color`
    is one value or one per channel, by default the mean of each channel. Returns picture, boxes, [masks], [keypoints].
    """
    example = Example(image, boxes, masks=masks, keypoints=keypoints).tensors()
    own = tf.stack(size_of(example.image))
    smallest = own if min_image_size is None else min_image_size
    largest = 2 * own if max_image_size is None else max_image_size
    draws = Draws(Ids.PAD_IMAGE, [min_image_size, max_image_size], seed, preprocess_vars_cache)
    padded = random_place(example, draws, smallest, largest, pad_color)
    return present(padded.image, padded.boxes, padded.masks, padded.keypoints)


@step(checks=p.CROP | p.PADDED | {"pad_color": p.colour}, ordered=_RATIOS)
def random_crop_pad_image(
    image: Any, boxes: Any, labels: Any, label_weights: Any = None, label_confidences: Any = None,
    multiclass_scores: Any = None, masks: Any = None, keypoints: Any = None, min_object_covered: float = 1.0,
    aspect_ratio_range: Any = (0.75, 1.33), area_range: Any = (0.1, 1.0), overlap_thresh: float = 0.3,
    clip_boxes: bool = True, random_coef: float = 0.0, min_padded_size_ratio: Any = (1.0, 1.0),
    max_padded_size_ratio: Any = (2.0, 2.0), pad_color: Any = None, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """random_crop_image, then on a background whose sides are these ratios of the sides before the crop."""
    example = Example(
        image, boxes, labels, label_weights, label_confidences, multiclass_scores, masks, keypoints
    ).tensors()
    limits = {
        "min_object_covered": min_object_covered, "aspect_ratio_range": aspect_ratio_range, "area_range": area_range,
        "random_coef": random_coef,
    }  # fmt: skip
    keyed = [*limits.values(), min_padded_size_ratio, max_padded_size_ratio]
    draws = Draws(Ids.CROP_IMAGE, keyed, seed, preprocess_vars_cache)
    window, untouched = random_window(draws, example, limits, draws.inner(Ids.STRICT_CROP_IMAGE, "strict"))
    cropped = crop_to_window(example, window, untouched, overlap_thresh, clip_boxes)
    ratios = (min_padded_size_ratio, max_padded_size_ratio)
    return pad_by_ratio(cropped, example, draws.inner(Ids.PAD_IMAGE, "pad"), *ratios, pad_color).present()


def pad_by_ratio(cropped: Example, before: Example, draws: Draws, low: Any, high: Any, colour: Any) -> Example:
    """On a background whose sides are ratios of those that the picture had before its crop."""
    sides = tf.stack(as_floats(size_of(before.image)))
    smallest, largest = (tf.cast(sides * ratio + 1e-4, tf.int32) for ratio in (low, high))
    return random_place(cropped, draws, smallest, largest, colour)


@step(checks={"aspect_ratio": p.positive, **p.PADDED}, ordered=_RATIOS)
def random_pad_to_aspect_ratio(
    image: Any, boxes: Any, masks: Any = None, keypoints: Any = None, aspect_ratio: float = 1.0,
    min_padded_size_ratio: Any = (1.0, 1.0), max_padded_size_ratio: Any = (2.0, 2.0), seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Zeros at the bottom and right until width / height is `aspect_ratio`.

    The frame is the smallest that holds the picture, times a random scale with which its sides are at least
    `min_padded_size_ratio` and at most `max_padded_size_ratio` of the picture's, as far as the aspect ratio allows.
    Returns picture, boxes, [masks], [keypoints].
    """
    example = Example(image, boxes, masks=masks, keypoints=keypoints).tensors()
    keyed = [aspect_ratio, min_padded_size_ratio, max_padded_size_ratio]
    draws = Draws(Ids.PAD_TO_ASPECT_RATIO, keyed, seed, preprocess_vars_cache)
    padded = pad_to_aspect_ratio(example, draws, aspect_ratio, min_padded_size_ratio, max_padded_size_ratio)
    return present(padded.image, padded.boxes, padded.masks, padded.keypoints)


def pad_to_aspect_ratio(example: Example, draws: Draws, aspect_ratio: Any, low: Any, high: Any) -> Example:
    """The padding of `random_pad_to_aspect_ratio`."""
    height, width = as_floats(size_of(example.image))
    rows, columns = tf.maximum(height, width / aspect_ratio), tf.maximum(width, height * aspect_ratio)
    largest = tf.minimum(tf.maximum(high[0] * height / rows, 1.0), tf.maximum(high[1] * width / columns, 1.0))
    smallest = tf.minimum(tf.maximum(tf.maximum(low[0] * height / rows, low[1] * width / columns), 1.0), largest)
    scale = draws.between("scale", smallest, largest)
    size = tf.cast(tf.round(tf.stack([rows, columns]) * scale), tf.int32)
    return place(example, tf.maximum(size, tf.stack(size_of(example.image))), 0, 0, 0)
