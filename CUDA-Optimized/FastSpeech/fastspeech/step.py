"""The training step: forward, loss, update. `dlx.step` does the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dlx import step
from dlx.precision import autocast

from .data import Batch
from .loss import FastSpeechLoss
from .model import FastSpeech


@dataclass
class TrainState(step.TrainState):
    """What a step reads and changes."""

    loss: FastSpeechLoss = field(default_factory=FastSpeechLoss)


def train_step(state: TrainState, batch: list[Batch]) -> Tensor:
    """One optimiser update over the micro-batches. Returns the mean loss as a tensor on the device, not waited for."""

    def loss_of(micro: Batch) -> Tensor:
        with autocast(state.precision, micro.mel.device):
            found = state(micro.text, micro.text_lengths, micro.durations, micro.mel.shape[2])
        return state.loss(found, micro.mel, micro.mel_lengths, micro.durations, micro.text_lengths).total

    return step.update(state, batch, [micro.mel_lengths.sum() for micro in batch], loss_of)


def fuse(model: FastSpeech, **options: Any) -> None:
    """Let every block compile, which joins what lies between its products; they are alike, so that this is done once a
    side and size. Names of weights stay. ``options``: of torch.compile."""
    for stack in (model.encoder, model.decoder):
        for block in stack.blocks:
            block.compile(**options)


def capture(state: TrainState, batch: list[Batch]) -> step.GraphedStep:
    """The step as a CUDA graph, to be called with batches of the same shapes."""
    return step.GraphedStep(state, lambda inputs: train_step(state, inputs), batch)
