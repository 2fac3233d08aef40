"""2:4 structured sparsity with `paddle.incubate.asp`: prune once, keep the masks while training, check every layer.

Paper: Mishra et al. 2021 (https://arxiv.org/abs/2104.08378). In every four neighbours along the reduction at most two
are not zero; `mask_2d_*` holds in both directions. The first convolution and layers whose sides are no multiples of
four stay dense, which Paddle decides. Needs a process with Paddle's old representation (see `framework`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from paddle import nn

from . import framework

MASK = ".asp_mask"  # Paddle's ending for the mask of a parameter


def decorate(optimizer: Any) -> Any:
    """The optimiser, which applies the masks after each of its steps."""
    if not framework.has_old_ir():
        raise ValueError(f"Paddle's sparsity needs {framework.FLAG}=0 in the environment before Paddle is imported")
    from paddle.incubate import asp

    return asp.decorate(optimizer)


def prune(model: nn.Layer, mask_algo: str) -> None:
    """Zero the smaller half of the weights and set the masks; after `decorate`."""
    from paddle.incubate import asp

    asp.prune_model(model, n=2, m=4, mask_algo=mask_algo, with_mask=True)


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
