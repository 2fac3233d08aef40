"""Triton kernels of `feedforward`: bias and activation after a matrix product, and their derivative."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2, processors
from .activation_kernels import activate, activate_and_derive

FORWARD = (2048, 1024, 4)  # elements in a tile, the most columns in it, warps
BACKWARD = (2048, 256, 4, 4)  # the same, and programs per multiprocessor


@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, rows, width, x_stride, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows) & (column < width)[None, :]
    x = tl.load(x_ptr + row * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row * width + column[None, :], activate(x, KIND).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, share_ptr, rows, width, dy_stride, x_stride,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = (tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
        mask = (row < rows) & inside[None, :]
        x = tl.load(x_ptr + row * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        _, slope = activate_and_derive(x + bias[None, :], KIND)
        dx = dy * slope
        total += dx
        tl.store(dx_ptr + row * width + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(share_ptr + tl.program_id(0).to(tl.int64) * width + column, tl.sum(total, 0), mask=inside)


def forward(x: Tensor, bias: Tensor | None, y: Tensor, kind: int) -> None:
    """y = act(x + bias), all (rows, width)."""
    rows, width = x.shape
    elements, columns, warps = FORWARD
    block_n = min(next_power_of_2(width), columns)
    block_m = max(1, min(elements // block_n, next_power_of_2(rows)))
    grid = (ceil_div(rows, block_m), ceil_div(width, block_n))
    with device_guard(x):
        _forward_kernel[grid](
            x, bias, y, rows, width, x.stride(0), KIND=kind, HAS_BIAS=bias is not None, BLOCK_M=block_m,
            BLOCK_N=block_n, num_warps=warps,
        )  # fmt: skip


def backward(dy: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, kind: int) -> Tensor:
    """Fill dx; returns shares (programs, width) of the bias's gradient, float32, to be summed over programs."""
    rows, width = x.shape
    elements, columns, warps, per_processor = BACKWARD
    block_n = min(next_power_of_2(width), columns)
    block_m = max(1, min(elements // block_n, next_power_of_2(rows)))
    blocks = ceil_div(width, block_n)
    wanted = max(1, per_processor * processors(x.device) // blocks)
    programs = min(wanted, ceil_div(rows, block_m))
    shares = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    with device_guard(x):
        _backward_kernel[(programs, blocks)](
            dy, x, bias, dx, shares, rows, width, dy.stride(0), x.stride(0), KIND=kind, HAS_BIAS=bias is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
        )  # fmt: skip
    return shares
