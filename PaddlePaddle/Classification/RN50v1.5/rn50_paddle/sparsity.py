"""2:4 structured sparsity with `paddle.incubate.asp`: prune once, keep the masks while training, check every layer.

Paper: Mishra et al. 2021 (https://arxiv.org/abs/2104.08378). In every four neighbours along the reduction at most two
are not zero; `mask_2d_*` holds along the outputs, too. The first convolution has under four inputs and stays dense.
Needs a process with Paddle's old representation (see `framework`).

Paddle 3.3.1's own `mask_2d_best` ranks the patterns of a 4 x 4 block by the sum of the signed weights that they keep,
and so keeps about as much of their size as a random choice would. Here it ranks by size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from . import framework

MASK = ".asp_mask"  # Paddle's ending for the mask of a parameter


class SparseOptimizer:
    """Paddle's decorated optimiser with a step that masks the weights; all else is the optimiser's own.

    Paddle 3.3.1's own step masks in place without a gradient, which marks the weights as needing none: from the second
    step on they stay as they are, and several processes lose their hooks. Here values are set, which marks nothing.
    """

    def __init__(self, optimizer: Any, decorated: Any, parameters: list[Any]):
        self._optimizer, self._decorated, self._parameters = optimizer, decorated, parameters

    @paddle.no_grad()
    def step(self) -> None:
        self._optimizer.step()
        kept = self._decorated.state_dict()
        for value in self._parameters:
            mask = kept.get(f"{value.name}{MASK}")
            if mask is not None:
                value.set_value(value * mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decorated, name)


def decorate(optimizer: Any, parameters: list[Any]) -> SparseOptimizer:
    """The optimiser of `parameters` with masks that its steps keep; `prune` makes them. One for each process."""
    if not framework.has_old_ir():
        raise ValueError(f"Paddle's sparsity needs {framework.FLAG}=0 in the environment before Paddle is imported")
    from paddle.incubate import asp

    return SparseOptimizer(optimizer, asp.decorate(optimizer), parameters)


def prune(model: nn.Layer, optimizer: Any, mask_algo: str) -> None:
    """Zero the smaller half of the weights and set the masks of the decorated `optimizer`."""
    from paddle.incubate import asp

    values = dict(model.named_parameters())
    dense = {name: value.numpy().copy() for name, value in values.items() if value.ndim > 1}
    asp.prune_model(model, n=2, m=4, mask_algo=mask_algo, with_mask=True)
    if mask_algo != "mask_2d_best":
        return
    state = optimizer.state_dict()  # its masks are those that the steps use; set_state_dict wants the momentum, too
    for name in masks(model, optimizer):
        mask = best_mask(dense[name])
        values[name].set_value(dense[name] * mask)
        state[values[name].name + MASK].set_value(mask)


def adopt(model: nn.Layer, optimizer: Any) -> None:
    """Set the masks of weights that are 2:4 sparse already; ValueError names those that are not."""
    values = dict(model.named_parameters())
    before = {name: value.numpy().copy() for name, value in values.items() if value.ndim > 1}
    prune(model, optimizer, "mask_1d")  # of two that are not zero in four it takes both
    dense = [name for name in masks(model, optimizer) if not np.array_equal(values[name].numpy(), before[name])]
    if dense:
        raise ValueError(f"prune_model false: {len(dense)} layers of these weights are not 2:4 sparse: {dense[:3]}...")


def best_mask(weight: np.ndarray) -> np.ndarray:
    """0 and 1 like `weight`, a convolution's (out, in, ..) or a linear layer's (in, out): of each 4 x 4 block of inputs
    and outputs the pattern with two of four in every row and column that keeps the largest sum of sizes."""
    rows = weight.reshape(*weight.shape[:2], -1).transpose(2, 0, 1)  # (positions, outputs, inputs) or the other way
    positions, height, width = rows.shape
    padded = np.pad(np.abs(rows), ((0, 0), (0, -height % 4), (0, -width % 4)))
    blocks = padded.reshape(positions, padded.shape[1] // 4, 4, padded.shape[2] // 4, 4).transpose(0, 1, 3, 2, 4)
    lines = [line for line in itertools.product((0.0, 1.0), repeat=4) if sum(line) == 2]
    patterns = np.array([p for p in itertools.product(lines, repeat=4) if (np.sum(p, 0) == 2).all()], np.float32)
    chosen = patterns[(blocks.reshape(*blocks.shape[:3], 16) @ patterns.reshape(-1, 16).T).argmax(-1)]
    mask = chosen.transpose(0, 1, 3, 2, 4).reshape(padded.shape)[:, :height, :width]
    return np.ascontiguousarray(mask.transpose(1, 2, 0).reshape(weight.shape))


def masks(model: nn.Layer, optimizer: Any) -> dict[str, np.ndarray]:
    """The masks of a decorated optimiser that have zeros, by the weight's name in the model."""
    kept = optimizer.state_dict()
    found = {}
    for name, value in model.named_parameters():
        mask = kept.get(f"{value.name}{MASK}")
        if mask is not None and not np.asarray(mask).all():
            found[name] = np.asarray(mask)
    return found


def densities(model: nn.Layer, names: Iterable[str]) -> dict[str, float]:
    """The share of weights that are not zero, of each named layer."""
    values = dict(model.named_parameters())
    return {name: float(np.mean(values[name].numpy() != 0)) for name in names}


def check(model: nn.Layer, names: Iterable[str]) -> dict[str, float]:
    """`densities` of the masked layers; ValueError names those above one half, whose masks were lost."""
    found = densities(model, names)
    dense = {name: round(value, 4) for name, value in found.items() if value > 0.5}
    if dense or not found:
        raise ValueError(f"{len(dense)} of {len(found)} masked layers are denser than 2:4 allows: {dense}")
    return found
