"""Triton kernels of `masked_softmax` over rows of (batch, heads, queries, keys) scores.

A program keeps a tile of whole rows in registers: one read and one write forward, two reads and one write backward.
Masked elements are not read. Rows wider than the tables go through in chunks, twice. Offsets of rows have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2

# (up to this width, elements in a tile of rows, warps)
FORWARD = ((1024, 2048, 4), (2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 16), (16384, 16384, 32), (32768, 32768, 32))
BACKWARD = ((1024, 2048, 4), (2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 16), (16384, 16384, 32))
WIDE = (8192, 16)  # elements in a chunk, warps

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _masked_scores(
    x_ptr, mask_ptr, row, columns, inside, x_stride, scale, heads, queries, keys, mask_b, mask_h, mask_q, mask_k,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scaled scores in float32, -inf where masked; row (M, 1), columns (1, N)."""
    query = row % queries
    seen = inside
    if CAUSAL:
        seen = seen & (columns <= query + (keys - queries))
    if HAS_MASK:
        head = row // queries
        offset = (head // heads) * mask_b + (head % heads) * mask_h + query * mask_q + columns * mask_k
        hidden = tl.load(mask_ptr + offset, mask=seen, other=1)
        seen = seen & (hidden == 0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=seen, other=0.0).to(tl.float32) * scale
    return tl.where(seen, x, -float("inf"))


@triton.jit
def _forward_kernel(
    x_ptr, mask_ptr, y_ptr, rows, x_stride, scale, heads, queries, keys, mask_b, mask_h, mask_q, mask_k,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    inside = (row < rows) & (columns < keys)
    x = _masked_scores(
        x_ptr, mask_ptr, row, columns, inside, x_stride, scale, heads, queries, keys, mask_b, mask_h, mask_q, mask_k,
        HAS_MASK, CAUSAL,
    )  # fmt: skip
    largest = tl.max(x, 1)[:, None]
    origin = tl.where(largest == -float("inf"), 0.0, largest)
    y = tl.exp2((x - origin) * LOG2_E)
    total = tl.sum(y, 1)[:, None]
    y = y * (1.0 / tl.where(total > 0.0, total, 1.0))  # a row that is masked all over is 0
    tl.store(y_ptr + row * keys + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_wide_kernel(
    x_ptr, mask_ptr, y_ptr, rows, x_stride, scale, heads, queries, keys, mask_b, mask_h, mask_q, mask_k,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) + tl.arange(0, 1).to(tl.int64))[:, None]
    base = tl.full((1, 1), -float("inf"), tl.float32)
    total = tl.zeros((1, 1), tl.float32)
    for start in range(0, keys, BLOCK_N):
        columns = (start + tl.arange(0, BLOCK_N))[None, :]
        x = _masked_scores(
            x_ptr, mask_ptr, row, columns, columns < keys, x_stride, scale, heads, queries, keys, mask_b, mask_h,
            mask_q, mask_k, HAS_MASK, CAUSAL,
        )  # fmt: skip
        largest = tl.maximum(base, tl.max(x, 1)[:, None])
        origin = tl.where(largest == -float("inf"), 0.0, largest)
        total = total * tl.exp2((base - origin) * LOG2_E) + tl.sum(tl.exp2((x - origin) * LOG2_E), 1)[:, None]
        base = largest
    origin = tl.where(base == -float("inf"), 0.0, base)
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    for start in range(0, keys, BLOCK_N):
        columns = (start + tl.arange(0, BLOCK_N))[None, :]
        x = _masked_scores(
            x_ptr, mask_ptr, row, columns, columns < keys, x_stride, scale, heads, queries, keys, mask_b, mask_h,
            mask_q, mask_k, HAS_MASK, CAUSAL,
        )  # fmt: skip
        y = tl.exp2((x - origin) * LOG2_E) * inverse
        tl.store(y_ptr + row * keys + columns, y.to(y_ptr.dtype.element_ty), mask=columns < keys)


@triton.jit
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, dy_stride, scale, queries, keys,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    inside = (row < rows) & (columns < keys)
    seen = inside
    if CAUSAL:
        seen = seen & (columns <= row % queries + (keys - queries))
    y = tl.load(y_ptr + row * keys + columns, mask=seen, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=seen, other=0.0).to(tl.float32)
    dx = scale * y * (dy - tl.sum(y * dy, 1)[:, None])
    tl.store(dx_ptr + row * keys + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_wide_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, dy_stride, scale, queries, keys, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    limit = keys
    if CAUSAL:
        limit = tl.minimum(keys, (row % queries).to(tl.int32) + (keys - queries) + 1)
    along = 0.0
    for start in range(0, keys, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * keys + columns, mask=columns < limit, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=columns < limit, other=0.0).to(tl.float32)
        along += tl.sum(y * dy, 0)
    for start in range(0, keys, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * keys + columns, mask=columns < limit, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=columns < limit, other=0.0).to(tl.float32)
        dx = scale * y * (dy - along)
        tl.store(dx_ptr + row * keys + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < keys)


def _tuned(table: tuple, keys: int) -> tuple[int, int, int] | None:
    """(rows, columns in a tile, warps), or None for rows that need chunks."""
    found = next((row for row in table if keys <= row[0]), None)
    if found is None:
        return None
    block_n = next_power_of_2(keys)
    return max(1, found[1] // block_n), block_n, found[2]


def forward(
    x: Tensor, mask: Tensor | None, y: Tensor, scale: float, causal: bool, heads: int, queries: int
) -> None:  # fmt: skip
    """Fill y (rows, keys) from x (rows, keys), rows = batch * heads * queries; mask (batch, heads, queries, keys)."""
    rows, keys = x.shape
    strides = (0, 0, 0, 0) if mask is None else mask.stride()
    arguments = (x, mask, y, rows, x.stride(0), scale, heads, queries, keys, *strides)
    flags = {"HAS_MASK": mask is not None, "CAUSAL": causal}
    tuned = _tuned(FORWARD, keys)
    with device_guard(x):
        if tuned is None:
            _forward_wide_kernel[(rows,)](*arguments, **flags, BLOCK_N=WIDE[0], num_warps=WIDE[1])
        else:
            block_m, block_n, warps = tuned
            shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}
            _forward_kernel[(ceil_div(rows, block_m),)](*arguments, **flags, **shape)


def backward(dy: Tensor, y: Tensor, dx: Tensor, scale: float, causal: bool, queries: int) -> None:
    """Fill dx (rows, keys) from the gradient and the output of `forward`."""
    rows, keys = y.shape
    arguments = (dy, y, dx, rows, dy.stride(0), scale, queries, keys)
    tuned = _tuned(BACKWARD, keys)
    with device_guard(y):
        if tuned is None:
            _backward_wide_kernel[(rows,)](*arguments, CAUSAL=causal, BLOCK_N=WIDE[0], num_warps=WIDE[1])
        else:
            block_m, block_n, warps = tuned
            shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}
            _backward_kernel[(ceil_div(rows, block_m),)](*arguments, CAUSAL=causal, **shape)
