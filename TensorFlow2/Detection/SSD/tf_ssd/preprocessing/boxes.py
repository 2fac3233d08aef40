"""Boxes, keypoints and windows as fractions of a picture.

Boxes are [N, 4] float32 (ymin, xmin, ymax, xmax), keypoints [N, K, 2] (y, x; NaN = not visible), a window is one
box [4]. Every function is a plain map of tensors: nothing random.
"""

from __future__ import annotations

import tensorflow as tf


def area(boxes: tf.Tensor) -> tf.Tensor:
    """Area of boxes [..., 4] as fractions of the picture; 0 for inverted ones."""
    ymin, xmin, ymax, xmax = tf.unstack(boxes, axis=-1)
    return tf.maximum(ymax - ymin, 0) * tf.maximum(xmax - xmin, 0)


def covered(boxes: tf.Tensor, windows: tf.Tensor) -> tf.Tensor:
    """Which share of each box a window shows, 0 to 1: boxes [..., 4] and windows [..., 4] are broadcast.

    Boxes without an area, or with NaN, are covered by nothing.
    """
    low = tf.maximum(boxes[..., :2], windows[..., :2])
    high = tf.minimum(boxes[..., 2:], windows[..., 2:])
    inside = tf.reduce_prod(tf.maximum(high - low, 0), axis=-1)
    share = tf.math.divide_no_nan(inside, area(boxes))
    return tf.where(tf.math.is_nan(share), tf.zeros_like(share), share)


def clip(boxes: tf.Tensor) -> tf.Tensor:
    """Boxes cut off at the picture's edges."""
    return tf.clip_by_value(boxes, 0.0, 1.0)


def flip_boxes(boxes: tf.Tensor, vertical: bool) -> tf.Tensor:
    """Mirrored left to right, or upside down."""
    ymin, xmin, ymax, xmax = tf.unstack(boxes, axis=-1)
    if vertical:
        return tf.stack([1.0 - ymax, xmin, 1.0 - ymin, xmax], axis=-1)
    return tf.stack([ymin, 1.0 - xmax, ymax, 1.0 - xmin], axis=-1)


def flip_keypoints(keypoints: tf.Tensor, vertical: bool, permutation: list[int]) -> tf.Tensor:
    """Mirrored; point i becomes the one that was `permutation[i]` (a left eye is a right eye in the mirror)."""
    y, x = tf.unstack(tf.gather(keypoints, permutation, axis=1), axis=-1)
    return tf.stack([1.0 - y, x] if vertical else [y, 1.0 - x], axis=-1)


def rotate_boxes(boxes: tf.Tensor) -> tf.Tensor:
    """Turned by 90 degrees counter-clockwise: the right edge becomes the upper one."""
    ymin, xmin, ymax, xmax = tf.unstack(boxes, axis=-1)
    return tf.stack([1.0 - xmax, ymin, 1.0 - xmin, ymax], axis=-1)


def rotate_keypoints(keypoints: tf.Tensor) -> tf.Tensor:
    """Turned by 90 degrees counter-clockwise."""
    y, x = tf.unstack(keypoints, axis=-1)
    return tf.stack([1.0 - x, y], axis=-1)


def boxes_in(boxes: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """The same boxes as fractions of the window [4] instead of the picture; a larger window makes them smaller."""
    return (boxes - tf.tile(window[:2], [2])) / tf.tile(window[2:] - window[:2], [2])


def keypoints_in(keypoints: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """The same points as fractions of the window [4]."""
    return (keypoints - window[:2]) / (window[2:] - window[:2])


def hide_outside(keypoints: tf.Tensor) -> tf.Tensor:
    """Points outside the picture become NaN, in both coordinates."""
    seen = tf.reduce_all((keypoints >= 0) & (keypoints <= 1), axis=-1, keepdims=True)
    return tf.where(seen, keypoints, tf.constant(float("nan"), keypoints.dtype))
