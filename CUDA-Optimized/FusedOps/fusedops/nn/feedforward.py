"""Modules of linear layers with activations, with Apex's names of parameters: DenseGeluDense and MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ops import feedforward as ops
from ..ops.activations import kind_of

__all__ = ["MLP", "DenseGeluDense"]


def _reset(weight: Tensor, bias: Tensor | None) -> None:
    """As torch.nn.Linear does."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0
        nn.init.uniform_(bias, -bound, bound)


class DenseGeluDense(nn.Module):
    """linear(gelu(linear(x))) with parameters weight1, bias1, weight2, bias2; `approximate` as torch.nn.GELU."""

    def __init__(
        self,
        in_features: int,
        intermediate_features: int,
        out_features: int,
        approximate: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.approximate = approximate
        self.weight1 = nn.Parameter(torch.empty(intermediate_features, in_features, **options))
        self.bias1 = nn.Parameter(torch.empty(intermediate_features, **options))
        self.weight2 = nn.Parameter(torch.empty(out_features, intermediate_features, **options))
        self.bias2 = nn.Parameter(torch.empty(out_features, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.weight1, self.bias1)
        _reset(self.weight2, self.bias2)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dense_gelu_dense(x, self.weight1, self.bias1, self.weight2, self.bias2, self.approximate)


class MLP(nn.Module):
    """Linear layers of `mlp_sizes` (in, hidden..., out), each followed by `activation` ("relu", "sigmoid", "none", or
    another name of `activations.KINDS`); parameters weight_0, bias_0, ... ValueError for fewer than two sizes.
    """

    def __init__(
        self,
        mlp_sizes: Sequence[int],
        bias: bool = True,
        activation: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if len(mlp_sizes) < 2:
            raise ValueError(f"mlp_sizes needs two sizes or more, got {list(mlp_sizes)}")
        kind_of(activation)
        self.mlp_sizes, self.activation, self.num_layers = list(mlp_sizes), activation, len(mlp_sizes) - 1
        options = {"device": device, "dtype": dtype}
        for i, (inputs, outputs) in enumerate(zip(mlp_sizes, mlp_sizes[1:], strict=False)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(outputs, inputs, **options)))
            own_bias = nn.Parameter(torch.empty(outputs, **options)) if bias else None
            self.register_parameter(f"bias_{i}", own_bias)
        self.reset_parameters()

    def layers(self, name: str) -> list[Tensor | None]:
        """The parameters called name_0, name_1, ..."""
        return [getattr(self, f"{name}_{i}") for i in range(self.num_layers)]

    def reset_parameters(self) -> None:
        for weight, bias in zip(self.layers("weight"), self.layers("bias"), strict=True):
            _reset(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mlp(x, self.layers("weight"), self.layers("bias"), self.activation)

    def extra_repr(self) -> str:
        return f"mlp_sizes={self.mlp_sizes}, activation={self.activation!r}"
