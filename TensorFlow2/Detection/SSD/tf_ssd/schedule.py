"""The learning rate: up in a line, down along half a cosine (Loshchilov and Hutter 2017, equation 5)."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf


class WarmupCosine(keras.optimizers.schedules.LearningRateSchedule):
    """From `start` at step 0 to `peak` at step `warmup`, and to 0 at step `total`; steps count from 0.

    ValueError where the warm-up is longer than all, or a rate is not positive.
    """

    def __init__(self, peak: float, total: int, warmup: int = 0, start: float = 0.0) -> None:
        if not 0 <= warmup <= total or total < 1:
            raise ValueError(f"warmup must be 0 to the {total} steps in all, got {warmup}")
        if not peak > 0 or not 0 <= start <= peak:
            raise ValueError(f"rates must be 0 <= start <= peak, got start {start}, peak {peak}")
        self.peak, self.total, self.warmup, self.start = peak, total, warmup, start

    def __call__(self, step: Any) -> tf.Tensor:
        step = tf.cast(step, tf.float32)
        rising = self.start + (self.peak - self.start) * step / max(self.warmup, 1)
        share = (step - self.warmup) / max(self.total - self.warmup, 1)
        falling = self.peak * 0.5 * (1 + tf.cos(math.pi * tf.clip_by_value(share, 0.0, 1.0)))
        return tf.where(step < self.warmup, rising, falling)

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "total": self.total, "warmup": self.warmup, "start": self.start}
