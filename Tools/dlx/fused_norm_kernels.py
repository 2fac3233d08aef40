"""Triton kernels of ``fused_norm`` and the functions that launch them.

All sums are taken in float32 over deviations from the first row (``x - x[0]``), which keeps the one-pass variance
accurate when a channel's mean is large against its spread; partial sums are written per program and combined by a
second small kernel, so results do not depend on scheduling. Statistics are passed around as one float32
tensor of shape (4, C): mean, rstd, scale, shift, with ``norm(x) = x * scale + shift``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per tile, warps per program and programs per multiprocessor, chosen by a sweep on an H200.
STATISTICS = (8192, 4, 4)
REDUCE = (2048, 4, 4)
FORWARD = (4096, 4)
BACKWARD = (4096, 4)
MAX_BLOCK_C = 256


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiling(rows: int, channels: int, device: torch.device, tile: int, per_processor: int) -> tuple[int, ...]:
    """(BLOCK_M, BLOCK_C, programs along M, rows per program) for a reduction that fills the GPU once."""
    block_c = min(channels, MAX_BLOCK_C)
    block_m = tile // block_c
    column_blocks = channels // block_c
    wanted = max(1, _processors(device.index or 0) * per_processor // column_blocks)
    per_program = triton.cdiv(triton.cdiv(rows, wanted), block_m) * block_m
    return block_m, block_c, triton.cdiv(rows, per_program), per_program


def _rows_channels(x: Tensor) -> tuple[int, int]:
    return x.shape[0] * x.shape[2] * x.shape[3], x.shape[1]


@triton.jit
def _statistics_kernel(x_ptr, partial_ptr, M, C, per_program, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    start = tl.program_id(0) * per_program
    end = min(start + per_program, M)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    origin = tl.load(x_ptr + columns).to(tl.float32)
    first = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for row in range(start, end, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None]
        value = tl.load(x_ptr + rows[:, None] * C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, value - origin[None, :], 0.0)
        first += deviation
        second += deviation * deviation
    target = partial_ptr + tl.program_id(0) * 2 * C + columns
    tl.store(target, tl.sum(first, 0))
    tl.store(target + C, tl.sum(second, 0))


@triton.jit
def _finish_statistics_kernel(
    x_ptr, partial_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, stats_ptr,
    M, C, parts, eps, momentum, TRACKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    first = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for part in range(0, parts, BLOCK_P):
        index = part + tl.arange(0, BLOCK_P)
        valid = (index < parts)[:, None] & inside[None, :]
        source = partial_ptr + index[:, None] * 2 * C + columns[None, :]
        first += tl.load(source, mask=valid, other=0.0)
        second += tl.load(source + C, mask=valid, other=0.0)
    offset = tl.sum(first, 0) / M
    mean = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    variance = tl.maximum(tl.sum(second, 0) / M - offset * offset, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(weight_ptr + columns, mask=inside) * rstd
    shift = tl.load(bias_ptr + columns, mask=inside) - mean * scale
    tl.store(stats_ptr + columns, mean, mask=inside)
    tl.store(stats_ptr + C + columns, rstd, mask=inside)
    tl.store(stats_ptr + 2 * C + columns, scale, mask=inside)
    tl.store(stats_ptr + 3 * C + columns, shift, mask=inside)
    if TRACKS:
        old_mean = tl.load(running_mean_ptr + columns, mask=inside)
        old_var = tl.load(running_var_ptr + columns, mask=inside)
        unbiased = variance * (M / (M - 1.0))
        tl.store(running_mean_ptr + columns, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(running_var_ptr + columns, old_var + momentum * (unbiased - old_var), mask=inside)
        if tl.program_id(0) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


def batch_statistics(x: Tensor, norm) -> Tensor:
    """(mean, rstd, scale, shift) of a map; moves the norm's running statistics as ``nn.BatchNorm2d`` does."""
    rows, channels = _rows_channels(x)
    tile, warps, per_processor = STATISTICS
    block_m, block_c, parts, per_program = _tiling(rows, channels, x.device, tile, per_processor)
    partial = torch.empty(parts, 2, channels, device=x.device, dtype=torch.float32)
    _statistics_kernel[(parts, channels // block_c)](
        x, partial, rows, channels, per_program, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=warps
    )
    stats = torch.empty(4, channels, device=x.device, dtype=torch.float32)
    tracks = norm.track_running_stats and norm.running_mean is not None
    _finish_statistics_kernel[(triton.cdiv(channels, 16),)](
        x, partial, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, stats,
        rows, channels, parts, norm.eps, norm.momentum, TRACKS=tracks, BLOCK_P=256, BLOCK_C=16, num_warps=8,
    )  # fmt: skip
    return stats


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, y_ptr, stats_ptr, branch_stats_ptr, M, C,
    RESIDUAL: tl.constexpr, BRANCH: tl.constexpr, RELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # The last rows were read last by the statistics kernel and may still be in the L2 cache: take them first.
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < M)[:, None]
    offsets = rows[:, None] * C + columns[None, :]
    scale = tl.load(stats_ptr + 2 * C + columns)[None, :]
    shift = tl.load(stats_ptr + 3 * C + columns)[None, :]
    value = tl.load(x_ptr + offsets, mask=inside).to(tl.float32) * scale + shift
    if RESIDUAL:
        other = tl.load(residual_ptr + offsets, mask=inside).to(tl.float32)
        if BRANCH:
            branch_scale = tl.load(branch_stats_ptr + 2 * C + columns)[None, :]
            branch_shift = tl.load(branch_stats_ptr + 3 * C + columns)[None, :]
            other = other * branch_scale + branch_shift
        value += other
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y_ptr + offsets, value.to(y_ptr.dtype.element_ty), mask=inside)


def apply_forward(x: Tensor, stats, residual: Tensor | None, branch_stats, relu: bool) -> Tensor:
    rows, channels = _rows_channels(x)
    y = torch.empty_like(x)
    block_c = min(channels, MAX_BLOCK_C)
    tile, warps = FORWARD
    block_m = tile // block_c
    _forward_kernel[(triton.cdiv(rows, block_m), channels // block_c)](
        x, residual, y, stats, branch_stats, rows, channels,
        RESIDUAL=residual is not None, BRANCH=branch_stats is not None, RELU=relu,
        BLOCK_M=block_m, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return y


@triton.jit
def _reduce_kernel(
    grad_ptr, grad2_ptr, x_ptr, y_ptr, branch_ptr, out_ptr, stats_ptr, branch_stats_ptr, partial_ptr,
    M, C, per_program, TWO: tl.constexpr, RELU: tl.constexpr, MASK_FROM_Y: tl.constexpr, BRANCH: tl.constexpr,
    STORES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * per_program
    end = min(start + per_program, M)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = tl.load(stats_ptr + columns)[None, :]
    scale = tl.load(stats_ptr + 2 * C + columns)[None, :]
    shift = tl.load(stats_ptr + 3 * C + columns)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    branch_product = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for row in range(start, end, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None]
        offsets = rows[:, None] * C + columns[None, :]
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(grad2_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            if MASK_FROM_Y:
                positive = tl.load(y_ptr + offsets, mask=inside, other=0.0).to(tl.float32) > 0
            else:
                positive = x * scale + shift > 0
            grad = tl.where(positive, grad, 0.0)
        if STORES:
            stored = grad.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + offsets, stored, mask=inside)
            grad = stored.to(tl.float32)  # the sums must be those of what the second pass reads
        total += grad
        product += grad * (x - mean)
        if BRANCH:
            branch_mean = tl.load(branch_stats_ptr + columns)[None, :]
            branch = tl.load(branch_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            branch_product += grad * (branch - branch_mean)
    target = partial_ptr + tl.program_id(0) * 3 * C + columns
    tl.store(target, tl.sum(total, 0))
    tl.store(target + C, tl.sum(product, 0))
    if BRANCH:
        tl.store(target + 2 * C, tl.sum(branch_product, 0))


@triton.jit
def _finish_reduce_kernel(
    partial_ptr, stats_ptr, branch_stats_ptr, sums_ptr, coefficients_ptr, M, C, parts,
    BRANCH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Parameter gradients, and (a, b, c) with ``grad_x = a * grad + b * x + c``, for the main norm and the branch."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    branch_product = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for part in range(0, parts, BLOCK_P):
        index = part + tl.arange(0, BLOCK_P)
        valid = (index < parts)[:, None] & inside[None, :]
        source = partial_ptr + index[:, None] * 3 * C + columns[None, :]
        total += tl.load(source, mask=valid, other=0.0)
        product += tl.load(source + C, mask=valid, other=0.0)
        if BRANCH:
            branch_product += tl.load(source + 2 * C, mask=valid, other=0.0)
    grad_bias = tl.sum(total, 0)
    mean = tl.load(stats_ptr + columns, mask=inside)
    rstd = tl.load(stats_ptr + C + columns, mask=inside)
    scale = tl.load(stats_ptr + 2 * C + columns, mask=inside)
    grad_weight = tl.sum(product, 0) * rstd
    slope = -scale * rstd * grad_weight / M
    tl.store(sums_ptr + columns, grad_weight, mask=inside)
    tl.store(sums_ptr + C + columns, grad_bias, mask=inside)
    tl.store(coefficients_ptr + columns, scale, mask=inside)
    tl.store(coefficients_ptr + C + columns, slope, mask=inside)
    tl.store(coefficients_ptr + 2 * C + columns, -scale * grad_bias / M - slope * mean, mask=inside)
    if BRANCH:
        mean = tl.load(branch_stats_ptr + columns, mask=inside)
        rstd = tl.load(branch_stats_ptr + C + columns, mask=inside)
        scale = tl.load(branch_stats_ptr + 2 * C + columns, mask=inside)
        grad_weight = tl.sum(branch_product, 0) * rstd
        slope = -scale * rstd * grad_weight / M
        tl.store(sums_ptr + 2 * C + columns, grad_weight, mask=inside)
        tl.store(sums_ptr + 3 * C + columns, grad_bias, mask=inside)
        tl.store(coefficients_ptr + 3 * C + columns, scale, mask=inside)
        tl.store(coefficients_ptr + 4 * C + columns, slope, mask=inside)
        tl.store(coefficients_ptr + 5 * C + columns, -scale * grad_bias / M - slope * mean, mask=inside)


def reduce_backward(grad, grad2, x, y, branch_x, stats, branch_stats, *, relu: bool, stores: bool):
    """First backward pass: (gradient for the second pass, sums (4, C), coefficients (6, C)).

    The gradient is masked and summed over both consumers when ``stores``, else ``grad`` itself. Sums are the gradients
    of weight and bias of the norm and of the branch's norm.
    """
    rows, channels = _rows_channels(x)
    tile, warps, per_processor = REDUCE
    block_m, block_c, parts, per_program = _tiling(rows, channels, x.device, tile, per_processor)
    branch = branch_x is not None
    out = torch.empty_like(x) if stores else grad
    partial = torch.empty(parts, 3, channels, device=x.device, dtype=torch.float32)
    _reduce_kernel[(parts, channels // block_c)](
        grad, grad2, x, y, branch_x, out, stats, branch_stats, partial, rows, channels, per_program,
        TWO=grad2 is not None, RELU=relu, MASK_FROM_Y=y is not None, BRANCH=branch, STORES=stores,
        BLOCK_M=block_m, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return out, *_finish_reduce(partial, stats, branch_stats, rows, channels, parts)


def _finish_reduce(partial, stats, branch_stats, rows, channels, parts):
    sums = torch.empty(4, channels, device=partial.device, dtype=torch.float32)
    coefficients = torch.empty(6, channels, device=partial.device, dtype=torch.float32)
    _finish_reduce_kernel[(triton.cdiv(channels, 16),)](
        partial, stats, branch_stats, sums, coefficients, rows, channels, parts,
        BRANCH=branch_stats is not None, BLOCK_P=256, BLOCK_C=16, num_warps=8,
    )  # fmt: skip
    return sums, coefficients


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, branch_ptr, grad_x_ptr, grad_branch_ptr, stats_ptr, coefficients_ptr, M, C,
    RELU: tl.constexpr, BRANCH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < M)[:, None]
    offsets = rows[:, None] * C + columns[None, :]
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    if RELU:
        scale = tl.load(stats_ptr + 2 * C + columns)[None, :]
        shift = tl.load(stats_ptr + 3 * C + columns)[None, :]
        grad = tl.where(x * scale + shift > 0, grad, 0.0)
    a = tl.load(coefficients_ptr + columns)[None, :]
    b = tl.load(coefficients_ptr + C + columns)[None, :]
    c = tl.load(coefficients_ptr + 2 * C + columns)[None, :]
    tl.store(grad_x_ptr + offsets, (a * grad + b * x + c).to(grad_x_ptr.dtype.element_ty), mask=inside)
    if BRANCH:
        branch = tl.load(branch_ptr + offsets, mask=inside).to(tl.float32)
        a = tl.load(coefficients_ptr + 3 * C + columns)[None, :]
        b = tl.load(coefficients_ptr + 4 * C + columns)[None, :]
        c = tl.load(coefficients_ptr + 5 * C + columns)[None, :]
        value = a * grad + b * branch + c
        tl.store(grad_branch_ptr + offsets, value.to(grad_branch_ptr.dtype.element_ty), mask=inside)


def apply_backward(grad, x, branch_x, stats, coefficients, *, relu: bool) -> tuple[Tensor, Tensor | None]:
    """Second backward pass: the gradients of ``x`` and of the branch's input."""
    rows, channels = _rows_channels(x)
    grad_x = torch.empty_like(x)
    grad_branch = torch.empty_like(x) if branch_x is not None else None
    block_c = min(channels, MAX_BLOCK_C)
    tile, warps = BACKWARD
    block_m = tile // block_c
    _backward_kernel[(triton.cdiv(rows, block_m), channels // block_c)](
        grad, x, branch_x, grad_x, grad_branch, stats, coefficients, rows, channels,
        RELU=relu, BRANCH=branch_x is not None, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return grad_x, grad_branch


@triton.jit
def _pool_forward_kernel(
    x_ptr, y_ptr, winner_ptr, stats_ptr, H, W, OUT_H, OUT_W, C,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One output row of one image: the largest of nine normalised, rectified values, and which of them it was."""
    image, out_row = tl.program_id(0) // OUT_H, tl.program_id(0) % OUT_H
    out_columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    scale = tl.load(stats_ptr + 2 * C + channels)[None, :]
    shift = tl.load(stats_ptr + 3 * C + channels)[None, :]
    best = tl.full((BLOCK_W, BLOCK_C), -1.0, tl.float32)  # below every rectified value
    winner = tl.zeros((BLOCK_W, BLOCK_C), tl.int8)
    for tap in tl.static_range(9):
        columns = out_columns * 2 - 1 + tap % 3
        row = tl.zeros_like(columns) + (out_row * 2 - 1 + tap // 3)
        inside = ((row >= 0) & (row < H) & (columns >= 0) & (columns < W) & (out_columns < OUT_W))[:, None]
        offsets = ((image * H + row) * W + columns)[:, None] * C + channels[None, :]
        value = tl.maximum(tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * scale + shift, 0.0)
        # Compare what the unfused chain would have stored, so that ties fall the same way.
        value = tl.where(inside, value.to(y_ptr.dtype.element_ty).to(tl.float32), -1.0)
        better = value > best
        best = tl.where(better, value, best)
        winner = tl.where(better, tap, winner).to(tl.int8)
    offsets = ((image * OUT_H + out_row) * OUT_W + out_columns[:, None]) * C + channels[None, :]
    inside = (out_columns < OUT_W)[:, None]
    tl.store(y_ptr + offsets, best.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(winner_ptr + offsets, winner, mask=inside)


@triton.jit
def _pool_gradient(
    grad_ptr, winner_ptr, image, row, columns, channels, valid, OUT_H, OUT_W, C,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradient at input positions (row, columns): the sum over the at most four windows that chose them."""
    total = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    for window in tl.static_range(4):
        out_row = tl.zeros_like(columns) + (row // 2 + window // 2)
        out_columns = columns // 2 + window % 2
        tap_row = row - (out_row * 2 - 1)
        tap_columns = columns - (out_columns * 2 - 1)
        inside = (tap_row >= 0) & (out_row < OUT_H) & (tap_columns >= 0) & (out_columns < OUT_W) & valid
        offsets = ((image * OUT_H + out_row) * OUT_W + out_columns)[:, None] * C + channels[None, :]
        chosen = tl.load(winner_ptr + offsets, mask=inside[:, None], other=-1).to(tl.int32)
        grad = tl.load(grad_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
        total += tl.where(chosen == (tap_row * 3 + tap_columns)[:, None], grad, 0.0)
    return total


@triton.jit
def _pool_reduce_kernel(
    grad_ptr, winner_ptr, x_ptr, stats_ptr, partial_ptr, lines, per_program, H, W, OUT_H, OUT_W, C,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = tl.load(stats_ptr + channels)[None, :]
    scale = tl.load(stats_ptr + 2 * C + channels)[None, :]
    shift = tl.load(stats_ptr + 3 * C + channels)[None, :]
    total = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    start = tl.program_id(0) * per_program
    for line in range(start, min(start + per_program, lines)):
        image, row = line // H, line % H
        for base in range(0, W, BLOCK_W):
            columns = base + tl.arange(0, BLOCK_W)
            valid = columns < W
            grad = _pool_gradient(
                grad_ptr, winner_ptr, image, row, columns, channels, valid, OUT_H, OUT_W, C, BLOCK_W, BLOCK_C
            )
            offsets = (line * W + columns[:, None]) * C + channels[None, :]
            x = tl.load(x_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
            grad = tl.where((x * scale + shift > 0) & valid[:, None], grad, 0.0)
            total += grad
            product += grad * (x - mean)
    target = partial_ptr + tl.program_id(0) * 3 * C + channels
    tl.store(target, tl.sum(total, 0))
    tl.store(target + C, tl.sum(product, 0))


@triton.jit
def _pool_backward_kernel(
    grad_ptr, winner_ptr, x_ptr, grad_x_ptr, stats_ptr, coefficients_ptr, H, W, OUT_H, OUT_W, C,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = columns < W
    grad = _pool_gradient(
        grad_ptr, winner_ptr, line // H, line % H, columns, channels, valid, OUT_H, OUT_W, C, BLOCK_W, BLOCK_C
    )
    offsets = (line * W + columns[:, None]) * C + channels[None, :]
    x = tl.load(x_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
    scale = tl.load(stats_ptr + 2 * C + channels)[None, :]
    shift = tl.load(stats_ptr + 3 * C + channels)[None, :]
    grad = tl.where(x * scale + shift > 0, grad, 0.0)
    a = tl.load(coefficients_ptr + channels)[None, :]
    b = tl.load(coefficients_ptr + C + channels)[None, :]
    c = tl.load(coefficients_ptr + 2 * C + channels)[None, :]
    tl.store(grad_x_ptr + offsets, (a * grad + b * x + c).to(grad_x_ptr.dtype.element_ty), mask=valid[:, None])


def _pooled_size(size: int) -> int:
    return (size - 1) // 2 + 1


def pool_forward(x: Tensor, stats) -> tuple[Tensor, Tensor]:
    """The pooled map and, per element, the index 0-8 of the window position it came from."""
    batch, channels, height, width = x.shape
    out_h, out_w = _pooled_size(height), _pooled_size(width)
    pooled = torch.empty(
        batch, channels, out_h, out_w, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    winner = torch.empty_like(pooled, dtype=torch.int8)
    block_c, block_w = min(channels, 64), 32
    _pool_forward_kernel[(batch * out_h, triton.cdiv(out_w, block_w), channels // block_c)](
        x, pooled, winner, stats, height, width, out_h, out_w, channels,
        BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return pooled, winner


def pool_backward(grad: Tensor, winner: Tensor, x: Tensor, stats) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the map, the norm's weight and its bias."""
    batch, channels, height, width = x.shape
    out_h, out_w = grad.shape[2:]
    block_c, block_w = min(channels, 64), 32
    lines = batch * height
    per_program = triton.cdiv(lines, _processors(x.device.index or 0) * 8)
    parts = triton.cdiv(lines, per_program)
    partial = torch.empty(parts, 3, channels, device=x.device, dtype=torch.float32)
    _pool_reduce_kernel[(parts, channels // block_c)](
        grad, winner, x, stats, partial, lines, per_program, height, width, out_h, out_w, channels,
        BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    sums, coefficients = _finish_reduce(partial, stats, None, batch * height * width, channels, parts)
    grad_x = torch.empty_like(x)
    _pool_backward_kernel[(lines, triton.cdiv(width, block_w), channels // block_c)](
        grad, winner, x, grad_x, stats, coefficients, height, width, out_h, out_w, channels,
        BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return grad_x, sums[0], sums[1]
