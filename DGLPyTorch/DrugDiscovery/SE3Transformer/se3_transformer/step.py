"""The training step of a regression on molecules: forward, mean absolute error, update. `dlx.step` does the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlx import step
from dlx.precision import autocast
from dlx.step import TrainState

from . import buckets
from .molecules import Batch


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute difference over molecules with a target; padding has nan. Both in the model's scale."""
    targets = targets.view_as(outputs)
    known = ~targets.isnan()
    difference = torch.where(known, outputs.float() - targets.nan_to_num(), 0.0)
    return difference.abs().sum() / known.sum()


def loss_of(state: TrainState, batch: Batch) -> Tensor:
    with autocast(state.precision, batch.graph.edge_index.device):
        outputs = state(batch.graph, batch.node_feats, batch.edge_feats)
    return absolute_error(outputs, batch.targets)


def train_step(state: TrainState, batch: list[Batch], molecules: int) -> Tensor:
    """One optimiser update over micro-batches of ``molecules`` each. Returns the mean loss on the device."""
    return step.update(state, batch, [molecules] * len(batch), lambda micro: loss_of(state, micro))


class GraphedSteps:
    """`train_step` as CUDA graphs, one for each combination of bucket sizes that comes up."""

    def __init__(self, state: TrainState, molecules: int):
        self.state, self.molecules = state, molecules
        self.captured: dict[tuple, step.GraphedStep] = {}

    def __call__(self, batch: list[Batch]) -> Tensor:
        """The returned loss is overwritten by the next call."""
        inputs = [buckets.to_tensors(micro) for micro in batch]
        sizes = tuple((micro.graph.num_nodes, micro.graph.num_edges, micro.graph.num_graphs) for micro in batch)
        if sizes not in self.captured:
            counts = [size[2] for size in sizes]

            def run(inputs: list[dict[str, Any]]) -> Tensor:
                micros = [buckets.from_tensors(one, count) for one, count in zip(inputs, counts, strict=True)]
                return train_step(self.state, micros, self.molecules)

            self.captured[sizes] = step.GraphedStep(self.state, run, inputs)
        return self.captured[sizes](inputs)
