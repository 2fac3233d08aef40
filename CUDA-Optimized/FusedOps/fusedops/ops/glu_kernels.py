"""Triton kernels of `glu`: act(a) * b and its derivative, over matrices whose rows may be strided."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2
from .activation_kernels import activate, activate_and_derive

# elements in a tile, the most columns in it, warps
FORWARD = (2048, 2048, 4)
BACKWARD = (1024, 1024, 4)


@triton.jit
def _forward_kernel(
    a_ptr, b_ptr, y_ptr, rows, width, a_stride, b_stride, KIND: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < rows) & (column < width)
    a = tl.load(a_ptr + row * a_stride + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = activate(a, KIND) * b
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, a_ptr, b_ptr, da_ptr, db_ptr, rows, width, dy_stride, a_stride, b_stride, da_stride, db_stride,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < rows) & (column < width)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * a_stride + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate, slope = activate_and_derive(a, KIND)
    tl.store(da_ptr + row * da_stride + column, (dy * b * slope).to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + row * db_stride + column, (dy * gate).to(db_ptr.dtype.element_ty), mask=mask)


def _tiling(table: tuple, rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    elements, columns, warps = table
    block_n = min(next_power_of_2(width), columns)
    block_m = max(1, min(elements // block_n, next_power_of_2(rows)))
    grid = (ceil_div(rows, block_m), ceil_div(width, block_n))
    return grid, {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


def forward(a: Tensor, b: Tensor, y: Tensor, kind: int) -> None:
    """y = act(a) * b; all (rows, width) with unit stride in the rows."""
    rows, width = a.shape
    grid, tile = _tiling(FORWARD, rows, width)
    with device_guard(a):
        _forward_kernel[grid](a, b, y, rows, width, a.stride(0), b.stride(0), KIND=kind, **tile)


def backward(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, kind: int) -> None:
    """Fill da and db, which may be halves of one tensor."""
    rows, width = a.shape
    grid, tile = _tiling(BACKWARD, rows, width)
    strides = [tensor.stride(0) for tensor in (dy, a, b, da, db)]
    with device_guard(a):
        _backward_kernel[grid](dy, a, b, da, db, rows, width, *strides, KIND=kind, **tile)
