"""Triton kernel of a 1-D convolution over rows of channels, with what vocoders put around one: leaky ReLU, sums, masks.

A tensor is (B, P, C): B items, P positions, C channels, channels next to each other, so that a tap of a dilated kernel
is one matrix product of shifted rows. Positions at and behind an item's limit read as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rate", "taps", "dilation"])  # or there were dozens of variants to compile
def _conv_kernel(
    x, weight, bias, first, second, limits, out, activated, rate, P, taps, dilation, scale, slope,
    CIN: tl.constexpr, COUT: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, RAW: tl.constexpr, ACTIVATED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """value = (conv(x) + bias + first + second) * scale; out = value, activated = leaky(value)."""
    item = tl.program_id(2)
    begin = item.to(tl.int64) * P
    limit = tl.minimum(tl.load(limits + item) * rate, P)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for step in range(taps * (CIN // BLOCK_K)):
        tap, channel = step // (CIN // BLOCK_K), (step % (CIN // BLOCK_K)) * BLOCK_K
        place = p + (tap - taps // 2) * dilation
        inside = (place >= 0) & (place < limit)
        left = tl.load(x + (begin + place)[:, None] * CIN + channel + k[None, :], mask=inside[:, None], other=0.0)
        right = tl.load(
            weight + (tap * CIN + channel + k)[:, None] * COUT + n[None, :], mask=(n < COUT)[None, :], other=0.0
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    acc += tl.load(bias + n, mask=n < COUT, other=0.0)[None, :]
    places = (begin + p)[:, None] * COUT + n[None, :]
    fits = (p < P)[:, None] & (n < COUT)[None, :]
    if FIRST:
        acc += tl.load(first + places, mask=fits, other=0.0).to(tl.float32)
    if SECOND:
        acc += tl.load(second + places, mask=fits, other=0.0).to(tl.float32)
    acc *= scale
    if RAW:
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=fits)
    if ACTIVATED:
        acc = tl.where(acc > 0, acc, acc * slope)
        tl.store(activated + places, acc.to(activated.dtype.element_ty), mask=fits)


@dataclass(frozen=True)
class Packed:
    """A convolution's tensors as the kernel reads them: ``weight`` (taps, inputs, outputs), ``bias`` float32."""

    weight: Tensor
    bias: Tensor
    dilation: int = 1

    @staticmethod
    def of(conv: torch.nn.Conv1d, dtype: torch.dtype | None = None) -> Packed:
        """Of a convolution that keeps the length: odd kernel, stride 1, one group, padding to match."""
        taps = conv.kernel_size[0]
        if taps % 2 == 0 or conv.groups != 1 or conv.padding[0] != conv.dilation[0] * (taps // 2):
            raise ValueError(f"the kernel does not take {conv}")
        return Packed.made(conv.weight.detach().permute(2, 1, 0), conv.bias, conv.dilation[0], dtype)

    @staticmethod
    def made(weight: Tensor, bias: Tensor | None, dilation: int = 1, dtype: torch.dtype | None = None) -> Packed:
        """Of (taps, inputs, outputs); inputs are filled up to a multiple of 16, which the rows must have, too."""
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[1] % 16)).contiguous()
        bias = weight.new_zeros(weight.shape[2]) if bias is None else bias.detach()
        return Packed(weight.to(dtype or weight.dtype), bias.float(), dilation)

    @staticmethod
    def transposed(conv: torch.nn.ConvTranspose1d, dtype: torch.dtype | None = None) -> Packed:
        """Of a transposed convolution whose kernel is twice its rate: three taps from a row to ``rate`` rows at once.

        Output place r * f + q - padding takes taps q, of frame f, and q + r, of the frame before.
        """
        rate, kernel, padding = conv.stride[0], conv.kernel_size[0], conv.padding[0]
        if kernel != 2 * rate or not 0 <= padding < rate or conv.groups != 1 or conv.output_padding[0]:
            raise ValueError(f"the kernel does not take {conv}")
        inputs, outputs, _ = conv.weight.shape
        made = conv.weight.new_zeros(3, inputs, rate, outputs)  # of the frames f - 1, f, f + 1
        for place in range(rate):
            for tap in range(3):
                source = place + padding - (tap - 1) * rate
                if 0 <= source < kernel:
                    made[tap, :, place] = conv.weight.detach()[:, :, source]
        return Packed.made(made.flatten(2), conv.bias.detach().repeat(rate), 1, dtype)


def convolve(
    x: Tensor,
    conv: Packed,
    limits: Tensor,
    rate: int = 1,
    *,
    add: tuple[Tensor, ...] = (),
    scale: float = 1.0,
    raw: Tensor | bool = True,
    slope: float | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """((B, P, N) or None if not ``raw``, its leaky ReLU or None without ``slope``) of rows ``x`` (B, P, C).

    ``limits`` (B,) int32 times ``rate`` are the items' positions. ``add``: at most two tensors like the result, added
    before ``scale``. ``raw`` may be a tensor to write to, such as one of ``add``.
    """
    batch, positions, width = x.shape
    taps, inputs, outputs = conv.weight.shape
    if width != inputs:
        raise ValueError(f"rows of {width} channels for a convolution of {inputs}")
    out = x.new_empty(batch, positions, outputs) if raw is True else raw
    activated = None if slope is None else x.new_empty(batch, positions, outputs)
    single = x.dtype == torch.float32
    block_n = max(16, min(128, triton.next_power_of_2(outputs)))
    block_k = next(size for size in ((32, 16) if single else (64, 32, 16)) if inputs % size == 0)
    block_p = 64 if single else 128
    _conv_kernel[(triton.cdiv(positions, block_p), triton.cdiv(outputs, block_n), batch)](
        x, conv.weight, conv.bias, add[0] if add else x, add[1] if len(add) > 1 else x, limits,
        x if out is False else out, x if activated is None else activated, rate, positions, taps, conv.dilation, scale,
        0.0 if slope is None else slope,
        CIN=inputs, COUT=outputs, FIRST=len(add) > 0, SECOND=len(add) > 1,
        RAW=out is not False, ACTIVATED=slope is not None, BLOCK_P=block_p, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION="ieee" if single else "tf32", num_warps=8 if block_n == 128 else 4, num_stages=3,
    )  # fmt: skip
    return (None if out is False else out), activated
