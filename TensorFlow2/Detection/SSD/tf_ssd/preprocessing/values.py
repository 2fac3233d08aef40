"""Steps without, or with little, chance: ranges of values, units of boxes, and the labels and scores of objects."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import parameters as p
from .boxes import clip
from .draws import Seed, fold, uniform
from .registry import step
from .shapes import as_floats, floats, present, size_of

__all__ = [
    "convert_class_logits_to_softmax", "image_to_float", "normalize_image", "one_hot_encoding", "random_jitter_boxes",
    "retain_boxes_above_threshold", "scale_boxes_to_pixel_coordinates", "subtract_channel_mean",
]  # fmt: skip


@step(checks={name: p.number() for name in ("original_minval", "original_maxval", "target_minval", "target_maxval")})
def normalize_image(
    image: Any, original_minval: float, original_maxval: float, target_minval: float, target_maxval: float
) -> tf.Tensor:
    """The affine map of [original_minval, original_maxval] to [target_minval, target_maxval], as float32."""
    if original_minval == original_maxval:
        raise ValueError(f"normalize_image: original_minval and original_maxval are both {original_minval!r}")
    scale = (target_maxval - target_minval) / (original_maxval - original_minval)
    return floats(image) * scale + (target_minval - original_minval * scale)


@step()
def image_to_float(image: Any) -> tf.Tensor:
    """The same values as float32."""
    return floats(image)


@step(checks={"means": p.list_of(p.number())})
def subtract_channel_mean(image: Any, means: Any = None) -> tf.Tensor:
    """[H, W, C] minus one number per channel."""
    image = floats(image)
    if image.shape[2] is not None and len(means) != image.shape[2]:
        raise ValueError(f"subtract_channel_mean: means has {len(means)} values for {image.shape[2]} channels")
    return image - tf.constant(list(means), tf.float32)


@step()
def scale_boxes_to_pixel_coordinates(image: Any, boxes: Any, keypoints: Any = None) -> tuple[tf.Tensor, ...]:
    """Boxes and keypoints in pixels instead of fractions. Returns picture, boxes, [keypoints]."""
    image = tf.convert_to_tensor(image)
    sides = tf.stack(as_floats(size_of(image)))
    scaled = floats(boxes) * tf.tile(sides, [2])
    return present(image, scaled, None if keypoints is None else floats(keypoints) * sides)


@step(checks={"threshold": p.number()})
def retain_boxes_above_threshold(
    boxes: Any, labels: Any, label_weights: Any, label_confidences: Any = None, multiclass_scores: Any = None,
    masks: Any = None, keypoints: Any = None, threshold: float = 0.0,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Keep the objects whose weight is above `threshold`, or NaN (nobody gave one). Returns what was given."""
    weights = tf.convert_to_tensor(label_weights)
    kept = tf.where(tf.math.is_nan(weights) | (weights > threshold))[:, 0]
    given = (boxes, labels, weights, label_confidences, multiclass_scores, masks, keypoints)
    return tuple(tf.gather(value, kept) for value in present(*given))


@step(checks={"ratio": p.number(0)})
def random_jitter_boxes(boxes: Any, ratio: float = 0.05, seed: Seed = None) -> tf.Tensor:
    """Move each edge by up to `ratio` of its box's height or width, then cut at the picture's edges.

    Each box draws for itself, so there is nothing that another picture's boxes could replay: it takes no cache.
    """
    boxes = floats(boxes)
    draws = 2.0 * ratio * (uniform(tf.shape(boxes), fold(seed, "random_jitter_boxes")) - 0.5)
    sides = tf.tile(boxes[:, 2:] - boxes[:, :2], [1, 2])
    moved = clip(boxes + draws * sides)
    # From a ratio of 0.5 on, edges can change places.
    return tf.concat([tf.minimum(moved[:, :2], moved[:, 2:]), tf.maximum(moved[:, :2], moved[:, 2:])], axis=1)


@step(checks={"num_classes": p.whole()})
def one_hot_encoding(labels: Any, num_classes: int | None = None) -> tf.Tensor:
    """[num_classes] of 0 and 1 (int32): which classes the labels [N] name. Labels [1, 4] of 5 give [0, 1, 0, 0, 1]."""
    rows = tf.one_hot(tf.cast(labels, tf.int32), num_classes, dtype=tf.int32)
    return tf.reduce_max(tf.concat([rows, tf.zeros([1, num_classes], tf.int32)], 0), axis=0)  # zeros without labels


@step(checks={"temperature": p.positive})
def convert_class_logits_to_softmax(multiclass_scores: Any, temperature: float = 1.0) -> tf.Tensor:
    """Logits [N, classes] to probabilities, flatter with a higher `temperature`."""
    if multiclass_scores is None:
        raise ValueError("convert_class_logits_to_softmax needs multiclass_scores; the argument map left them out")
    return tf.nn.softmax(floats(multiclass_scores) / temperature)
