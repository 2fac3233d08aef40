"""The random window of a crop: drawn again and again until it suits the objects (SSD, arXiv:1512.02325, section 2.2).

All attempts are drawn and judged at once and the first good one is taken. The limits may be tensors, so that one graph
serves all cases of SSD's crop.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .boxes import area, clip, covered
from .draws import Draws
from .shapes import Size, as_floats

ATTEMPTS = 100
WHOLE = (0.0, 0.0, 1.0, 1.0)


def sample_window(
    draws: Draws,
    size: Size,
    boxes: tf.Tensor,
    min_object_covered: Any,
    aspect_ratio_range: Any,
    area_range: Any,
    attempts: int = ATTEMPTS,
) -> tuple[tf.Tensor, tf.Tensor]:
    """(window [4] as fractions of the picture, on its pixel grid; whether one was found).

    A window's width / height is uniform in `aspect_ratio_range`, its height uniform among those that fit into the
    picture with an area in `area_range` (fractions of the picture's), its place uniform; all in whole pixels. It is
    good if it shows at least the share `min_object_covered` of an object, or if there is no object.
    """
    draw = tf.unstack(draws.fresh_uniform("attempts", [4, attempts]))
    windows, fits = _candidates(draw, size, aspect_ratio_range, area_range)
    if not tf.is_tensor(min_object_covered) and min_object_covered == 0:
        good = fits
    else:
        good = fits & _shows_enough(windows, boxes, min_object_covered)
    first = tf.argmax(tf.cast(good, tf.int32), output_type=tf.int32)
    found = good[first]
    return tf.where(found, windows[first], tf.constant(WHOLE)), found


def _shows_enough(windows: tf.Tensor, boxes: tf.Tensor, min_object_covered: Any) -> tf.Tensor:
    """[attempts]: whether each window shows that share of an object; true where no box has an area."""
    boxes = clip(boxes)
    shown = covered(boxes[tf.newaxis], windows[:, tf.newaxis])  # [attempts, N]
    counts = area(boxes) > 0
    return tf.reduce_any((shown >= min_object_covered - 1e-6) & counts, axis=1) | ~tf.reduce_any(counts)


def _candidates(
    draw: list[tf.Tensor], size: Size, aspect_ratio_range: Any, area_range: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Windows [attempts, 4] and which of them have a size that the limits allow."""
    height, width = as_floats(size)
    pixels = height * width
    lowest, highest = area_range[0] * pixels, area_range[1] * pixels
    aspect = aspect_ratio_range[0] + draw[0] * (aspect_ratio_range[1] - aspect_ratio_range[0])
    shortest = tf.sqrt(lowest / aspect)
    longest = tf.minimum(tf.sqrt(highest / aspect), tf.minimum(height, width / aspect))
    drawn = shortest + draw[1] * (longest - shortest)
    rows = tf.clip_by_value(tf.round(drawn), 1.0, height)
    columns = tf.clip_by_value(tf.round(drawn * aspect), 1.0, width)
    # The sides are rounded, the limits hold to within half a pixel: one area is a range that can be met, too.
    fits = longest >= shortest * (1 - 1e-6)
    top = tf.floor(draw[2] * (height - rows + 1))
    left = tf.floor(draw[3] * (width - columns + 1))
    corners = tf.stack([top, left, top + rows, left + columns], axis=1)
    return corners / tf.stack([height, width, height, width]), fits
