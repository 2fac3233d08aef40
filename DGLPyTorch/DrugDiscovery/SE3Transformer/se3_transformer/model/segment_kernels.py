"""Triton kernels of sums and attention over the edges of each of N nodes, sorted by node: no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _segment_sum_kernel(x_ptr, order_ptr, start_ptr, out_ptr, width, ORDERED: tl.constexpr, BW: tl.constexpr):
    node = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = column < width
    total = tl.zeros((BW,), tl.float32)
    first = tl.load(start_ptr + node)
    for step in range(tl.load(start_ptr + node + 1) - first):
        row = first.to(tl.int64) + step
        if ORDERED:
            row = tl.load(order_ptr + first + step).to(tl.int64)
        total += tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + node * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def segment_sum(x: Tensor, order: Tensor | None, start: Tensor) -> Tensor:
    """out[n] = sum of x[order[i]] (or x[i]) for start[n] <= i < start[n + 1]."""
    nodes, width = len(start) - 1, x.shape[1]
    out = x.new_empty(nodes, width)
    if nodes and width:
        tile = min(1024, max(16, triton.next_power_of_2(width)))
        _segment_sum_kernel[(nodes, triton.cdiv(width, tile))](
            x, start if order is None else order, start, out, width, ORDERED=order is not None, BW=tile,
            num_warps=max(1, tile // 256),
        )  # fmt: skip
    return out


@triton.jit
def _attention_forward_kernel(
    q_ptr, kv_ptr, start_ptr, out_ptr, lse_ptr, scale, heads, value_size, key_size,
    BH: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    head, v, k = tl.arange(0, BH), tl.arange(0, BV), tl.arange(0, BK)
    some = head < heads
    v_mask, k_mask = some[:, None] & (v < value_size)[None, :], some[:, None] & (k < key_size)[None, :]
    v_place, k_place = head[:, None] * value_size + v[None, :], head[:, None] * key_size + k[None, :]
    width = heads * (value_size + key_size)
    q = tl.load(q_ptr + node * heads * key_size + k_place, mask=k_mask, other=0.0).to(tl.float32)
    largest = tl.full((BH,), -float("inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    out = tl.zeros((BH, BV), tl.float32)
    first = tl.load(start_ptr + node)
    for step in range(tl.load(start_ptr + node + 1) - first):
        row = kv_ptr + (first.to(tl.int64) + step) * width
        key = tl.load(row + heads * value_size + k_place, mask=k_mask, other=0.0).to(tl.float32)
        value = tl.load(row + v_place, mask=v_mask, other=0.0).to(tl.float32)
        score = tl.sum(q * key, 1) * scale
        new = tl.maximum(largest, score)
        shrink, weight = tl.exp(largest - new), tl.exp(score - new)
        total = total * shrink + weight
        out = out * shrink[:, None] + weight[:, None] * value
        largest = new
    reached = total > 0
    out = tl.where(reached[:, None], out / tl.where(reached, total, 1.0)[:, None], 0.0)
    tl.store(out_ptr + node * heads * value_size + v_place, out.to(out_ptr.dtype.element_ty), mask=v_mask)
    lse = tl.where(reached, largest + tl.log(tl.where(reached, total, 1.0)), 0.0)
    tl.store(lse_ptr + node * heads + head, lse, mask=some)


@triton.jit
def _attention_backward_kernel(
    dout_ptr, out_ptr, lse_ptr, q_ptr, kv_ptr, start_ptr, dq_ptr, dkv_ptr, scale, heads, value_size, key_size,
    BH: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    head, v, k = tl.arange(0, BH), tl.arange(0, BV), tl.arange(0, BK)
    some = head < heads
    v_mask, k_mask = some[:, None] & (v < value_size)[None, :], some[:, None] & (k < key_size)[None, :]
    v_place, k_place = head[:, None] * value_size + v[None, :], head[:, None] * key_size + k[None, :]
    width = heads * (value_size + key_size)
    q = tl.load(q_ptr + node * heads * key_size + k_place, mask=k_mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + node * heads * value_size + v_place, mask=v_mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + node * heads + head, mask=some, other=0.0)
    first = tl.load(start_ptr + node)
    count = tl.load(start_ptr + node + 1) - first
    # sum over edges of weight * <dout, value> is <dout, out>, but out is rounded: take it from the values themselves.
    mean = tl.zeros((BH,), tl.float32)
    for step in range(count):
        row = kv_ptr + (first.to(tl.int64) + step) * width
        key = tl.load(row + heads * value_size + k_place, mask=k_mask, other=0.0).to(tl.float32)
        value = tl.load(row + v_place, mask=v_mask, other=0.0).to(tl.float32)
        mean += tl.exp(tl.sum(q * key, 1) * scale - lse) * tl.sum(dout * value, 1)
    dq = tl.zeros((BH, BK), tl.float32)
    for step in range(count):
        offset = (first.to(tl.int64) + step) * width
        key = tl.load(kv_ptr + offset + heads * value_size + k_place, mask=k_mask, other=0.0).to(tl.float32)
        value = tl.load(kv_ptr + offset + v_place, mask=v_mask, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key, 1) * scale - lse)
        dscore = weight * (tl.sum(dout * value, 1) - mean) * scale
        element = dkv_ptr.dtype.element_ty
        tl.store(dkv_ptr + offset + v_place, (weight[:, None] * dout).to(element), mask=v_mask)
        tl.store(dkv_ptr + offset + heads * value_size + k_place, (dscore[:, None] * q).to(element), mask=k_mask)
        dq += dscore[:, None] * key
    tl.store(dq_ptr + node * heads * key_size + k_place, dq.to(dq_ptr.dtype.element_ty), mask=k_mask)


def _attention_tiles(heads: int, value_size: int, key_size: int) -> dict[str, int]:
    tiles = {
        "BH": triton.next_power_of_2(heads),
        "BV": triton.next_power_of_2(value_size),
        "BK": triton.next_power_of_2(key_size),
    }
    return tiles | {"num_warps": min(8, max(1, tiles["BH"] * max(tiles["BV"], tiles["BK"]) // 128))}


def attention_forward(
    q: Tensor, kv: Tensor, start: Tensor, heads: int, value_size: int, key_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax over the edges into each node, and the weighted sum of values: (N, heads * value_size), and (N, heads)
    float32 logarithms of the softmax's denominators."""
    nodes = q.shape[0]
    out = q.new_empty(nodes, heads * value_size)
    lse = q.new_empty(nodes, heads, dtype=torch.float32)
    if nodes:
        _attention_forward_kernel[(nodes,)](
            q, kv, start, out, lse, scale, heads, value_size, key_size, **_attention_tiles(heads, value_size, key_size)
        )
    return out, lse


def attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, start: Tensor, heads: int, value_size: int,
    key_size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of q and kv. Every edge belongs to one node, so each is written once."""
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    if q.shape[0]:
        _attention_backward_kernel[(q.shape[0],)](
            dout, out, lse, q, kv, start, dq, dkv, scale, heads, value_size, key_size,
            **_attention_tiles(heads, value_size, key_size),
        )  # fmt: skip
    return dq, dkv
