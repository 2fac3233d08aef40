"""Triton kernels of `norm`: layer norm and RMS norm over the last dimension of (rows, width) matrices.

Forward: a program keeps a tile of whole rows in registers, so that the input is read once. Rows wider than
REGISTER_WIDTH are read in chunks, twice, the second time mostly from the L2 cache.

Backward: as many programs as fill the GPU go over the rows; each reads gradient and input once, writes the input's
gradient and sums its share of the weights' gradients, which it writes once at the end. A second kernel adds the shares
in a fixed order: no atomics, the same bits every time. Rows that fill the registers (`APART`): a program takes a row,
then columns of the rows that all programs took, which are in the L2 cache. Wider ones: two passes over a few rows at a
time, the second mostly from L2, and the shares live in memory.

Offsets of rows are 64 bits wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2, processors, shared_memory, stages_that_fit

# (up to this width, elements in a tile of rows, warps, programs per multiprocessor or 0 for one a tile, stages): a
# program of several tiles has so many stages, less one, of tiles on their way to shared memory.
FORWARD = (
    (512, 2048, 1, 0, 1),
    (1024, 4096, 4, 0, 1),
    (2048, 8192, 4, 0, 1),
    (4096, 16384, 4, 16, 1),
    (8192, 16384, 32, 1, 4),
    (16384, 16384, 16, 1, 3),
)
# (up to this width, elements in a tile of rows, warps, programs per multiprocessor, stages, whether to load the weight
# again for each tile instead of keeping it in registers). 64 registers a thread up to 4096, no spills.
BACKWARD = (
    (256, 1024, 4, 8, 2, False),
    (1024, 2048, 4, 4, 1, True),
    (2048, 2048, 8, 4, 2, False),
    (4096, 4096, 8, 2, 1, False),
    (8192, 8192, 16, 1, 1, False),
)
# Wider rows leave no registers for the weights' gradients, which are summed apart: (up to this width, warps, programs
# per multiprocessor, rows x columns in a tile of the sums).
APART = ((16384, 16, 1, 32, 128),)
WIDE_FORWARD = (8192, 16)  # elements in a chunk, warps
WIDE_BACKWARD = (2, 4096, 16, 1)  # rows together, elements in a chunk, warps, programs per multiprocessor
FINISH = ((1024, 32, 32, 4), (1 << 30, 32, 64, 4))  # (up to this width, shares x columns in a tile, warps)


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    rows, width, x_stride, residual_stride, eps,
    RMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    inside = columns < width
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTRED:
            weight += 1.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        valid = row < rows
        mask = valid[:, None]
        if not EVEN:
            mask = mask & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            source = residual_ptr + row[:, None] * residual_stride + columns[None, :]
            total = x + tl.load(source, mask=mask, other=0.0).to(tl.float32)
            total = total.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row[:, None] * width + columns[None, :], total, mask=mask)
            x = total.to(tl.float32)  # what the backward pass will read
        if RMS:
            y = x
        else:
            mean = tl.sum(x, 1) / width
            tl.store(mean_ptr + row, mean, mask=valid)
            y = x - mean[:, None]
            if not EVEN:
                y = tl.where(inside[None, :], y, 0.0)
        rstd = tl.rsqrt(tl.sum(y * y, 1) / width + eps)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = y * rstd[:, None]
        if HAS_WEIGHT:
            y = y * weight[None, :]
        if HAS_BIAS:
            y = y + bias[None, :]
        tl.store(y_ptr + row[:, None] * width + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    rows, width, x_stride, residual_stride, eps,
    RMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * width
    if HAS_RESIDUAL:
        residual_ptr += row * residual_stride
        sum_ptr += row * width
    mean = 0.0
    spread = 0.0  # sum of squared deviations so far (RMS: of squares), merged as by Chan et al. 1979
    for start in range(0, width, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < width
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + columns, total, mask=inside)
            x = total.to(tl.float32)
        if RMS:
            spread += tl.sum(x * x, 0)
        else:
            count = tl.minimum(width - start, BLOCK_N) * 1.0
            own = tl.sum(x, 0) / count
            deviation = tl.where(inside, x - own, 0.0)
            delta = own - mean
            mean += delta * (count / (start + count))
            spread += tl.sum(deviation * deviation, 0) + delta * delta * (start * (count / (start + count)))
    rstd = tl.rsqrt(spread / width + eps)
    tl.store(rstd_ptr + row, rstd)
    if not RMS:
        tl.store(mean_ptr + row, mean)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # the sum was written by other threads of this program
    for start in range(0, width, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < width
        if HAS_RESIDUAL:
            x = tl.load(sum_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            if ZERO_CENTRED:
                weight += 1.0
            y = y * weight
        if HAS_BIAS:
            y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normalised(value, bias, weight, mean, rstd, FROM_OUTPUT: tl.constexpr, RMS: tl.constexpr):
    """The normalised input, from the input, or from the output by the inverse of the affine map (NaN for a weight of
    0)."""
    if FROM_OUTPUT:
        normal = tl.where(weight == 0.0, float("nan"), (value - bias) / weight)
    elif RMS:
        normal = value * rstd
    else:
        normal = (value - mean) * rstd
    return normal


@triton.jit
def _affine(
    weight_ptr, bias_ptr, columns, inside, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Weight and bias in float32; 1 and 0 where there is none, and beyond the width."""
    weight = tl.full((BLOCK_N,), 1.0, tl.float32)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0 if ZERO_CENTRED else 1.0).to(tl.float32)
        if ZERO_CENTRED:
            weight += 1.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def _input_gradient(dy, normal, weight, rstd, width, FROM_OUTPUT: tl.constexpr, RMS: tl.constexpr):
    """Of whole rows: rstd (g - mean(g) - normal mean(g normal)) with g = dy weight; RMS: without mean(g)."""
    dy = dy * weight
    along = dy * normal
    if FROM_OUTPUT:  # what a weight of 0 hides counts for nothing in the sum
        along = tl.where(weight == 0.0, 0.0, along)
    dx = dy - normal * (tl.sum(along, 1) / width)[:, None]
    if not RMS:
        dx -= (tl.sum(dy, 1) / width)[:, None]
    return dx * rstd


@triton.jit
def _backward_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr,
    rows, width, dy_stride, dsum_stride, x_stride,
    RMS: tl.constexpr, FROM_OUTPUT: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, SECOND: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, EVEN: tl.constexpr, RELOAD: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    inside = columns < width
    if not RELOAD:
        weight, bias = _affine(
            weight_ptr, bias_ptr, columns, inside, HAS_WEIGHT, HAS_BIAS and FROM_OUTPUT, ZERO_CENTRED, BLOCK_N
        )
    if DWEIGHT:
        dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DBIAS:
        dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        valid = row < rows
        mask = valid[:, None]
        if not EVEN:
            mask = mask & inside[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
        mean = 0.0
        if not RMS and not FROM_OUTPUT:
            mean = tl.load(mean_ptr + row, mask=valid, other=0.0)[:, None]
        if RELOAD:
            weight, bias = _affine(
                weight_ptr, bias_ptr, columns, inside, HAS_WEIGHT, HAS_BIAS and FROM_OUTPUT, ZERO_CENTRED, BLOCK_N
            )
        normal = _normalised(x, bias[None, :], weight[None, :], mean, rstd, FROM_OUTPUT, RMS)
        if FROM_OUTPUT:
            normal = tl.where(mask, normal, 0.0)
        if DWEIGHT:
            dweight += dy * normal
        if DBIAS:
            dbias += dy
        dx = _input_gradient(dy, normal, weight[None, :], rstd, width, FROM_OUTPUT, RMS)
        if HAS_DSUM:
            source = dsum_ptr + row[:, None] * dsum_stride + columns[None, :]
            dx += tl.load(source, mask=mask, other=0.0).to(tl.float32)
        target = row[:, None] * width + columns[None, :]
        tl.store(dx_ptr + target, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if SECOND:
            tl.store(dresidual_ptr + target, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
    share = tl.program_id(0).to(tl.int64) * width + columns
    if DWEIGHT:
        tl.store(dweight_ptr + share, tl.sum(dweight, 0), mask=inside)
    if DBIAS:
        tl.store(dbias_ptr + share, tl.sum(dbias, 0), mask=inside)


@triton.jit
def _backward_apart_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr,
    rows, width, dy_stride, dsum_stride, x_stride, splits,
    RMS: tl.constexpr, FROM_OUTPUT: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, SECOND: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, BLOCK_N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    # As many rows as there are programs at a time: first one row each, its input gradient; then each program takes
    # TILE_N columns of them (or of one of `splits` parts of them). No program waits for another, since neither needs
    # what the other makes; but they run abreast, so the columns' data is still in the L2 cache.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_N)
    inside = columns < width
    chunks = tl.cdiv(width, TILE_N)
    own = (program % chunks) * TILE_N + tl.arange(0, TILE_N)
    owned = own < width
    split = program // chunks
    part = tl.cdiv(programs, splits)
    own_weight, own_bias = _affine(
        weight_ptr, bias_ptr, own, owned, HAS_WEIGHT and FROM_OUTPUT, HAS_BIAS and FROM_OUTPUT, ZERO_CENTRED and
        FROM_OUTPUT, TILE_N,
    )  # fmt: skip
    dweight = tl.zeros((TILE_M, TILE_N), tl.float32)
    dbias = tl.zeros((TILE_M, TILE_N), tl.float32)
    row = program.to(tl.int64)
    mask = columns < tl.where(row < rows, width, 0)
    next_dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0)
    next_x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    for first in range(0, rows, programs):
        row = (first + program).to(tl.int64)
        mask = columns < tl.where(row < rows, width, 0)
        dy = next_dy.to(tl.float32)[None, :]
        last = tl.minimum(row, rows - 1)
        rstd = tl.load(rstd_ptr + last)
        mean = 0.0
        if not RMS and not FROM_OUTPUT:
            mean = tl.load(mean_ptr + last)
        weight, bias = _affine(
            weight_ptr, bias_ptr, columns, inside, HAS_WEIGHT, HAS_BIAS and FROM_OUTPUT, ZERO_CENTRED, BLOCK_N
        )
        normal = _normalised(next_x.to(tl.float32), bias, weight, mean, rstd, FROM_OUTPUT, RMS)[None, :]
        if FROM_OUTPUT:
            normal = tl.where(mask[None, :], normal, 0.0)
        dx = _input_gradient(dy, normal, weight[None, :], rstd, width, FROM_OUTPUT, RMS)
        dx = tl.reshape(dx, (BLOCK_N,))
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row * dsum_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if SECOND:
            tl.store(dresidual_ptr + row * width + columns, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
        row += programs  # the next row is on its way while the columns are summed
        mask = columns < tl.where(row < rows, width, 0)
        next_dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0)
        next_x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
        end = min(first + min((split + 1) * part, programs), rows)
        if not (DWEIGHT or DBIAS):
            end = first
        for start in range(first + split * part, end, TILE_M):
            place = start + tl.arange(0, TILE_M).to(tl.int64)
            present = place < end
            tile = present[:, None] & owned[None, :]
            part_dy = tl.load(dy_ptr + place[:, None] * dy_stride + own[None, :], mask=tile, other=0.0).to(tl.float32)
            if DWEIGHT:
                part_x = tl.load(x_ptr + place[:, None] * x_stride + own[None, :], mask=tile, other=0.0)
                part_rstd = tl.load(rstd_ptr + place, mask=present, other=0.0)[:, None]
                part_mean = 0.0
                if not RMS and not FROM_OUTPUT:
                    part_mean = tl.load(mean_ptr + place, mask=present, other=0.0)[:, None]
                part_normal = _normalised(
                    part_x.to(tl.float32), own_bias[None, :], own_weight[None, :], part_mean, part_rstd, FROM_OUTPUT,
                    RMS,
                )  # fmt: skip
                if FROM_OUTPUT:
                    part_normal = tl.where(tile, part_normal, 0.0)
                dweight += part_dy * part_normal
            if DBIAS:
                dbias += part_dy
    share = split.to(tl.int64) * width + own
    owned = own < tl.where(split < splits, width, 0)
    if DWEIGHT:
        tl.store(dweight_ptr + share, tl.sum(dweight, 0), mask=owned)
    if DBIAS:
        tl.store(dbias_ptr + share, tl.sum(dbias, 0), mask=owned)


@triton.jit
def _backward_wide_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr,
    rows, width, dy_stride, dsum_stride, x_stride,
    RMS: tl.constexpr, FROM_OUTPUT: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, SECOND: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    share = first.to(tl.int64) * width
    for tile in range(first, tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        valid = row < rows
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
        mean = 0.0
        if not RMS and not FROM_OUTPUT:
            mean = tl.load(mean_ptr + row, mask=valid, other=0.0)[:, None]
        along = tl.zeros((BLOCK_M,), tl.float32)
        level = tl.zeros((BLOCK_M,), tl.float32)
        for second_pass in tl.static_range(2):
            for start in range(0, width, BLOCK_N):
                columns = start + tl.arange(0, BLOCK_N)
                inside = columns < width
                mask = valid[:, None] & inside[None, :]
                dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns[None, :], mask=mask, other=0.0)
                x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
                dy = dy.to(tl.float32)
                weight, bias = _affine(
                    weight_ptr, bias_ptr, columns, inside, HAS_WEIGHT, HAS_BIAS and FROM_OUTPUT, ZERO_CENTRED, BLOCK_N
                )
                normal = _normalised(x.to(tl.float32), bias[None, :], weight[None, :], mean, rstd, FROM_OUTPUT, RMS)
                normal = tl.where(mask, normal, 0.0)
                scaled = dy * weight[None, :]
                if second_pass == 0:
                    product = scaled * normal
                    if FROM_OUTPUT:  # what a weight of 0 hides counts for nothing in the sum
                        product = tl.where((weight == 0.0)[None, :], 0.0, product)
                    along += tl.sum(product, 1)
                    level += tl.sum(scaled, 1)
                else:
                    dx = scaled - normal * (along / width)[:, None]
                    if not RMS:
                        dx -= (level / width)[:, None]
                    dx *= rstd
                    if HAS_DSUM:
                        source = dsum_ptr + row[:, None] * dsum_stride + columns[None, :]
                        dx += tl.load(source, mask=mask, other=0.0).to(tl.float32)
                    target = row[:, None] * width + columns[None, :]
                    tl.store(dx_ptr + target, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                    if SECOND:
                        tl.store(dresidual_ptr + target, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
                    seen = columns < tl.where(first == tile, 0, width)  # the first tile begins the shares
                    if DWEIGHT:
                        so_far = tl.load(dweight_ptr + share + columns, mask=seen, other=0.0)
                        tl.store(dweight_ptr + share + columns, so_far + tl.sum(dy * normal, 0), mask=inside)
                    if DBIAS:
                        so_far = tl.load(dbias_ptr + share + columns, mask=seen, other=0.0)
                        tl.store(dbias_ptr + share + columns, so_far + tl.sum(dy, 0), mask=inside)
        tl.debug_barrier()  # the shares are read again by this program


@triton.jit
def _finish_kernel(
    dweight_ptr, dbias_ptr, weight_out_ptr, bias_out_ptr, shares, width,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, shares, BLOCK_M):
        share = start + tl.arange(0, BLOCK_M)
        mask = (share < shares)[:, None] & inside[None, :]
        source = share[:, None].to(tl.int64) * width + columns[None, :]
        if DWEIGHT:
            dweight += tl.load(dweight_ptr + source, mask=mask, other=0.0)
        if DBIAS:
            dbias += tl.load(dbias_ptr + source, mask=mask, other=0.0)
    if DWEIGHT:
        tl.store(weight_out_ptr + columns, tl.sum(dweight, 0).to(weight_out_ptr.dtype.element_ty), mask=inside)
    if DBIAS:
        tl.store(bias_out_ptr + columns, tl.sum(dbias, 0).to(bias_out_ptr.dtype.element_ty), mask=inside)


def row_of(table: tuple, width: int) -> tuple | None:
    """The first row of a tuning table for this width; None where the table ends before."""
    return next((row for row in table if width <= row[0]), None)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool,
    zero_centred: bool, y: Tensor, total: Tensor, mean: Tensor, rstd: Tensor,
) -> None:  # fmt: skip
    """Fill y (rows, width), total (same; with a residual), mean (not for RMS) and rstd (rows,); see `norm`."""
    rows, width = x.shape
    flags = {
        "RMS": rms, "HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None, "ZERO_CENTRED": zero_centred,
    }  # fmt: skip
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    arguments = (x, residual, weight, bias, y, total, mean, rstd, rows, width, *strides, eps)
    tuned = row_of(FORWARD, width)
    with device_guard(x):
        if tuned is None:
            chunk, warps = WIDE_FORWARD
            _forward_wide_kernel[(rows,)](*arguments, **flags, BLOCK_N=chunk, num_warps=warps)
            return
        _, tile, warps, per_processor, stages = tuned
        block_n = next_power_of_2(width)
        block_m = max(1, tile // block_n)
        programs = ceil_div(rows, block_m)
        if per_processor:
            programs = min(programs, per_processor * processors(x.device))
            ahead = x.element_size() + (0 if residual is None else residual.element_size())
            stages = stages_that_fit(stages, block_m * block_n * ahead, x.device)
        shape = {"EVEN": block_n == width, "STAGES": stages, "BLOCK_M": block_m, "BLOCK_N": block_n}
        _forward_kernel[(programs,)](*arguments, **flags, **shape, num_warps=warps)


def backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, rms: bool, from_output: bool, zero_centred: bool, dx: Tensor, dresidual: Tensor | None,
    dweight: Tensor | None, dbias: Tensor | None,
) -> None:  # fmt: skip
    """Fill dx and the other gradients that are given; `x` is the input, or the output where `from_output`."""
    rows, width = dy.shape
    tuned = row_of(BACKWARD, width)
    apart = row_of(APART, width) if tuned is None else None
    block_n = next_power_of_2(width)
    if apart is not None:
        _, warps, per_processor, tile_m, tile_n = apart
        chunks = ceil_div(width, tile_n)
        programs = max(chunks, per_processor * processors(dy.device))
        splits = programs // chunks
    elif tuned is None:
        block_m, block_n, warps, per_processor = WIDE_BACKWARD
    else:
        _, tile, warps, per_processor, stages, reload = tuned
        block_m = max(1, tile // block_n)
        ahead = [dy, x, *([] if dsum is None else [dsum])]  # what the next stage's loads hold in shared memory
        ahead += [t for t in (weight, bias) if reload and t is not None]
        if stages * block_m * block_n * sum(t.element_size() for t in ahead) * per_processor > shared_memory(dy.device):
            stages = 1
    if apart is None:
        programs = splits = min(ceil_div(rows, block_m), per_processor * processors(dy.device))
    shares = torch.empty((2, splits, width), dtype=torch.float32, device=dy.device)
    flags = {
        "RMS": rms, "FROM_OUTPUT": from_output, "HAS_DSUM": dsum is not None, "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None, "SECOND": dresidual is not None, "DWEIGHT": dweight is not None,
        "DBIAS": dbias is not None, "ZERO_CENTRED": zero_centred, "BLOCK_N": block_n,
    }  # fmt: skip
    strides = (dy.stride(0), 0 if dsum is None else dsum.stride(0), x.stride(0))
    arguments = (dy, dsum, x, weight, bias, mean, rstd, dx, dresidual, shares[0], shares[1], rows, width, *strides)
    with device_guard(dy):
        if apart is not None:
            _backward_apart_kernel[(programs,)](
                *arguments, splits, **flags, TILE_M=tile_m, TILE_N=tile_n, num_warps=warps,
                enable_fp_fusion=False,  # g - mean(g) is exact in a row of one element
            )  # fmt: skip
        elif tuned is None:
            _backward_wide_kernel[(programs,)](*arguments, **flags, BLOCK_M=block_m, num_warps=warps)
        else:
            _backward_kernel[(programs,)](
                *arguments, **flags, EVEN=block_n == width, RELOAD=reload, STAGES=stages, BLOCK_M=block_m,
                num_warps=warps,
            )  # fmt: skip
        if dweight is not None or dbias is not None:
            _, block_m, block_n, warps = row_of(FINISH, width)
            _finish_kernel[(ceil_div(width, block_n),)](
                shares[0], shares[1], dweight, dbias, splits, width, DWEIGHT=dweight is not None,
                DBIAS=dbias is not None, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
            )  # fmt: skip
