"""Layer norm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMS norm (Zhang & Sennrich 2019,
https://arxiv.org/abs/1910.07467), alone or with a residual added first.

Statistics and arithmetic are float32 whatever the types of input, weight and bias, each of which may differ. Any
width from 1 to 65,536 and more. Rows may be strided (a slice of the last dimension); anything else is made contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import backend_for
from .registration import Operator

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "norm_plain", "rms_norm"]


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    zero_centred: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions, which are `normalized_shape`.

    `out_dtype` is the input's unless given. `zero_centred` takes weight + 1 for weight. `memory_efficient` keeps the
    output for the backward pass instead of the input and recovers the normalised input from it, which the plain form
    does without: a weight of 0 makes the gradients of its column NaN in the kernels, and very small ones cost accuracy.
    ValueError for shapes that differ.
    """
    return _norm(x, None, normalized_shape, weight, bias, eps, False, memory_efficient, zero_centred, out_dtype)[0]


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    memory_efficient: bool = False,
    zero_centred: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; else as `layer_norm`. eps None: the input type's epsilon."""
    eps = _epsilon(x) if eps is None else eps
    return _norm(x, None, normalized_shape, weight, None, eps, True, memory_efficient, zero_centred, out_dtype)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    zero_centred: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual, which has the residual's type (a float32 stream stays float32)."""
    return _norm(x, residual, normalized_shape, weight, bias, eps, False, memory_efficient, zero_centred, out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    memory_efficient: bool = False,
    zero_centred: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual, which has the residual's type."""
    eps = _epsilon(x) if eps is None else eps
    return _norm(x, residual, normalized_shape, weight, None, eps, True, memory_efficient, zero_centred, out_dtype)


def norm_plain(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centred: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The plain form on (rows, width): output and, with a residual, the sum (else x)."""
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x if residual is None else (x.to(precise) + residual.to(precise)).to(residual.dtype)
    wide, shape = total.to(precise), x.shape[1:]
    scale = None if weight is None else weight.to(precise) + 1 if zero_centred else weight.to(precise)
    if rms:
        y = F.rms_norm(wide, shape, scale, eps)
    else:
        y = F.layer_norm(wide, shape, scale, None if bias is None else bias.to(precise), eps)
    return y.to(out_dtype), total


def _norm(
    x: Tensor, residual: Tensor | None, normalized_shape: int | Sequence[int], weight: Tensor | None,
    bias: Tensor | None, eps: float, rms: bool, memory_efficient: bool, zero_centred: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    _check(x, residual, shape, weight, bias, out_dtype)
    name = "rms_norm" if rms else "layer_norm"
    width = math.prod(shape)
    out_dtype = out_dtype or x.dtype
    flat = _matrix(x, width)
    flat_residual = None if residual is None else _matrix(residual, width)
    weight = None if weight is None else weight.reshape(-1)
    bias = None if bias is None else bias.reshape(-1)
    if backend_for(x, residual, weight, bias, op=name) == "plain" or out_dtype == torch.float64:
        y, total = norm_plain(flat, flat_residual, weight, bias, eps, rms, zero_centred, out_dtype)
    else:
        arguments = (float(eps), rms, memory_efficient, zero_centred, out_dtype)
        y, total, _, _ = norm_forward(flat, flat_residual, weight, bias, *arguments)
    return y.view(x.shape), x if residual is None else total.view(x.shape)


def _epsilon(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0  # `_check` refuses the others


def _check(
    x: Tensor, residual: Tensor | None, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    if not shape or tuple(x.shape[-len(shape) :]) != shape or math.prod(shape) == 0:
        raise ValueError(f"normalized_shape {shape} must be the last dimensions of the input, {tuple(x.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, normalized_shape is {shape}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}")
    for name, tensor in (("input", x), ("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"the {name} must be of a floating-point type, not {tensor.dtype}")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype must be a floating-point type, not {out_dtype}")


def _matrix(x: Tensor, width: int) -> Tensor:
    """x as (rows, width) with unit stride in the rows, copied only where its strides do not allow that."""
    flat = x.reshape(-1, width)
    return flat if width == 1 or flat.stride(1) == 1 else flat.contiguous()


def _outputs(
    x: Tensor, residual: Tensor | None, out_dtype: torch.dtype, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = x.shape
    total = x.new_empty(0) if residual is None else x.new_empty((rows, width), dtype=residual.dtype)
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return x.new_empty((rows, width), dtype=out_dtype), total, mean, x.new_empty(rows, dtype=torch.float32)


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    memory_efficient: bool,
    zero_centred: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import norm_kernels

    y, total, mean, rstd = _outputs(x, residual, out_dtype, rms)
    if x.shape[0]:
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        norm_kernels.forward(x, residual, weight, bias, eps, rms, zero_centred, y, total, mean, rstd)
    return y, total, mean, rstd


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool,
    memory_efficient: bool, zero_centred: bool, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(x, residual, out_dtype, rms)


def _launch_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rms: bool,
    from_output: bool,
    zero_centred: bool,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    weight_needed: bool,
    bias_needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import norm_kernels

    outputs = _gradients(dy, weight, bias, x_dtype, residual_dtype, weight_needed, bias_needed)
    dx, dresidual, dweight, dbias = outputs
    if not dy.shape[0]:
        dweight.zero_()
        dbias.zero_()
        return outputs
    width = dy.shape[1]
    norm_kernels.backward(
        _matrix(dy, width), None if dsum is None else _matrix(dsum, width), x,
        None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous(), mean, rstd,
        rms, from_output, zero_centred, dx, dresidual if residual_dtype is not None else None,
        dweight if weight_needed else None, dbias if bias_needed else None,
    )  # fmt: skip
    return outputs


def _gradients(
    dy: Tensor, weight: Tensor | None, bias: Tensor | None, x_dtype: torch.dtype, residual_dtype: torch.dtype | None,
    weight_needed: bool, bias_needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dresidual = dy.new_empty(0) if residual_dtype is None else dy.new_empty(dy.shape, dtype=residual_dtype)
    dweight = dy.new_empty(dy.shape[1], dtype=weight.dtype) if weight_needed else dy.new_empty(0)
    dbias = dy.new_empty(dy.shape[1], dtype=bias.dtype) if bias_needed else dy.new_empty(0)
    return dy.new_empty(dy.shape, dtype=x_dtype), dresidual, dweight, dbias


def _fake_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, rms: bool, from_output: bool, zero_centred: bool, x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None, weight_needed: bool, bias_needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(dy, weight, bias, x_dtype, residual_dtype, weight_needed, bias_needed)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, residual, weight, bias, _, ctx.rms, memory_efficient, ctx.zero_centred, _ = inputs
    y, total, mean, rstd = output
    # From the output only where there is an affine map to invert or nothing to do; the input is otherwise as good.
    ctx.from_output = memory_efficient
    kept = y if memory_efficient else x if residual is None else total
    ctx.save_for_backward(kept, weight, bias if memory_efficient else None, mean, rstd)
    ctx.has_bias, ctx.x_dtype = bias is not None, x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: None) -> tuple:
    nothing = (None,) * 5
    if ctx.residual_dtype is None:
        dsum = None
    if dy is None:  # only the sum was used
        dx = None if dsum is None else dsum.to(ctx.x_dtype)
        return dx, dsum, None, None, *nothing
    kept, weight, bias, mean, rstd = ctx.saved_tensors
    _, _, weight_needed, bias_needed, *_ = ctx.needs_input_grad
    second = ctx.residual_dtype if ctx.residual_dtype not in (None, ctx.x_dtype) else None
    stand_in = bias if bias is not None or not bias_needed else dy.new_empty(0, dtype=ctx.bias_dtype)
    dx, dresidual, dweight, dbias = norm_backward(
        dy, dsum, kept, weight, stand_in, mean, rstd, ctx.rms, ctx.from_output, ctx.zero_centred, ctx.x_dtype,
        second, weight_needed, bias_needed,
    )  # fmt: skip
    residual_grad = None if ctx.residual_dtype is None else dx if second is None else dresidual
    return dx, residual_grad, dweight if weight_needed else None, dbias if bias_needed else None, *nothing


norm_backward = Operator("norm_backward", _launch_backward, _fake_backward)
norm_forward = Operator("norm", _launch_forward, _fake_forward).differentiable(_setup, _backward)
