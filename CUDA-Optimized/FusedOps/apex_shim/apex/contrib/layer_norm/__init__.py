from __future__ import annotations

from torch import Tensor

from apex.normalization.fused_layer_norm import MixedFusedLayerNorm, mixed_dtype_fused_layer_norm_affine
from apex.submodules import give_submodules

__all__ = ["FastLayerNorm"]


class FastLayerNorm(MixedFusedLayerNorm):
    """Any ``hidden_size``; output in the dtype of the weights."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)
        self.epsilon = eps


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


give_submodules(__name__)
