"""Loss and training step of a classifier.

Cross entropy with label smoothing (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7) and mixup (Zhang
et al. 2018, https://arxiv.org/abs/1710.09412). N batch, K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from dlx.vision import Preprocessing

from .pretrained import normalise


@dataclass
class TrainState:
    """What a step reads and changes. `forward` is the model, compiled or wrapped for several processes."""

    model: nn.Layer
    forward: Any
    optimizer: Any
    preprocessing: Preprocessing
    label_smoothing: float = 0.0
    amp_dtype: str | None = None  # float16, bfloat16 or None
    scaler: Any = None
    step: int = 0


def smoothed_loss(logits_NK: Tensor, labels_N: Tensor, smoothing: float, mix: float | None = None) -> Tensor:
    """Mean loss in float32. With `mix` the target of sample i is mix * y_i + (1 - mix) * y_(i-1)."""
    classes = logits_NK.shape[1]
    target = F.one_hot(labels_N, classes)
    if mix is not None:
        target = mix * target + (1 - mix) * paddle.roll(target, 1, 0)
    target = target * (1 - smoothing) + smoothing / classes
    return -(target * F.log_softmax(logits_NK.astype("float32"), 1)).sum(1).mean()


def mixup_weight(alpha: float, seed: int, epoch: int, index: int) -> float:
    """The step's draw of Beta(alpha, alpha), a function of its place only."""
    return float(np.random.default_rng([seed, epoch, index, 7]).beta(alpha, alpha))


def _forward(state: TrainState, images: Tensor, labels: Tensor, mix: float | None) -> Tensor:
    x = normalise(images, state.preprocessing)
    if mix is not None:
        x = mix * x + (1 - mix) * paddle.roll(x, 1, 0)
    casts = contextlib.nullcontext()
    if state.amp_dtype:
        casts = paddle.amp.auto_cast(level="O1", dtype=state.amp_dtype)
    with casts:
        logits = state.forward(x)
    return smoothed_loss(logits, labels, state.label_smoothing, mix)


def train_step(state: TrainState, batch: Sequence[tuple[Tensor, Tensor]], mix: float | None = None) -> Tensor:
    """One update with the mean gradient over the micro-batches of `batch`; the mean loss, not waited for."""
    total = paddle.zeros([])
    for number, (images, labels) in enumerate(batch):
        last = number == len(batch) - 1
        # Several processes add their gradients up once, with the last micro-batch.
        waits = contextlib.nullcontext() if last or not hasattr(state.forward, "no_sync") else state.forward.no_sync()
        with waits:
            loss = _forward(state, images, labels, mix) / len(batch)
            (state.scaler.scale(loss) if state.scaler else loss).backward()
        total = total + loss.detach()
    if state.scaler:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    state.optimizer.clear_grad()
    state.step += 1
    return total
