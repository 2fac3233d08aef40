"""Which anchor learns which object, for a whole batch at once. N pictures, M rows of objects, A anchors."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from .anchors import encode, overlaps

THRESHOLD = 0.5


class Targets(NamedTuple):
    """`offsets` [N, A, 4] float32 to the matched object (0 where there is none), `labels` [N, A] int32, 0 for none."""

    offsets: tf.Tensor
    labels: tf.Tensor


def assign(boxes: tf.Tensor, labels: tf.Tensor, anchors: tf.Tensor, threshold: float = THRESHOLD) -> tf.Tensor:
    """The row of the object that each anchor is matched with, or -1: int32 [N, A].

    `boxes` [N, M, 4] and `anchors` [A, 4] are corners; rows with label 0 (`labels` [N, M]) are no objects. Every object
    gets the anchor that overlaps it most (of equal ones the first); where several objects want the same one it goes to
    the one with the largest overlap, of equal ones the first. All other anchors take the object that they overlap most,
    if by more than `threshold`.
    """
    real = labels[:, :, None] > 0
    overlap = tf.where(real, overlaps(boxes, anchors[None]), -1.0)
    best = tf.argmax(overlap, axis=2, output_type=tf.int32)
    wanted = (tf.range(tf.shape(anchors)[0])[None, None] == best[:, :, None]) & real
    preference = tf.where(wanted, overlap + 2, overlap)
    row = tf.argmax(preference, axis=1, output_type=tf.int32)
    return tf.where(tf.reduce_max(preference, axis=1) > threshold, row, -1)


def match(boxes: tf.Tensor, labels: tf.Tensor, anchors: tf.Tensor, threshold: float = THRESHOLD) -> Targets:
    """What each anchor is to learn; arguments as of `assign`, labels from 1 on. M is at least 1."""
    row = assign(boxes, labels, anchors, threshold)
    chosen, matched = tf.maximum(row, 0), row >= 0
    # Rows without an object have no size, whose logarithm would be infinite: such places take the anchor itself.
    corners = tf.where(matched[..., None], tf.gather(boxes, chosen, batch_dims=1), anchors[None])
    found = tf.gather(tf.cast(labels, tf.int32), chosen, batch_dims=1)
    return Targets(encode(corners, anchors[None]), tf.where(matched, found, 0))
