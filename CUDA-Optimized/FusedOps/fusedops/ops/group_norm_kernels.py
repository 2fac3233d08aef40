"""Triton kernels of `groupnorm` over (images, pixels, channels) tensors: group norm and an activation.

Where a group of an image fits into registers, one program does all of it: one read, one write. Else three launches:
sums of every channel over chunks of pixels, statistics of the groups from them, and the result. The second read comes
from the L2 cache for pictures of usual sizes. The backward pass has the same two forms. No atomics: the sums are
combined in a fixed order. One-pass sums are taken of deviations from the channel's first pixel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2, processors
from .activation_kernels import activate, activate_and_derive

WHOLE_FORWARD = 16384  # elements of a group that fit into registers
WHOLE_BACKWARD = 8192
WHOLE_WARPS = ((2048, 4), (4096, 8), (8192, 16), (1 << 30, 32))  # (up to so many elements, warps)
CHANNELS = 128  # the most channels in a tile
PARTIAL = (4096, 8, 4)  # elements in a tile, warps, programs per multiprocessor
APPLY = (4096, 8)
APPLY_BACKWARD = (2048, 4)
STATISTICS_TILE = 1024  # sums in a tile of the combining kernels


@triton.jit
def _whole_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, pixels, channels, groups, size, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    pixel = tl.arange(0, BLOCK_P)
    inner = tl.arange(0, BLOCK_C)
    channel = group * size + inner
    mask = (pixel < pixels)[:, None] & (inner < size)[None, :]
    offset = image.to(tl.int64) * pixels * channels + pixel[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    count = pixels * size
    mean = tl.sum(tl.sum(x, 1), 0) / count
    y = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(y * y, 1), 0) / count + eps)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    y *= rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + channel, mask=inner < size, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=inner < size, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offset, activate(y, KIND).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _whole_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, sum_ptr, pixels, channels, groups, size,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    pixel = tl.arange(0, BLOCK_P)
    inner = tl.arange(0, BLOCK_C)
    channel = group * size + inner
    mask = (pixel < pixels)[:, None] & (inner < size)[None, :]
    offset = image.to(tl.int64) * pixels * channels + pixel[:, None] * channels + channel[None, :]
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + tl.program_id(0))
    normal = tl.where(mask, (x - tl.load(mean_ptr + tl.program_id(0))) * rstd, 0.0)
    weight = tl.full((BLOCK_C,), 1.0, tl.float32)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + channel, mask=inner < size, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=inner < size, other=0.0).to(tl.float32)
    _, slope = activate_and_derive(normal * weight[None, :] + bias[None, :], KIND)
    dz = dy * slope
    level = tl.sum(dz, 0)
    along = tl.sum(dz * normal, 0)
    target = sum_ptr + image.to(tl.int64) * 2 * channels + channel
    tl.store(target, level, mask=inner < size)
    tl.store(target + channels, along, mask=inner < size)
    count = pixels * size
    mean_level = tl.sum(level * weight, 0) / count
    mean_along = tl.sum(along * weight, 0) / count
    dx = rstd * (dz * weight[None, :] - mean_level - normal * mean_along)
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _partial_kernel(x_ptr, partial_ptr, pixels, channels, per_chunk, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    image = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    x_ptr += image * pixels * channels
    origin = tl.load(x_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    end = tl.minimum((chunk + 1) * per_chunk, pixels)
    for start in range(chunk * per_chunk, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (pixel < end)[:, None] & inside[None, :]
        x = tl.load(x_ptr + pixel[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, x - origin[None, :], 0.0)
        first += deviation
        second += deviation * deviation
    target = partial_ptr + (image * tl.num_programs(0) + chunk) * 2 * channels + channel
    tl.store(target, tl.sum(first, 0), mask=inside)
    tl.store(target + channels, tl.sum(second, 0), mask=inside)


@triton.jit
def _statistics_kernel(
    x_ptr, partial_ptr, mean_ptr, rstd_ptr, chunks, pixels, channels, groups, size, eps,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = (tl.program_id(0) // groups).to(tl.int64)
    inner = tl.arange(0, BLOCK_C)
    inside = inner < size
    channel = (tl.program_id(0) % groups) * size + inner
    first = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for start in range(0, chunks, BLOCK_K):
        chunk = start + tl.arange(0, BLOCK_K)
        mask = (chunk < chunks)[:, None] & inside[None, :]
        source = partial_ptr + (image * chunks + chunk[:, None]) * 2 * channels + channel[None, :]
        first += tl.load(source, mask=mask, other=0.0)
        second += tl.load(source + channels, mask=mask, other=0.0)
    # Of each channel: mean and sum of squared deviations; then those of the group.
    offset = tl.sum(first, 0) / pixels
    origin = tl.load(x_ptr + image * pixels * channels + channel, mask=inside, other=0.0).to(tl.float32)
    own_mean = tl.where(inside, origin + offset, 0.0)
    own_spread = tl.sum(second, 0) - offset * offset * pixels
    mean = tl.sum(own_mean, 0) / size
    deviation = tl.where(inside, own_mean - mean, 0.0)
    spread = tl.sum(own_spread, 0) + pixels * tl.sum(deviation * deviation, 0)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(rstd_ptr + tl.program_id(0), tl.rsqrt(tl.maximum(spread, 0.0) / size / pixels + eps))


@triton.jit
def _apply_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, pixels, channels, groups, size,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    mask = (pixel < pixels)[:, None] & inside[None, :]
    place = image * groups + channel // size
    scale = tl.load(rstd_ptr + place, mask=inside, other=0.0)
    if HAS_WEIGHT:
        scale *= tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + place, mask=inside, other=0.0)
    offset = (image * pixels + pixel[:, None]) * channels + channel[None, :]
    y = (tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offset, activate(y, KIND).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _derivative(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, image, offset, mask, channel, inside, groups, size,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dz (the gradient before the activation), the normalised input, weight and rstd of a tile."""
    place = image * groups + channel // size
    rstd = tl.load(rstd_ptr + place, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + place, mask=inside, other=0.0)
    weight = tl.full((BLOCK_C,), 1.0, tl.float32)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    normal = (x - mean[None, :]) * rstd[None, :]
    _, slope = activate_and_derive(normal * weight[None, :] + bias[None, :], KIND)
    return dy * slope, normal, weight, rstd


@triton.jit
def _partial_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, partial_ptr, pixels, channels, groups, size, per_chunk,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    level = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    along = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    end = tl.minimum((chunk + 1) * per_chunk, pixels)
    for start in range(chunk * per_chunk, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (pixel < end)[:, None] & inside[None, :]
        offset = (image * pixels + pixel[:, None]) * channels + channel[None, :]
        dz, normal, _, _ = _derivative(
            dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, image, offset, mask, channel, inside, groups, size,
            HAS_WEIGHT, HAS_BIAS, KIND, BLOCK_C,
        )  # fmt: skip
        level += dz
        along += dz * normal
    target = partial_ptr + (image * tl.num_programs(0) + chunk) * 2 * channels + channel
    tl.store(target, tl.sum(level, 0), mask=inside)
    tl.store(target + channels, tl.sum(along, 0), mask=inside)


@triton.jit
def _terms_kernel(
    partial_ptr, weight_ptr, sum_ptr, term_ptr, chunks, pixels, channels, groups, size,
    HAS_WEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = (tl.program_id(0) // groups).to(tl.int64)
    inner = tl.arange(0, BLOCK_C)
    inside = inner < size
    channel = (tl.program_id(0) % groups) * size + inner
    level = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    along = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for start in range(0, chunks, BLOCK_K):
        chunk = start + tl.arange(0, BLOCK_K)
        mask = (chunk < chunks)[:, None] & inside[None, :]
        source = partial_ptr + (image * chunks + chunk[:, None]) * 2 * channels + channel[None, :]
        level += tl.load(source, mask=mask, other=0.0)
        along += tl.load(source + channels, mask=mask, other=0.0)
    weight = tl.full((BLOCK_C,), 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    own_level = tl.sum(level, 0)
    own_along = tl.sum(along, 0)
    target = sum_ptr + image * 2 * channels + channel
    tl.store(target, own_level, mask=inside)
    tl.store(target + channels, own_along, mask=inside)
    tl.store(term_ptr + tl.program_id(0) * 2, tl.sum(own_level * weight, 0) / size / pixels)
    tl.store(term_ptr + tl.program_id(0) * 2 + 1, tl.sum(own_along * weight, 0) / size / pixels)


@triton.jit
def _apply_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, term_ptr, dx_ptr, pixels, channels, groups, size,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    mask = (pixel < pixels)[:, None] & inside[None, :]
    offset = (image * pixels + pixel[:, None]) * channels + channel[None, :]
    dz, normal, weight, rstd = _derivative(
        dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, image, offset, mask, channel, inside, groups, size,
        HAS_WEIGHT, HAS_BIAS, KIND, BLOCK_C,
    )  # fmt: skip
    term = term_ptr + (image * groups + channel // size) * 2
    level = tl.load(term, mask=inside, other=0.0)
    along = tl.load(term + 1, mask=inside, other=0.0)
    dx = rstd[None, :] * (dz * weight[None, :] - level[None, :] - normal * along[None, :])
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _channel_block(channels: int) -> int:
    """Channels in a tile: a power of two that divides their number, unless that is small."""
    divisor = channels & -channels
    return min(CHANNELS, divisor if divisor >= 32 else next_power_of_2(channels))


def _chunks(images: int, pixels: int, blocks: int, block_p: int, per_processor: int, device: torch.device) -> int:
    """Pixels in a chunk, so that all programs fill the GPU about once."""
    wanted = max(1, per_processor * processors(device) // (images * blocks))
    return ceil_div(ceil_div(pixels, wanted), block_p) * block_p


def _whole(pixels: int, size: int, limit: int) -> dict[str, int] | None:
    """Tile of a group that fits into registers, or None."""
    block_p, block_c = next_power_of_2(pixels), next_power_of_2(size)
    elements = block_p * block_c
    if elements > limit:
        return None
    return {"BLOCK_P": block_p, "BLOCK_C": block_c, "num_warps": next(w for most, w in WHOLE_WARPS if elements <= most)}


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, kind: int, y: Tensor, mean: Tensor,
    rstd: Tensor,
) -> None:  # fmt: skip
    """Fill y (images, pixels, channels), mean and rstd (images, groups)."""
    images, pixels, channels = x.shape
    size = channels // groups
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "KIND": kind}
    tile = _whole(pixels, size, WHOLE_FORWARD)
    with device_guard(x):
        if tile is not None:
            _whole_kernel[(images * groups,)](
                x, weight, bias, y, mean, rstd, pixels, channels, groups, size, eps, **flags, **tile
            )
            return
        block_c = _channel_block(channels)
        blocks = ceil_div(channels, block_c)
        elements, warps, per_processor = PARTIAL
        block_p = max(1, elements // block_c)
        per_chunk = _chunks(images, pixels, blocks, block_p, per_processor, x.device)
        chunks = ceil_div(pixels, per_chunk)
        partial = torch.empty((images, chunks, 2, channels), dtype=torch.float32, device=x.device)
        tile = {"BLOCK_P": block_p, "BLOCK_C": block_c, "num_warps": warps}
        _partial_kernel[(chunks, blocks, images)](x, partial, pixels, channels, per_chunk, **tile)
        block_size = next_power_of_2(size)
        _statistics_kernel[(images * groups,)](
            x, partial, mean, rstd, chunks, pixels, channels, groups, size, eps,
            BLOCK_K=max(1, STATISTICS_TILE // block_size), BLOCK_C=block_size,
        )  # fmt: skip
        block_p = max(1, APPLY[0] // block_c)
        _apply_kernel[(ceil_div(pixels, block_p), blocks, images)](
            x, weight, bias, y, mean, rstd, pixels, channels, groups, size, **flags, BLOCK_P=block_p, BLOCK_C=block_c,
            num_warps=APPLY[1],
        )  # fmt: skip


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, groups: int,
    kind: int, dx: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Fill dx and `sums` (images, 2, channels): each image's share of the gradients of bias and weight."""
    images, pixels, channels = x.shape
    size = channels // groups
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "KIND": kind}
    inputs = (dy, x, weight, bias, mean, rstd)
    tile = _whole(pixels, size, WHOLE_BACKWARD)
    with device_guard(x):
        if tile is not None:
            _whole_backward_kernel[(images * groups,)](
                *inputs, dx, sums, pixels, channels, groups, size, **flags, **tile
            )
            return
        block_c = _channel_block(channels)
        blocks = ceil_div(channels, block_c)
        elements, warps, per_processor = PARTIAL
        block_p = max(1, elements // block_c)
        per_chunk = _chunks(images, pixels, blocks, block_p, per_processor, x.device)
        chunks = ceil_div(pixels, per_chunk)
        partial = torch.empty((images, chunks, 2, channels), dtype=torch.float32, device=x.device)
        terms = torch.empty((images, groups, 2), dtype=torch.float32, device=x.device)
        _partial_backward_kernel[(chunks, blocks, images)](
            *inputs, partial, pixels, channels, groups, size, per_chunk, **flags, BLOCK_P=block_p, BLOCK_C=block_c,
            num_warps=warps,
        )  # fmt: skip
        block_size = next_power_of_2(size)
        _terms_kernel[(images * groups,)](
            partial, weight, sums, terms, chunks, pixels, channels, groups, size, HAS_WEIGHT=weight is not None,
            BLOCK_K=max(1, STATISTICS_TILE // block_size), BLOCK_C=block_size,
        )  # fmt: skip
        block_p = max(1, APPLY_BACKWARD[0] // block_c)
        _apply_backward_kernel[(ceil_div(pixels, block_p), blocks, images)](
            *inputs, terms, dx, pixels, channels, groups, size, **flags, BLOCK_P=block_p, BLOCK_C=block_c,
            num_warps=APPLY_BACKWARD[1],
        )  # fmt: skip
