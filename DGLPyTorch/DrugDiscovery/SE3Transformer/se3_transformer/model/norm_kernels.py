"""Triton kernels of NormSE3: the norms of features are normalised over channels, their directions kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, N, channels, eps, clamp,
    DIM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0) * BN + tl.arange(0, BN)
    channel = tl.arange(0, BC)
    valid = channel < channels
    mask = (node < N)[:, None] & valid[None, :]
    place = (node.to(tl.int64)[:, None] * channels + channel[None, :]) * DIM
    square = tl.zeros((BN, BC), tl.float32)
    for component in tl.static_range(DIM):
        value = tl.load(x_ptr + place + component, mask=mask, other=0.0).to(tl.float32)
        square += value * value
    length = tl.sqrt(tl.maximum(square, clamp * clamp))
    mean = tl.sum(tl.where(valid[None, :], length, 0.0), 1) / channels
    deviation = tl.where(valid[None, :], length - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(deviation * deviation, 1) / channels + eps)
    weight = tl.load(weight_ptr + channel, mask=valid, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=valid, other=0.0)
    factor = tl.maximum(deviation * rstd[:, None] * weight[None, :] + bias[None, :], 0.0) / length
    for component in tl.static_range(DIM):
        value = tl.load(x_ptr + place + component, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + place + component, (value * factor).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, dx_ptr, part_ptr, N, channels, eps, clamp,
    DIM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0) * BN + tl.arange(0, BN)
    channel = tl.arange(0, BC)
    valid = channel < channels
    mask = (node < N)[:, None] & valid[None, :]
    place = (node.to(tl.int64)[:, None] * channels + channel[None, :]) * DIM
    square = tl.zeros((BN, BC), tl.float32)
    inner = tl.zeros((BN, BC), tl.float32)  # <dy, x>
    for component in tl.static_range(DIM):
        value = tl.load(x_ptr + place + component, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(dy_ptr + place + component, mask=mask, other=0.0).to(tl.float32)
        square += value * value
        inner += value * slope
    above = square > clamp * clamp
    length = tl.sqrt(tl.maximum(square, clamp * clamp))
    mean = tl.sum(tl.where(valid[None, :], length, 0.0), 1) / channels
    deviation = tl.where(valid[None, :], length - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(deviation * deviation, 1) / channels + eps)
    weight = tl.load(weight_ptr + channel, mask=valid, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=valid, other=0.0)
    scaled = deviation * rstd[:, None]
    new = tl.maximum(scaled * weight[None, :] + bias[None, :], 0.0)
    # y = x * new(length) / length: first through new, then through the two lengths.
    dnew = tl.where(mask & (new > 0), inner / length, 0.0)
    dscaled = dnew * weight[None, :]
    centred = (
        dscaled - (tl.sum(dscaled, 1) / channels)[:, None] - scaled * (tl.sum(dscaled * scaled, 1) / channels)[:, None]
    )
    dlength = rstd[:, None] * centred - inner * new / (length * length)
    along = tl.where(above & mask, dlength / length, 0.0)
    for component in tl.static_range(DIM):
        value = tl.load(x_ptr + place + component, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(dy_ptr + place + component, mask=mask, other=0.0).to(tl.float32)
        slope = slope * new / length + along * value
        tl.store(dx_ptr + place + component, slope.to(dx_ptr.dtype.element_ty), mask=mask)
    target = part_ptr + tl.program_id(0) * 2 * channels + channel
    tl.store(target, tl.sum(dnew * scaled, 0), mask=valid)
    tl.store(target + channels, tl.sum(dnew, 0), mask=valid)


def _norm_tiles(channels: int) -> tuple[int, int]:
    wide = triton.next_power_of_2(channels)
    return max(1, 1024 // wide), wide


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, clamp: float) -> Tensor:
    """``x / |x| * relu(layer_norm(|x|))`` for x (N, C, DIM), statistics over C."""
    nodes, channels, dim = x.shape
    y = torch.empty_like(x)
    tile, wide = _norm_tiles(channels)
    if nodes:
        _norm_forward_kernel[(triton.cdiv(nodes, tile),)](
            x, weight, bias, y, nodes, channels, eps, clamp, DIM=dim, BN=tile, BC=wide
        )
    return y


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, clamp: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    nodes, channels, dim = x.shape
    tile, wide = _norm_tiles(channels)
    programs = triton.cdiv(nodes, tile)
    dx = torch.empty_like(x)
    parts = x.new_empty(programs, 2, channels, dtype=torch.float32)
    if nodes:
        _norm_backward_kernel[(programs,)](
            dy, x, weight, bias, dx, parts, nodes, channels, eps, clamp, DIM=dim, BN=tile, BC=wide
        )
    sums = parts.sum(0)
    return dx, sums[0], sums[1]
