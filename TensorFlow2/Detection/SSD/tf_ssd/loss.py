"""The training objective: sigmoid focal loss (Lin et al. 2017, equation 5) of the classes, smooth L1 of the offsets.

N pictures, A anchors, C classes without a background: an anchor without an object is to score low for every class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from .targets import Targets

ALPHA = 0.25
GAMMA = 2.0


class Losses(NamedTuple):
    """Scalars; `total` = `box` + `category`."""

    total: tf.Tensor
    box: tf.Tensor
    category: tf.Tensor


def focal_loss(logits: tf.Tensor, truth: tf.Tensor, alpha: float = ALPHA, gamma: float = GAMMA) -> tf.Tensor:
    """Elementwise, of `logits` and `truth` (0 or 1) of the same shape; finite for every finite logit.

    -alpha (1 - p)**gamma log(p) where truth is 1, -(1 - alpha) p**gamma log(1 - p) where it is 0, p = sigmoid(logit).
    """
    truth = tf.cast(truth, logits.dtype)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(truth, logits)
    # What is missing to the truth, as a power: exp of a logarithm that never overflows keeps the gradient finite.
    missing = tf.exp(gamma * tf.math.log_sigmoid(tf.where(truth > 0, -logits, logits)))
    return tf.where(truth > 0, alpha, 1 - alpha) * missing * entropy


def smooth_l1(difference: tf.Tensor) -> tf.Tensor:
    """Elementwise: half the square up to 1, beyond it the distance minus a half (Girshick 2015, equation 3)."""
    distance = tf.abs(difference)
    return tf.where(distance < 1, 0.5 * tf.square(difference), distance - 0.5)


def matched_anchors(targets: Targets) -> tf.Tensor:
    """How many anchors of the batch have an object, float32."""
    return tf.reduce_sum(tf.cast(targets.labels > 0, tf.float32))


def detection_loss(offsets: tf.Tensor, logits: tf.Tensor, targets: Targets, divisor: tf.Tensor | None = None) -> Losses:
    """Both losses summed over the batch and divided by `divisor`, by default its matched anchors, at least by 1.

    `offsets` [N, A, 4], `logits` [N, A, C]. The loss of offsets is the mean of the four, and of matched anchors only.
    When a batch is spread over replicas the divisor is the number of all of them: then the sum of the replicas' losses
    is the loss of the whole batch.
    """
    offsets, logits = tf.cast(offsets, tf.float32), tf.cast(logits, tf.float32)
    divisor = tf.maximum(matched_anchors(targets) if divisor is None else divisor, 1.0)
    # Label 0 is no class, and becomes a row of zeros.
    truth = tf.one_hot(targets.labels - 1, logits.shape[-1])
    category = tf.reduce_sum(focal_loss(logits, truth)) / divisor
    distance = tf.reduce_mean(smooth_l1(offsets - targets.offsets), -1)
    box = tf.reduce_sum(tf.where(targets.labels > 0, distance, 0.0)) / divisor
    return Losses(box + category, box, category)


def weight_penalty(model: Any, weight: float) -> tf.Tensor:
    """Half of `weight` times the sum of squares of all convolutions' kernels (biases and norms are left alone)."""
    kernels = [variable for variable in model.trainable_variables if variable.path.endswith("kernel")]
    if not kernels:
        raise ValueError(f"{model.name} has no trainable kernels")
    return weight * tf.add_n([tf.nn.l2_loss(tf.cast(kernel.value, tf.float32)) for kernel in kernels])
