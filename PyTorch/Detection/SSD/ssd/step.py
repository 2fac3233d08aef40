"""The training step of a detector: normalise, forward, match, loss, update. `dlx.step` does the rest.

N images per micro-batch, M rows of objects, S side of the input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlx import step
from dlx.inputs import Normalize
from dlx.precision import autocast

from .loss import MultiboxLoss
from .pictures import Batch


@dataclass
class TrainState(step.TrainState):
    """What a step reads and changes."""

    loss: MultiboxLoss | None = None  # always given; no default fits, since it holds the default boxes
    normalize: Normalize = field(default_factory=Normalize)


def train_step(state: TrainState, batch: list[Batch]) -> Tensor:
    """One optimiser update over the micro-batches. Returns the mean loss as a tensor on the device, not waited for."""

    def loss_of(micro: Batch) -> Tensor:
        images = state.normalize(micro.images).contiguous(memory_format=torch.channels_last)
        with autocast(state.precision, images.device):
            outputs = state(images)
        return state.loss(outputs, micro.boxes, micro.labels).total

    return step.update(state, batch, [len(micro.images) for micro in batch], loss_of)


def capture(state: TrainState, batch: list[Batch]) -> step.GraphedStep:
    """`train_step` as a CUDA graph, to be called with a batch of the same shapes."""
    return step.GraphedStep(state, lambda inputs: train_step(state, inputs), batch)
