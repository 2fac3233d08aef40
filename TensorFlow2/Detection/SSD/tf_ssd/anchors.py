"""Anchors of the feature pyramid (Lin et al. 2017, "Focal Loss for Dense Object Detection", section 4), and offsets.

Boxes are (ymin, xmin, ymax, xmax) as fractions of the picture, as everywhere in this task. A anchors in all: level by
level from the finest, in a level row by row, in a cell scale by scale and in a scale aspect by aspect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

LEVELS = (3, 4, 5, 6, 7)
ANCHOR_SCALE = 4.0
SCALES_PER_OCTAVE = 2
ASPECTS = (1.0, 2.0, 0.5)  # width over height
PER_CELL = SCALES_PER_OCTAVE * len(ASPECTS)
# A shift by the anchor's side is 10, a growth by the factor e is 5 (Liu et al. 2016 divide by variances 0.1 and 0.2).
OFFSET_SCALES = (10.0, 10.0, 5.0, 5.0)


def grid_sides(image_size: int, levels: Sequence[int] = LEVELS) -> list[int]:
    """Cells per side of each level: halved and rounded up, as strided convolutions do. 320 gives 40, 20, 10, 5, 3.

    ValueError: a side that is no multiple of 32, to which the pyramid's levels 3 to 5 could not be added up.
    """
    if image_size < 32 or image_size % 32:
        raise ValueError(f"image_size must be a multiple of 32, got {image_size}")
    return [math.ceil(image_size / 2**level) for level in levels]


def make_anchors(image_size: int = 320) -> np.ndarray:
    """[A, 4] float32 corners, which may reach over the picture's edges.

    A level's cells divide the picture evenly, and an anchor lies in the middle of its cell. At level l it has the area
    of a square of 4 * 2**l pixels, times 2 ** (1/2) for its second scale.
    """
    found = []
    for level, cells in zip(LEVELS, grid_sides(image_size), strict=True):
        scales = ANCHOR_SCALE * 2 ** (level + np.arange(SCALES_PER_OCTAVE) / SCALES_PER_OCTAVE) / image_size
        roots = np.sqrt(np.array(ASPECTS))
        sizes = np.stack([scales[:, None] / roots, scales[:, None] * roots], -1).reshape(-1, 2)
        middles = (np.arange(cells) + 0.5) / cells
        centres = np.stack(np.meshgrid(middles, middles, indexing="ij"), -1).reshape(-1, 1, 2)
        found.append(np.concatenate([centres - sizes / 2, centres + sizes / 2], -1).reshape(-1, 4))
    return np.concatenate(found).astype(np.float32)


def centres_and_sizes(boxes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Corners [..., 4] as two [..., 2]: (y, x) of the centre and (height, width)."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low


def encode(boxes: tf.Tensor, anchors: tf.Tensor) -> tf.Tensor:
    """Offsets [..., 4] (y, x, height, width) of boxes from their anchors, both corners [..., 4] that have an area."""
    centres, sizes = centres_and_sizes(boxes)
    anchor_centres, anchor_sizes = centres_and_sizes(anchors)
    shift = (centres - anchor_centres) / anchor_sizes
    return tf.concat([shift, tf.math.log(sizes / anchor_sizes)], -1) * tf.constant(OFFSET_SCALES)


def decode(offsets: tf.Tensor, anchors: tf.Tensor) -> tf.Tensor:
    """The inverse of `encode`: corners [..., 4]."""
    offsets = offsets / tf.constant(OFFSET_SCALES)
    anchor_centres, anchor_sizes = centres_and_sizes(anchors)
    centres = offsets[..., :2] * anchor_sizes + anchor_centres
    half = tf.exp(offsets[..., 2:]) * anchor_sizes / 2
    return tf.concat([centres - half, centres + half], -1)


def overlaps(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Intersection over union of every pair: corners [..., M, 4] and [..., K, 4] -> [..., M, K]; 0 of empty boxes."""
    first, second = first[..., :, None, :], second[..., None, :, :]
    low = tf.maximum(first[..., :2], second[..., :2])
    high = tf.minimum(first[..., 2:], second[..., 2:])
    inside = tf.reduce_prod(tf.maximum(high - low, 0), -1)
    areas = [tf.reduce_prod(tf.maximum(box[..., 2:] - box[..., :2], 0), -1) for box in (first, second)]
    return tf.math.divide_no_nan(inside, areas[0] + areas[1] - inside)
