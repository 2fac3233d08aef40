"""The training step of a classifier: normalise, mix, forward, loss, update. `dlx.step` does the rest.

N images per micro-batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlx import step
from dlx.inputs import Normalize
from dlx.precision import autocast

from .loss import classification_loss, mixup

Batch = list[tuple[Tensor, Tensor]]  # micro-batches of (images N C H W, labels N)


@dataclass
class TrainState(step.TrainState):
    """What a step reads and changes."""

    normalize: Normalize = field(default_factory=Normalize)
    label_smoothing: float = 0.0
    channels_last: bool = True


def train_step(state: TrainState, batch: Batch, mix: Tensor | None = None) -> Tensor:
    """One optimiser update over the micro-batches. Returns the mean loss as a tensor on the device, not waited for."""

    def loss_of(micro: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = state.normalize(micro[0]), micro[1]
        if state.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        if mix is not None:
            images = mixup(images, mix)
        with autocast(state.precision, images.device):
            logits = state(images)
        return classification_loss(logits, labels, state.label_smoothing, mix)

    return step.update(state, batch, [len(labels) for _, labels in batch], loss_of)


def capture(state: TrainState, batch: Batch, mixes: bool = False) -> step.GraphedStep:
    """`train_step` as a CUDA graph, to be called with (batch,) or, if it ``mixes``, with (batch, weight)."""
    inputs = (batch, torch.ones((), device=batch[0][0].device)) if mixes else (batch,)
    return step.GraphedStep(state, lambda inputs: train_step(state, *inputs), inputs)
