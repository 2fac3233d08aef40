"""One step of training, on one device or on the replicas of a `tf.distribute` strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from .anchors import make_anchors
from .loss import Losses, detection_loss, matched_anchors, weight_penalty
from .targets import match

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def make_optimizer(
    schedule: Any, momentum: float, clip_norm: float | None, precision: str, replicas: int = 1
) -> keras.optimizers.Optimizer:
    """SGD that clips the norm of all gradients together; for fp16 with a loss scale that finds its own size.

    To be made within the strategy's scope. It expects gradients as `train_step` hands them over: divided by the
    number of replicas.
    """
    limit = None if clip_norm is None else clip_norm / replicas
    optimizer = keras.optimizers.SGD(schedule, momentum=momentum, global_clipnorm=limit)
    return keras.optimizers.LossScaleOptimizer(optimizer) if precision == "fp16" else optimizer


def make_train_step(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    *,
    weight_decay: float,
    jit: bool = False,
) -> Callable[[Mapping[str, Any]], Losses]:
    """A compiled function: a batch of `data.make_dataset` -> its losses before the step, of the whole batch."""
    anchors = tf.constant(make_anchors(model.input_shape[1]))
    replicas = strategy.num_replicas_in_sync

    def losses(batch: Mapping[str, tf.Tensor], total: Callable[[Any], Any]) -> Losses:
        targets = match(batch["boxes"], batch["labels"], anchors)
        outputs = model(batch["image"], training=True)
        return detection_loss(outputs["offsets"], outputs["logits"], targets, total(matched_anchors(targets)))

    def gradients_of(batch: Mapping[str, tf.Tensor], total: Callable[[Any], Any]) -> tuple[Losses, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            found = losses(batch, total)
            value = found.total + weight_penalty(model, weight_decay) / replicas
            scaled = optimizer.scale_loss(value)
        return found, tape.gradient(scaled, model.trainable_variables)

    alone = tf.function(lambda batch: gradients_of(batch, lambda value: value), jit_compile=jit)

    def one_replica(batch: Mapping[str, tf.Tensor]) -> Losses:
        if replicas == 1:
            found, gradients = alone(batch)
        else:
            context = tf.distribute.get_replica_context()

            def total(values: Any) -> Any:
                return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

            found, gradients = gradients_of(batch, total)
            # Clipping must see the sum. The optimizer adds up once more, what is equal by then: hence the division.
            gradients = [gradient / replicas for gradient in total(gradients)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return found

    @tf.function
    def train_step(batch: Mapping[str, Any]) -> Losses:
        found = strategy.run(one_replica, args=(batch,))
        return Losses(*(strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None) for value in found))

    return train_step
