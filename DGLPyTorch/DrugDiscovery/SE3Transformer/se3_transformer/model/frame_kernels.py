"""Triton kernels that turn features into edges' frames and back, and mix rows of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Edges and channels of a tile, warps.
TO_FRAME = (16, 32, 4)
FROM_FRAME = (16, 32, 4)
MIX_ROWS = 64


@triton.jit
def _mix_rows_kernel(
    w_ptr, index_ptr, coefficient_ptr, out_ptr, rows, HID: tl.constexpr, K: tl.constexpr, BR: tl.constexpr
):
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < rows
    hidden = tl.arange(0, HID)
    total = tl.zeros((BR, HID), tl.float32)
    for k in tl.static_range(K):
        source = tl.load(index_ptr + row * K + k, mask=inside, other=0)
        coefficient = tl.load(coefficient_ptr + row * K + k, mask=inside, other=0.0)
        value = tl.load(w_ptr + source[:, None] * HID + hidden[None, :], mask=inside[:, None], other=0.0)
        total += coefficient[:, None] * value.to(tl.float32)
    target = out_ptr + row[:, None] * HID + hidden[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def mix_rows(w: Tensor, index: Tensor, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """out[r] = sum over k of coefficients[r, k] * w[index[r, k]]."""
    rows, count = index.shape
    out = w.new_empty(rows, w.shape[1], dtype=dtype)
    _mix_rows_kernel[(triton.cdiv(rows, MIX_ROWS),)](
        w, index, coefficients, out, rows, HID=w.shape[1], K=count, BR=MIX_ROWS
    )
    return out


@triton.jit
def _to_frame_kernel(
    x_ptr, index_ptr, rotation_ptr, columns_ptr, rows_ptr, out_ptr, E, P, x_stride, rotation_stride, channels,
    DIM: tl.constexpr, GATHER: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    edges = tl.program_id(0) * BE + tl.arange(0, BE)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside, valid = edges < E, channel < channels
    mask = inside[:, None] & valid[None, :]
    source = edges.to(tl.int64)
    if GATHER:
        source = tl.load(index_ptr + edges, mask=inside, other=0).to(tl.int64)
    column = tl.load(columns_ptr + channel, mask=valid, other=0)
    x_tile = x_ptr + source[:, None] * x_stride + column[None, :]
    matrix = rotation_ptr + edges.to(tl.int64) * rotation_stride
    for m in tl.static_range(DIM):
        row = tl.load(rows_ptr + m).to(tl.int64)
        if row >= 0:
            total = tl.zeros((BE, BC), tl.float32)
            for component in tl.static_range(DIM):
                turn = tl.load(matrix + m * DIM + component, mask=inside, other=0.0)
                total += turn[:, None] * tl.load(x_tile + component, mask=mask, other=0.0).to(tl.float32)
            target = out_ptr + (row + channel)[None, :] * P + edges[:, None]
            tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(edges < P)[:, None] & valid[None, :])


@triton.jit
def _from_frame_kernel(
    y_ptr, rotation_ptr, columns_ptr, rows_ptr, out_ptr, E, P, out_stride, rotation_stride, channels,
    DIM: tl.constexpr, PADDED: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All components of a tile at once: each is read once, and neighbours in memory are written together."""
    edges = tl.program_id(0) * BE + tl.arange(0, BE)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    component = tl.arange(0, PADDED)
    inside, valid, real = edges < E, channel < channels, component < DIM
    mask = inside[:, None] & valid[None, :]
    column = tl.load(columns_ptr + channel, mask=valid, other=0)
    matrix = rotation_ptr + edges.to(tl.int64)[:, None] * rotation_stride + component[None, :]
    total = tl.zeros((BE, BC, PADDED), tl.float32)
    for m in tl.static_range(DIM):
        row = tl.load(rows_ptr + m).to(tl.int64)
        if row >= 0:
            turn = tl.load(matrix + m * DIM, mask=inside[:, None] & real[None, :], other=0.0)
            value = tl.load(y_ptr + (row + channel)[None, :] * P + edges[:, None], mask=mask, other=0.0)
            total += turn[:, None, :] * value.to(tl.float32)[:, :, None]
    place = edges.to(tl.int64)[:, None, None] * out_stride + column[None, :, None] + component[None, None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask[:, :, None] & real[None, None, :])


def to_frame(x: Tensor, index: Tensor | None, rotations: Tensor, columns: Tensor, row_maps: Tensor, spec: list[int],
             rows: int, padded: int) -> Tensor:  # fmt: skip
    """Rows of x (R, W), gathered by ``index``, turned into the frames: (rows, P). See ``fast_ops.to_frame``."""
    edges = rotations.shape[0]
    out = x.new_empty(rows, padded)
    tile_e, tile_c, warps = TO_FRAME
    first_channel = first_row = 0
    for degree, channels in zip(spec[::2], spec[1::2], strict=True):
        dim = 2 * degree + 1
        offset = sum((2 * lower + 1) ** 2 for lower in range(degree))
        if edges:
            _to_frame_kernel[(triton.cdiv(padded, tile_e), triton.cdiv(channels, tile_c))](
                x, x if index is None else index, rotations[:, offset:], columns[first_channel:], row_maps[first_row:],
                out, edges, padded, x.stride(0), rotations.stride(0), channels, DIM=dim, GATHER=index is not None,
                BE=tile_e, BC=tile_c, num_warps=warps,
            )  # fmt: skip
        first_channel += channels
        first_row += dim
    return out


def from_frame(y: Tensor, rotations: Tensor, columns: Tensor, row_maps: Tensor, spec: list[int], width: int) -> Tensor:
    """Components (rows, P) turned back: (E, width)."""
    edges = rotations.shape[0]
    out = y.new_empty(edges, width)
    tile_e, tile_c, warps = FROM_FRAME
    first_channel = first_row = 0
    for degree, channels in zip(spec[::2], spec[1::2], strict=True):
        dim = 2 * degree + 1
        offset = sum((2 * lower + 1) ** 2 for lower in range(degree))
        if edges:
            _from_frame_kernel[(triton.cdiv(edges, tile_e), triton.cdiv(channels, tile_c))](
                y, rotations[:, offset:], columns[first_channel:], row_maps[first_row:], out, edges,
                y.shape[1], width, rotations.stride(0), channels, DIM=dim, PADDED=triton.next_power_of_2(dim),
                BE=tile_e, BC=tile_c, num_warps=warps,
            )  # fmt: skip
        first_channel += channels
        first_row += dim
    return out
