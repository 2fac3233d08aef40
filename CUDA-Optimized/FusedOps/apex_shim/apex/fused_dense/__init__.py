from __future__ import annotations

from torch import Tensor, nn

from apex.submodules import give_submodules
from fusedops import ops
from fusedops.nn import DenseGeluDense

__all__ = [
    "FusedDense", "FusedDenseGeluDense", "dense_no_bias_function", "fused_dense_function",
    "fused_dense_gelu_dense_function",
]  # fmt: skip


class FusedDense(nn.Linear):
    """A linear layer; its weights are initialised as torch's (Apex leaves them as the memory was)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(DenseGeluDense):
    """Two linear layers with a GELU between them."""

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        if not bias:
            raise AssertionError("DenseGeluDense module without bias is currently not supported")
        super().__init__(in_features, intermediate_features, out_features)
        self.in_features, self.intermediate_features, self.out_features = (
            in_features,
            intermediate_features,
            out_features,
        )


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.dense(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    return ops.dense(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    return ops.dense_gelu_dense(input, weight1, bias1, weight2, bias2)


give_submodules(__name__)
