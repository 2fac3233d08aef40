"""Softmax of scaled attention scores with a mask, a causal mask, both or none, in one pass; any number of keys.

Arithmetic is float32; the result has the type of the scores. A row whose keys are all masked gives zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend_for
from .registration import Operator

__all__ = ["scaled_softmax", "scaled_softmax_plain"]


def scaled_softmax(x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(scale * x) over the last dimension of x (..., queries, keys), keys that are masked left out.

    `mask` is bool or uint8, true where a key is hidden, of a shape that broadcasts to x of at most four dimensions.
    `causal`: query i sees the keys up to i + keys - queries (Apex's upper-triangular form where both are the same).
    ValueError for a mask or an input that does not fit.
    """
    if not x.is_floating_point() or x.dim() < 1 or (causal and x.dim() < 2):
        raise ValueError(f"scores must be floating-point (..., queries, keys), not {x.dtype} {tuple(x.shape)}")
    if mask is not None:
        mask = _fitting(mask, x)
    if backend_for(x, mask, op="scaled_softmax") == "plain" or not x.numel():
        return scaled_softmax_plain(x, scale, mask if mask is None else mask.view(x.shape), causal)
    keys = x.shape[-1]
    flat = x.reshape(-1, keys)
    flat = flat if keys == 1 or flat.stride(1) == 1 else flat.contiguous()
    heads = x.shape[-3] if x.dim() > 2 else 1
    queries = x.shape[-2] if x.dim() > 1 else 1
    return softmax_forward(flat, mask, float(scale), causal, heads, queries).view(x.shape)


def scaled_softmax_plain(x: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """The plain form; the mask is bool, of x's shape."""
    scores = (x if x.dtype == torch.float64 else x.float()) * scale
    hidden = mask
    if causal:
        queries, keys = x.shape[-2:]
        upper = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        hidden = upper if hidden is None else hidden | upper
    if hidden is not None:
        scores = scores.masked_fill(hidden, -float("inf"))
    y = torch.softmax(scores, -1)
    if hidden is not None:
        y = y.masked_fill(hidden, 0.0)  # NaN where all of a row is hidden
    return y.to(x.dtype)


def _fitting(mask: Tensor, x: Tensor) -> Tensor:
    """The mask as a bool view (batch, heads, queries, keys) with strides of 0 where it broadcasts."""
    if mask.dtype not in (torch.bool, torch.uint8) or x.dim() > 4:
        raise ValueError(
            f"a mask must be bool or uint8 and the scores of 4 dimensions at most, not {mask.dtype}, {x.dim()}"
        )
    if mask.dtype == torch.uint8:
        mask = mask.view(torch.bool) if mask.is_contiguous() else mask != 0
    try:
        full = mask.expand(x.shape)
    except RuntimeError:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}") from None
    return full[(None,) * (4 - x.dim())]


def _launch_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, heads: int, queries: int) -> Tensor:
    from . import masked_softmax_kernels

    y = x.new_empty(x.shape)
    masked_softmax_kernels.forward(x, mask, y, scale, causal, heads, queries)
    return y


def _fake_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, heads: int, queries: int) -> Tensor:
    return x.new_empty(x.shape)


def _launch_backward(dy: Tensor, y: Tensor, scale: float, causal: bool, queries: int) -> Tensor:
    from . import masked_softmax_kernels

    dx = y.new_empty(y.shape)
    masked_softmax_kernels.backward(dy if dy.stride(1) == 1 else dy.contiguous(), y, dx, scale, causal, queries)
    return dx


def _fake_backward(dy: Tensor, y: Tensor, scale: float, causal: bool, queries: int) -> Tensor:
    return y.new_empty(y.shape)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, ctx.scale, ctx.causal, _, ctx.queries = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> tuple:
    (y,) = ctx.saved_tensors
    return softmax_backward(dy, y, ctx.scale, ctx.causal, ctx.queries), *(None,) * 5


softmax_backward = Operator("scaled_softmax_backward", _launch_backward, _fake_backward)
softmax_forward = Operator("scaled_softmax", _launch_forward, _fake_forward).differentiable(_setup, _backward)
