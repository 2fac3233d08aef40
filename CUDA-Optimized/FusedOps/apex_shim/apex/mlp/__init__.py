from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from apex.submodules import give_submodules
from fusedops import nn, ops

__all__ = ["MLP", "mlp_function"]

ACTIVATIONS = ("none", "relu", "sigmoid")


class MLP(nn.MLP):
    """Linear layers, each followed by the activation ("none", "relu", "sigmoid"); TypeError for another."""

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        if activation not in ACTIVATIONS:
            raise TypeError("activation must be relu or none or sigmoid.")
        super().__init__(mlp_sizes, bias, activation)


def mlp_function(bias: bool, activation: int, x: Tensor, *parameters: Tensor) -> Tensor:
    """Activation by number (0 none, 1 relu, 2 sigmoid); the weights, then (with ``bias``) the biases."""
    layers = len(parameters) // 2 if bias else len(parameters)
    biases = parameters[layers:] if bias else (None,) * layers
    return ops.mlp(x, parameters[:layers], biases, ACTIVATIONS[activation])


give_submodules(__name__)
