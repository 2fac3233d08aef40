"""From a network's outputs to detections, for a whole batch at once; XLA compiles all of it.

N pictures, A anchors, C classes, K candidates of a picture, D detections of a picture.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from .anchors import decode, overlaps

IOU_THRESHOLD = 0.6
SCORE_THRESHOLD = 1e-8
CANDIDATES = 1000
DETECTIONS = 100


class Detections(NamedTuple):
    """By falling score: `boxes` [N, D, 4] corners within 0..1, `scores` [N, D], `labels` [N, D] int32 (1 to C).

    From `count` [N] int32 on, rows hold zeros.
    """

    boxes: tf.Tensor
    scores: tf.Tensor
    labels: tf.Tensor
    count: tf.Tensor


def greedy_keep(suppresses: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Which candidates survive when they are visited in order and each survivor removes later ones: bool [N, K].

    `suppresses` bool [N, K, K] symmetric: which pairs are duplicates; `valid` [N, K]: which take part at all. Rounds
    over all candidates together: each survives if no earlier one of the previous round's survivors suppresses it. After
    r rounds the first r are final, so that it ends, and mostly after a few: as many as the longest chain has links.
    """
    places = tf.range(tf.shape(valid)[1])
    earlier = suppresses & (places[:, None] < places[None, :])  # [n, i, j]: i comes before j and would remove it

    def one_round(keep: tf.Tensor) -> tf.Tensor:
        return valid & ~tf.reduce_any(earlier & keep[:, :, None], axis=1)

    def body(keep: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        after = one_round(keep)
        return after, tf.reduce_any(after != keep)

    return tf.while_loop(lambda _, changed: changed, body, (valid, tf.constant(True)))[0]


def suppress(
    boxes: tf.Tensor,
    scores: tf.Tensor,
    *,
    iou_threshold: float = IOU_THRESHOLD,
    score_threshold: float = SCORE_THRESHOLD,
    candidates: int = CANDIDATES,
    detections: int = DETECTIONS,
) -> Detections:
    """Greedy non-maximum suppression of every class of every picture.

    `boxes` [N, A, 4], `scores` [N, A, C]. Of all pairs of box and class with a score above `score_threshold` the best
    `candidates` of a picture take part (of equal ones the first, by box, then by class); a box is removed when it
    overlaps a better survivor of its class by more than `iou_threshold`; the best `detections` are returned.
    A and C must be known when the graph is built.
    """
    number, classes = scores.shape[1], scores.shape[2]
    if number is None or classes is None:
        raise ValueError(f"scores must have a known number of boxes and classes, got the shape {scores.shape}")
    taken = min(candidates, number * classes)
    value, place = tf.math.top_k(tf.reshape(scores, [-1, number * classes]), k=taken)
    label = place % classes
    corners = tf.gather(boxes, place // classes, batch_dims=1)
    duplicate = (overlaps(corners, corners) > iou_threshold) & (label[:, :, None] == label[:, None, :])
    keep = greedy_keep(duplicate, value > score_threshold)
    # Candidates are sorted, so that survivors by falling score are survivors in their order.
    best, row = tf.math.top_k(tf.where(keep, value, -1.0), k=min(detections, taken))
    real = best >= 0
    found = Detections(
        boxes=tf.where(real[..., None], tf.clip_by_value(tf.gather(corners, row, batch_dims=1), 0.0, 1.0), 0.0),
        scores=tf.where(real, best, 0.0),
        labels=tf.where(real, tf.gather(label, row, batch_dims=1) + 1, 0),
        count=tf.reduce_sum(tf.cast(real, tf.int32), axis=1),
    )
    short = detections - taken
    return found if short <= 0 else _fill(found, short)


def _fill(found: Detections, rows: int) -> Detections:
    return Detections(
        tf.pad(found.boxes, [[0, 0], [0, rows], [0, 0]]),
        tf.pad(found.scores, [[0, 0], [0, rows]]),
        tf.pad(found.labels, [[0, 0], [0, rows]]),
        found.count,
    )


def detect(offsets: tf.Tensor, logits: tf.Tensor, anchors: tf.Tensor, **options: float | int) -> Detections:
    """Detections from a network's `offsets` [N, A, 4] and `logits` [N, A, C]; `options` are those of `suppress`."""
    boxes = decode(tf.cast(offsets, tf.float32), anchors[None])
    return suppress(boxes, tf.sigmoid(tf.cast(logits, tf.float32)), **options)
