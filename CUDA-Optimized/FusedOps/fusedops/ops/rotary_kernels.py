"""Triton kernel of `rotary`: one program a token, which rotates all heads of q and k with one read of the angles.

The same kernel with BACKWARD applies the transposed map. Arithmetic is float32, offsets have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import device_guard, next_power_of_2

PAIRS = 2048  # pairs of elements in a tile (heads x half of the rotated dimensions)
# (up to so many pairs in a token's q and k, warps)
WARPS = ((512, 1), (1024, 2), (4096, 4), (1 << 30, 8))


@triton.jit
def _turn(
    x_ptr, y_ptr, heads, first, second, inside, cos_first, sin_first, cos_second, sin_second, x_head, y_head, rotated,
    width, BACKWARD: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate a token's heads; first and second are the columns of each pair's elements."""
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS).to(tl.int64))[:, None]
        mask = (head < heads) & inside[None, :]
        a = tl.load(x_ptr + head * x_head + first[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + head * x_head + second[None, :], mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            new_a = a * cos_first[None, :] + b * sin_second[None, :]
            new_b = b * cos_second[None, :] - a * sin_first[None, :]
        else:
            new_a = a * cos_first[None, :] - b * sin_first[None, :]
            new_b = b * cos_second[None, :] + a * sin_second[None, :]
        tl.store(y_ptr + head * y_head + first[None, :], new_a.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + head * y_head + second[None, :], new_b.to(y_ptr.dtype.element_ty), mask=mask)
        if REST > 0:
            column = rotated + tl.arange(0, REST)[None, :]
            mask = (head < heads) & (column < width)
            tl.store(y_ptr + head * y_head + column, tl.load(x_ptr + head * x_head + column, mask=mask), mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, cos_across_ptr, sin_across_ptr, position_ptr, start_ptr,
    length, q_heads, k_heads, rotated, width, sequences, picture_width, positions, table, across_table,
    q_b, q_s, q_h, k_b, k_s, k_h, qo_b, qo_s, qo_h, ko_b, ko_s, ko_h, position_b, position_s,
    HAS_K: tl.constexpr, HAS_POSITION: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, FULL: tl.constexpr,
    BACKWARD: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = token // length
    place = token % length
    position = place
    if HAS_POSITION:
        position = tl.load(position_ptr + batch * position_b + place * position_s).to(tl.int64)
    if PACKED:
        index = tl.arange(0, STARTS)
        starts = tl.load(start_ptr + index, mask=index <= sequences, other=0).to(tl.int64)
        position = place - tl.max(tl.where(starts <= place, starts, 0), 0)
    pair = tl.arange(0, PAIRS)
    half = rotated // (2 * PARTS)
    inside = pair < half * PARTS
    part = pair // half
    within = pair % half
    first = part * (2 * half) + within
    second = first + half
    if PARTS == 1:
        offset = position * table + within
        held = inside & (position >= 0) & (position < positions)
        nan = float("nan")  # the angles of a position beyond the tables
        cos_first = tl.load(cos_ptr + offset, mask=held, other=nan).to(tl.float32)
        sin_first = tl.load(sin_ptr + offset, mask=held, other=nan).to(tl.float32)
        cos_second = cos_first
        sin_second = sin_first
        if FULL:
            cos_second = tl.load(cos_ptr + offset + half, mask=held, other=nan).to(tl.float32)
            sin_second = tl.load(sin_ptr + offset + half, mask=held, other=nan).to(tl.float32)
    else:
        down = (position // picture_width) * table + within
        across = (position % picture_width) * across_table + within
        upper = inside & (part == 0)
        lower = inside & (part == 1)
        cos_first = tl.load(cos_ptr + down, mask=upper, other=0.0).to(tl.float32)
        cos_first += tl.load(cos_across_ptr + across, mask=lower, other=0.0).to(tl.float32)
        sin_first = tl.load(sin_ptr + down, mask=upper, other=0.0).to(tl.float32)
        sin_first += tl.load(sin_across_ptr + across, mask=lower, other=0.0).to(tl.float32)
        cos_second = cos_first
        sin_second = sin_first
        if FULL:
            cos_second = tl.load(cos_ptr + down + half, mask=upper, other=0.0).to(tl.float32)
            cos_second += tl.load(cos_across_ptr + across + half, mask=lower, other=0.0).to(tl.float32)
            sin_second = tl.load(sin_ptr + down + half, mask=upper, other=0.0).to(tl.float32)
            sin_second += tl.load(sin_across_ptr + across + half, mask=lower, other=0.0).to(tl.float32)
    _turn(
        q_ptr + batch * q_b + place * q_s, q_out_ptr + batch * qo_b + place * qo_s, q_heads, first, second, inside,
        cos_first, sin_first, cos_second, sin_second, q_h, qo_h, rotated, width, BACKWARD, REST, HEADS_Q,
    )  # fmt: skip
    if HAS_K:
        _turn(
            k_ptr + batch * k_b + place * k_s, k_out_ptr + batch * ko_b + place * ko_s, k_heads, first, second, inside,
            cos_first, sin_first, cos_second, sin_second, k_h, ko_h, rotated, width, BACKWARD, REST, HEADS_K,
        )  # fmt: skip


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cos_across: Tensor | None, sin_across: Tensor | None,
    positions: Tensor | None, starts: Tensor | None, picture_width: int, rotated: int, backward: bool, q_out: Tensor,
    k_out: Tensor | None,
) -> None:  # fmt: skip
    """Fill q_out and k_out from q and k, all (batch, length, heads, width) with unit stride in the last dimension."""
    batch, length, q_heads, width = q.shape
    parts = 1 if cos_across is None else 2
    half = rotated // 2  # pairs of a head
    k_heads = 0 if k is None else k.shape[2]
    pairs = next_power_of_2(half)
    heads = [min(next_power_of_2(max(n, 1)), max(1, PAIRS // pairs)) for n in (q_heads, k_heads)]
    warps = next(warps for limit, warps in WARPS if (q_heads + k_heads) * half <= limit)
    tensors = (q, k, q_out, k_out)
    strides = [tensor.stride(i) if tensor is not None else 0 for tensor in tensors for i in range(3)]
    position_strides = (0, 0) if positions is None else positions.stride()
    sequences = 0 if starts is None else starts.numel() - 1
    with device_guard(q):
        _rotary_kernel[(batch * length,)](
            *tensors, cos, sin, cos_across, sin_across, positions, starts, length, q_heads, k_heads, rotated, width,
            sequences, max(picture_width, 1), cos.shape[0], cos.stride(0),
            0 if cos_across is None else cos_across.stride(0), *strides, *position_strides, HAS_K=k is not None,
            HAS_POSITION=positions is not None, PACKED=starts is not None, PARTS=parts,
            FULL=cos.shape[1] * parts == rotated, BACKWARD=backward, PAIRS=pairs,
            REST=next_power_of_2(width - rotated) if width > rotated else 0, HEADS_Q=heads[0],
            HEADS_K=heads[1], STARTS=next_power_of_2(sequences + 1), num_warps=warps,
        )  # fmt: skip
