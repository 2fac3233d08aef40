"""A linear layer whose weight's gradient is added to a buffer, usually float32, by the matrix product itself.

With many micro-batches, 16-bit gradients lose what float32 sums keep, and a separate addition reads and writes the
buffer once more. Here the product's own epilogue adds: buffer = dy^T x + 1 buffer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import cast_for_product, without_autocast
from .registration import once

__all__ = ["accumulate_weight_gradient", "add_product_", "linear_accumulating"]


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, also where total is float32 and the factors have 16 bits (then all arithmetic is float32)."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        with without_autocast(total.device):
            total += a.to(total.dtype) @ b.to(total.dtype)


def accumulate_weight_gradient(x: Tensor, dy: Tensor, total: Tensor) -> None:
    """total (out, in) += dy^T x of x (..., in) and dy (..., out), in place. ValueError for shapes that do not fit."""
    if x.shape[:-1] != dy.shape[:-1] or total.shape != (dy.shape[-1], x.shape[-1]) or x.dtype != dy.dtype:
        shapes = f"{x.dtype} {tuple(x.shape)}, {dy.dtype} {tuple(dy.shape)} and {tuple(total.shape)}"
        raise ValueError(f"need x (..., in) and dy (..., out) of one type, total (out, in), not {shapes}")
    if not total.is_contiguous():
        raise ValueError(f"the buffer must be contiguous, its strides are {total.stride()}")
    add_product_(total, dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total  # not saved as a tensor: the backward pass changes it, once a micro-batch
        return F.linear(x, weight, bias)

    @staticmethod
    @functools.partial(once, "linear_accumulating")
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        with without_autocast(dy.device):  # the forward pass's types, wherever backward is called
            dx = dy @ weight if ctx.needs_input_grad[0] else None
        accumulate_weight_gradient(x, dy, ctx.total)
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, dbias, None


def linear_accumulating(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, total: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias; in the backward pass the weight's gradient is added to `total`, by default to the attribute
    `weight.main_grad`, and `weight.grad` stays as it is. Under autocast x, weight and bias are cast to its type, as for
    torch's linear. ValueError if there is no buffer or it does not fit.
    """
    total = getattr(weight, "main_grad", None) if total is None else total
    if total is None or total.shape != weight.shape:
        found = "none" if total is None else tuple(total.shape)
        raise ValueError(f"needs a buffer `main_grad` of the weight's shape {tuple(weight.shape)}, there is {found}")
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    return _Accumulating.apply(*cast_for_product(x, weight, bias), total)
