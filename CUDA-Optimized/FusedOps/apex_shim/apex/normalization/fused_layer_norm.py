"""Apex's layer and RMS norms. The functions' default eps is 1e-6, that of the modules 1e-5, as there; under autocast
all arguments are cast to its type, as there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedops import nn, ops
from fusedops.ops.autocast import cast_for_product

Shape = int | Sequence[int]


class FusedLayerNorm(nn.LayerNorm):
    """Output in the dtype of the input."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        input, weight, bias = cast_for_product(input, self.weight, self.bias)
        return ops.layer_norm(input, self.normalized_shape, weight, bias, self.eps, **self._arguments())


class FusedRMSNorm(nn.RMSNorm):
    """Output in the dtype of the input."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        input, weight = cast_for_product(input, self.weight)
        return ops.rms_norm(input, self.normalized_shape, weight, self.eps, **self._arguments())


class MixedFusedLayerNorm(FusedLayerNorm):
    """Output in the dtype of the weights."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _only_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """Output in the dtype of the weights."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _only_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
        )


def _only_affine(name: str, kwargs: dict[str, Any]) -> None:
    if not kwargs.pop("elementwise_affine", True):
        raise RuntimeError(f"{name} does not support `elementwise_affine = False`")
    if kwargs:
        raise TypeError(f"{name} got unexpected arguments {', '.join(kwargs)}")


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    input, weight, bias = cast_for_product(input, weight, bias)
    return ops.layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    (input,) = cast_for_product(input)
    return ops.layer_norm(input, normalized_shape, None, None, eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    input, weight, bias = cast_for_product(input, weight, bias)
    return ops.layer_norm(
        input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient, out_dtype=weight.dtype
    )


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    input, weight = cast_for_product(input, weight)
    return ops.rms_norm(input, normalized_shape, weight, eps, memory_efficient=memory_efficient)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    (input,) = cast_for_product(input)
    return ops.rms_norm(input, normalized_shape, None, eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    input, weight = cast_for_product(input, weight)
    return ops.rms_norm(input, normalized_shape, weight, eps, memory_efficient=memory_efficient, out_dtype=weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    return ops.rms_norm(input, normalized_shape, weight, eps)


class FusedLayerNormAffineFunction:
    """``FusedLayerNormAffineFunction.apply(...)`` is `fused_layer_norm_affine`; the others likewise."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction:
    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedLayerNormFunction:
    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction:
    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)


class FusedRMSNormFunction:
    apply = staticmethod(fused_rms_norm)
