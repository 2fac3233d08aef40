"""Triton kernels of WaveGlow's gates: with their convolution over rows of channels, for inference; alone, for training.

B batch, P positions, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["dilation"])  # or there were a variant to compile for every layer
def _gated_kernel(
    x, weight, condition, condition_stride, limits, out, rate, P, dilation, C: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = tanh(value) * sigmoid(gate), (value, gate) = conv(x) + condition; x is zero from the item's limit on."""
    item = tl.program_id(2)
    begin = item.to(tl.int64) * P
    limit = tl.minimum(tl.load(limits + item) * rate, P)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    value = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    gate = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for step in range(TAPS * (C // BLOCK_K)):
        tap, channel = step // (C // BLOCK_K), (step % (C // BLOCK_K)) * BLOCK_K
        place = p + (tap - TAPS // 2) * dilation
        inside = (place >= 0) & (place < limit)
        left = tl.load(x + (begin + place)[:, None] * C + channel + k[None, :], mask=inside[:, None], other=0.0)
        row = weight + (tap * C + channel + k)[:, None] * (2 * C) + n[None, :]
        value = tl.dot(left, tl.load(row, mask=(n < C)[None, :], other=0.0), value, input_precision=PRECISION)
        gate = tl.dot(left, tl.load(row + C, mask=(n < C)[None, :], other=0.0), gate, input_precision=PRECISION)
    fits = (p < P)[:, None] & (n < C)[None, :]
    place = condition + (begin + p)[:, None] * condition_stride + n[None, :]
    value += tl.load(place, mask=fits, other=0.0).to(tl.float32)
    gate += tl.load(place + C, mask=fits, other=0.0).to(tl.float32)
    acts = (2 * tl.sigmoid(2 * value) - 1) * tl.sigmoid(gate)
    tl.store(out + (begin + p)[:, None] * C + n[None, :], acts.to(out.dtype.element_ty), mask=fits)


def gated(
    x: Tensor, weight: Tensor, condition: Tensor, limits: Tensor, rate: int, dilation: int, single: bool
) -> Tensor:
    """(B, P, C): the gated activations of ``x`` (B, P, C).

    ``weight`` (taps, C, 2 C): values, then gates. ``condition`` (B, P, 2 C) holds the biases, too; its rows may be
    apart. ``limits`` (B,) int32 times ``rate`` are the items' positions. ``single``: exact float32 products.
    """
    batch, positions, channels = x.shape
    out = x.new_empty(x.shape)
    block_n = max(16, min(128, triton.next_power_of_2(channels)))
    block_k = next(size for size in ((32, 16) if single else (64, 32, 16)) if channels % size == 0)
    block_p = 64 if single else 128
    _gated_kernel[(triton.cdiv(positions, block_p), triton.cdiv(channels, block_n), batch)](
        x, weight, condition, condition.stride(1), limits, out, rate, positions, dilation,
        C=channels, TAPS=len(weight), BLOCK_P=block_p, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION="ieee" if single else "tf32", num_warps=8 if block_n == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(summed, condition, condition_stride, out, SIZE, BLOCK: tl.constexpr):
    """out (B, SIZE) = tanh(value) * sigmoid(gate) of summed + condition, (B, 2 SIZE): values, then gates."""
    item = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    own, given = summed + item * 2 * SIZE + place, condition + item * condition_stride + place
    value = tl.load(own, mask=inside, other=0.0).to(tl.float32) + tl.load(given, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(own + SIZE, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(given + SIZE, mask=inside, other=0.0).to(tl.float32)
    found = (2 * tl.sigmoid(2 * value) - 1) * tl.sigmoid(gate)
    tl.store(out + item * SIZE + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward_kernel(summed, condition, condition_stride, outer, found, SIZE, BLOCK: tl.constexpr):
    """found (B, 2 SIZE): the gradient of summed and of condition from that of the gates' result, outer (B, SIZE)."""
    item = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    own, given = summed + item * 2 * SIZE + place, condition + item * condition_stride + place
    value = tl.load(own, mask=inside, other=0.0).to(tl.float32) + tl.load(given, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(own + SIZE, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(given + SIZE, mask=inside, other=0.0).to(tl.float32)
    value, gate = 2 * tl.sigmoid(2 * value) - 1, tl.sigmoid(gate)
    change = tl.load(outer + item * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    spot = found + item * 2 * SIZE + place
    kind = found.dtype.element_ty
    tl.store(spot, (change * gate * (1 - value * value)).to(kind), mask=inside)
    tl.store(spot + SIZE, (change * value * gate * (1 - gate)).to(kind), mask=inside)


def gate(summed: Tensor, condition: Tensor) -> Tensor:
    """(B, C, P) of ``summed`` (B, 2 C, P), contiguous, and ``condition`` (B, 2 C, P), whose items may be apart."""
    batch, channels, positions = summed.shape
    out = summed.new_empty(batch, channels // 2, positions)
    size = channels // 2 * positions
    _gate_kernel[(triton.cdiv(size, 1024), batch)](
        summed, condition, condition.stride(0), out, size, BLOCK=1024, num_warps=4
    )  # fmt: skip
    return out


def gate_backward(summed: Tensor, condition: Tensor, outer: Tensor) -> Tensor:
    """The gradient (B, 2 C, P) of either argument of `gate`."""
    found = torch.empty_like(summed)
    size = outer.shape[1] * outer.shape[2]
    _gate_backward_kernel[(triton.cdiv(size, 1024), len(outer))](
        summed, condition, condition.stride(0), outer, found, size, BLOCK=1024, num_warps=4
    )  # fmt: skip
    return found
