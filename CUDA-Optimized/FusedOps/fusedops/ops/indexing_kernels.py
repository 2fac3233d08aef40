"""Triton kernels of `indexing`: rows picked by an index times rows, and sums of products of rows by an index."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2

TILE = (1024, 1024, 4)  # elements in a tile, the most columns in it, warps


@triton.jit
def _pick_kernel(
    a_ptr, b_ptr, index_ptr, y_ptr, sources, rows, width, a_stride, b_stride, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (row < rows)[:, None] & (column < width)
    source = tl.load(index_ptr + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    known = (source >= 0) & (source < sources)
    a = tl.load(a_ptr + source * a_stride + column, mask=mask & known, other=float("nan")).to(tl.float32)
    b = tl.load(b_ptr + row[:, None] * b_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * width + column, (a * b).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(a_ptr, b_ptr, order_ptr, start_ptr, y_ptr, width, a_stride, b_stride, BLOCK_N: tl.constexpr):
    target = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    total = tl.zeros((BLOCK_N,), tl.float32)
    for place in range(tl.load(start_ptr + target), tl.load(start_ptr + target + 1)):
        row = tl.load(order_ptr + place)
        a = tl.load(a_ptr + row * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * b_stride + column, mask=inside, other=0.0).to(tl.float32)
        total += a * b
    tl.store(y_ptr + target * width + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def pick(a: Tensor, b: Tensor, index: Tensor, y: Tensor) -> None:
    """y[i] = a[index[i]] * b[i], NaN where a has no such row."""
    rows, width = b.shape
    elements, columns, warps = TILE
    block_n = min(next_power_of_2(width), columns)
    block_m = max(1, min(elements // block_n, next_power_of_2(rows)))
    with device_guard(a):
        _pick_kernel[(ceil_div(rows, block_m), ceil_div(width, block_n))](
            a, b, index, y, a.shape[0], rows, width, a.stride(0), b.stride(0), BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=warps,
        )  # fmt: skip


def sum_products(a: Tensor, b: Tensor, order: Tensor, starts: Tensor, y: Tensor) -> None:
    """y[j] = sum of a[i] * b[i] over i = order[starts[j] : starts[j + 1]], in that order."""
    width = a.shape[1]
    block_n = min(next_power_of_2(width), TILE[1])
    with device_guard(a):
        _sum_kernel[(y.shape[0], ceil_div(width, block_n))](
            a, b, order, starts, y, width, a.stride(0), b.stride(0), BLOCK_N=block_n, num_warps=TILE[2]
        )
