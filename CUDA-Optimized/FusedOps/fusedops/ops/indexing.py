"""Rows picked by an index, times other rows; its derivative, to any order, of the same two operators.

    index_mul_2d(a, b, index)[i] = a[index[i]] * b[i]
    sums(a, b, index)[j] = sum of a[i] * b[i] over all i with index[i] = j

The sums go over a sorted index in a fixed order: no atomics, the same bits every time, float32 arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend_for
from .autocast import promoted
from .ranges import check_range
from .registration import Operator

__all__ = ["index_mul_2d", "index_mul_2d_plain"]


def index_mul_2d(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """a[index] * b of a (N, W), b (M, W) of one type and index (M,), integers from 0 to N - 1.

    ValueError for shapes that do not fit, and in the plain form on a CPU for an index out of range; else such a row of
    the result is NaN and gives `a` no gradient.
    """
    a, b = promoted(a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or index.shape != b.shape[:1] or a.dtype != b.dtype:
        shapes = f"{a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)} and {tuple(index.shape)}"
        raise ValueError(f"need a (N, W), b (M, W) of one type and index (M,), not {shapes}")
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"the index must be int64 or int32, not {index.dtype}")
    if backend_for(a, b, index, op="index_mul_2d") == "plain" or not a.numel() or not b.numel():
        check_range("index", index, 0, a.shape[0] - 1)
        return index_mul_2d_plain(a, b, index)
    return pick(_unit(a), _unit(b), index.contiguous())


def index_mul_2d_plain(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """The plain form."""
    inside = (index >= 0) & (index < a.shape[0])
    picked = a[torch.where(inside, index, 0).long()] if a.shape[0] else torch.zeros_like(b)
    return torch.where(inside[:, None], picked, float("nan")) * b


def _unit(x: Tensor) -> Tensor:
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


def _launch_pick(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    from . import indexing_kernels

    y = b.new_empty(b.shape)
    indexing_kernels.pick(_unit(a), _unit(b), index, y)
    return y


def _fake_pick(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return b.new_empty(b.shape)


def _launch_sums(a: Tensor, b: Tensor, index: Tensor, rows: int) -> Tensor:
    from . import indexing_kernels

    y = a.new_empty((rows, a.shape[1]))
    ordered, order = torch.sort(index.long(), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    indexing_kernels.sum_products(_unit(a), _unit(b), order, starts, y)
    return y


def _fake_sums(a: Tensor, b: Tensor, index: Tensor, rows: int) -> Tensor:
    return a.new_empty((rows, a.shape[1]))


def _setup_pick(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_pick(ctx: Any, dy: Tensor) -> tuple:
    a, b, index = ctx.saved_tensors
    da = sums(dy, b, index, a.shape[0]) if ctx.needs_input_grad[0] else None
    return da, pick(a, dy, index) if ctx.needs_input_grad[1] else None, None


def _setup_sums(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward_sums(ctx: Any, dy: Tensor) -> tuple:
    a, b, index = ctx.saved_tensors
    return pick(dy, b, index), pick(dy, a, index), None, None


pick = Operator("index_mul_2d", _launch_pick, _fake_pick).differentiable(_setup_pick, _backward_pick, again=True)
sums = Operator("index_sum_products", _launch_sums, _fake_sums).differentiable(_setup_sums, _backward_sums, again=True)
