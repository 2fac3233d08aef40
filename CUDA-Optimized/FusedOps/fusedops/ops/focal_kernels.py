"""Triton kernels of `focal`: losses of (rows, classes) logits as sums per program, and their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2, processors

TILE = (2048, 512, 4)  # elements in a tile, the most classes in it, warps
PROGRAMS = 8  # per multiprocessor, for the sums


@triton.jit
def _terms(x, positive, alpha, gamma, smoothing):
    """Loss and derivative of every element; (1 - p_t)^gamma is exp(gamma log(1 - p_t)), without cancellation."""
    gate = tl.sigmoid(x)
    tail = tl.log(1.0 + tl.exp(-tl.abs(x)))
    softplus = tl.maximum(x, 0.0) + tail
    label = tl.where(positive, 1.0 - 0.5 * smoothing, 0.5 * smoothing)
    cross = softplus - label * x
    log_miss = tl.where(positive, -softplus, x - softplus)
    focus = tl.where(positive, alpha, 1.0 - alpha) * tl.exp(gamma * log_miss)
    slope = gate - label + gamma * cross * tl.where(positive, -gate, 1.0 - gate)
    return focus * cross, focus * slope


@triton.jit
def _loss_kernel(
    x_ptr, target_ptr, share_ptr, rows, width, classes, x_stride, alpha, gamma, smoothing,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        target = tl.load(target_ptr + row, mask=row < rows, other=-2)[:, None]
        for start in range(0, classes, BLOCK_N):
            column = (start + tl.arange(0, BLOCK_N))[None, :]
            mask = (target != -2) & (column < classes)
            x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=mask, other=0.0).to(tl.float32)
            loss, _ = _terms(x, column == target, alpha, gamma, smoothing)
            total += tl.where(mask, loss, 0.0)
    tl.store(share_ptr + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _gradient_kernel(
    factor_ptr, x_ptr, target_ptr, dx_ptr, rows, width, classes, x_stride, alpha, gamma, smoothing,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    target = tl.load(target_ptr + row, mask=row < rows, other=-2)[:, None]
    mask = (target != -2) & (column < classes)
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    _, slope = _terms(x, column == target, alpha, gamma, smoothing)
    dx = tl.where(mask, slope * tl.load(factor_ptr), 0.0)
    target_ptr = dx_ptr + row[:, None] * width + column
    tl.store(target_ptr, dx.to(dx_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < width))


def _tile(rows: int, width: int) -> tuple[int, int, int]:
    elements, columns, warps = TILE
    block_n = min(next_power_of_2(width), columns)
    return max(1, min(elements // block_n, next_power_of_2(rows))), block_n, warps


def loss(x: Tensor, target: Tensor, classes: int, alpha: float, gamma: float, smoothing: float) -> Tensor:
    """Shares of the sum of all losses, float32, one per program."""
    rows, width = x.shape
    block_m, block_n, warps = _tile(rows, width)
    programs = min(ceil_div(rows, block_m), PROGRAMS * processors(x.device))
    shares = torch.empty(programs, dtype=torch.float32, device=x.device)
    with device_guard(x):
        _loss_kernel[(programs,)](
            x, target, shares, rows, width, classes, x.stride(0), alpha, gamma, smoothing, BLOCK_M=block_m,
            BLOCK_N=block_n, num_warps=warps,
        )  # fmt: skip
    return shares


def gradient(
    factor: Tensor, x: Tensor, target: Tensor, dx: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> None:
    """Fill dx with the gradient of the sum times `factor`, one float32 element on the device."""
    rows, width = x.shape
    block_m, block_n, warps = _tile(rows, width)
    with device_guard(x):
        _gradient_kernel[(ceil_div(rows, block_m), ceil_div(width, block_n))](
            factor, x, target, dx, rows, width, classes, x.stride(0), alpha, gamma, smoothing, BLOCK_M=block_m,
            BLOCK_N=block_n, num_warps=warps,
        )  # fmt: skip
