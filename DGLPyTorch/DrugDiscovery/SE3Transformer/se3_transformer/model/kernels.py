"""Triton kernels of ``fast_ops`` and the functions that launch them. No kernel uses atomics or waits for the host.

Matrices of edges' components are (rows, P), so that neighbouring threads take neighbouring edges (``frame_tables``);
P is the number of edges E padded with zeros to a multiple of 16, without which loads are neither wide nor asynchronous.
N nodes, HID hidden width of the radial profile. Sums are taken in float32.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Edges x outputs of a forward tile, edges and inputs per program of the backward pass to inputs, and edges, inputs,
# outputs and programs per multiprocessor of the one to weights; (tile..., warps). Registers, not arithmetic, set these
# sizes: none of them spills on sm_90. `benchmark --mode tiles` measures others.
FORWARD = (64, 32, 4)
BACKWARD_INPUT = (64, 16, 4)
BACKWARD_WEIGHT = (128, 4, 64, 2, 8)
BACKWARD_WEIGHT_FP32 = (64, 2, 64, 4, 4)  # the other needs more shared memory than there is
ROTATE = (16, 32, 4)
ROTATE_BACK = (16, 32, 4)
MIX_ROWS = 64
UNIT = 9  # numbers that describe a program's share of a block


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _power(count: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(count))


def _precision(dtype: torch.dtype) -> str:
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


# Kernels in edge frames


@triton.jit
def _conv_forward_kernel(
    x_ptr, h_ptr, w_ptr, y_ptr, units_ptr, E, UNIT: tl.constexpr, HID: tl.constexpr, PAIRED: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # y[n] += x[k] * (h @ w[k, n]) as one product: row e of its left factor is x[k, e] * h[e].
    unit = units_ptr + tl.program_id(1) * UNIT
    x_plus, x_minus, inputs = tl.load(unit).to(tl.int64), tl.load(unit + 1).to(tl.int64), tl.load(unit + 2)
    y_plus, y_minus, outputs = tl.load(unit + 3).to(tl.int64), tl.load(unit + 4).to(tl.int64), tl.load(unit + 5)
    weight, first = tl.load(unit + 6), tl.load(unit + 7)
    edges = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = edges < E
    hidden = tl.arange(0, HID)
    h = tl.load(h_ptr + edges[:, None] * HID + hidden[None, :], mask=inside[:, None], other=0.0)
    n = first + tl.arange(0, BN)
    valid = n < outputs
    width: tl.constexpr = 2 if PAIRED else 1
    w_tile = w_ptr + (weight + n)[None, :] * HID + hidden[:, None]
    plus = tl.zeros((BE, BN), tl.float32)
    minus = tl.zeros((BE, BN), tl.float32)
    for k in range(inputs):
        x_p = tl.load(x_ptr + (x_plus + k) * E + edges, mask=inside, other=0.0)
        a = tl.load(w_tile + k * width * outputs * HID, mask=valid[None, :], other=0.0)
        left_p = (x_p[:, None] * h).to(h.dtype)
        plus = tl.dot(left_p, a, plus, input_precision=PRECISION)
        if PAIRED:
            x_m = tl.load(x_ptr + (x_minus + k) * E + edges, mask=inside, other=0.0)
            b = tl.load(w_tile + (k * width + 1) * outputs * HID, mask=valid[None, :], other=0.0)
            left_m = (x_m[:, None] * h).to(h.dtype)
            minus = tl.dot(left_m, a, minus, input_precision=PRECISION)
            minus = tl.dot(left_p, b, minus, input_precision=PRECISION)
            plus = tl.dot((-left_m).to(h.dtype), b, plus, input_precision=PRECISION)
    mask = inside[:, None] & valid[None, :]
    tl.store(y_ptr + (y_plus + n)[None, :] * E + edges[:, None], plus.to(y_ptr.dtype.element_ty), mask=mask)
    if PAIRED:
        tl.store(y_ptr + (y_minus + n)[None, :] * E + edges[:, None], minus.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _conv_backward_input_kernel(
    dy_ptr, x_ptr, h_ptr, w_ptr, dx_ptr, dh_ptr, units_ptr, E, UNIT: tl.constexpr, HID: tl.constexpr,
    PAIRED: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ONE_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # g[e, hid] = sum over n of dy[n, e] * w[k, n, hid]; then dx[k, e] = <h, g> and dh += x[k, e] * g.
    unit = units_ptr + tl.program_id(1) * UNIT
    x_plus, x_minus, inputs = tl.load(unit).to(tl.int64), tl.load(unit + 1).to(tl.int64), tl.load(unit + 2)
    y_plus, y_minus, outputs = tl.load(unit + 3).to(tl.int64), tl.load(unit + 4).to(tl.int64), tl.load(unit + 5)
    weight, first, part = tl.load(unit + 6), tl.load(unit + 7), tl.load(unit + 8).to(tl.int64)
    edges = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = edges < E
    hidden = tl.arange(0, HID)
    here = edges[:, None] * HID + hidden[None, :]
    h = tl.load(h_ptr + here, mask=inside[:, None], other=0.0).to(tl.float32)
    width: tl.constexpr = 2 if PAIRED else 1
    dh = tl.zeros((BE, HID), tl.float32)
    n = tl.arange(0, BN)
    mask = inside[:, None] & (n < outputs)[None, :]
    dy_tile = dy_ptr + n.to(tl.int64)[None, :] * E + edges[:, None]
    dy_p = tl.load(dy_tile + y_plus * E, mask=mask, other=0.0)
    dy_m = dy_p
    if PAIRED:
        dy_m = tl.load(dy_tile + y_minus * E, mask=mask, other=0.0)
    for k in range(first, min(first + BK, inputs)):
        g_p = tl.zeros((BE, HID), tl.float32)
        g_m = tl.zeros((BE, HID), tl.float32)
        for start in range(0, outputs, BN):
            rows = start + n
            valid = rows < outputs
            if not ONE_TILE:
                mask = inside[:, None] & valid[None, :]
                dy_p = tl.load(dy_tile + (y_plus + start) * E, mask=mask, other=0.0)
            a_ptr = w_ptr + (weight + k * width * outputs + rows)[:, None] * HID + hidden[None, :]
            a = tl.load(a_ptr, mask=valid[:, None], other=0.0)
            g_p = tl.dot(dy_p, a, g_p, input_precision=PRECISION)
            if PAIRED:
                if not ONE_TILE:
                    dy_m = tl.load(dy_tile + (y_minus + start) * E, mask=mask, other=0.0)
                b = tl.load(a_ptr + outputs * HID, mask=valid[:, None], other=0.0)
                g_p = tl.dot(dy_m, b, g_p, input_precision=PRECISION)
                g_m = tl.dot(dy_m, a, g_m, input_precision=PRECISION)
                g_m = tl.dot(dy_p, (-b).to(b.dtype), g_m, input_precision=PRECISION)
        place = (x_plus + k) * E + edges
        tl.store(dx_ptr + place, tl.sum(g_p * h, 1).to(dx_ptr.dtype.element_ty), mask=inside)
        dh += tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)[:, None] * g_p
        if PAIRED:
            place = (x_minus + k) * E + edges
            tl.store(dx_ptr + place, tl.sum(g_m * h, 1).to(dx_ptr.dtype.element_ty), mask=inside)
            dh += tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)[:, None] * g_m
    tl.store(dh_ptr + part * E * HID + here, dh, mask=inside[:, None])


@triton.jit
def _conv_backward_weight_kernel(
    dy_ptr, x_ptr, h_ptr, dw_ptr, units_ptr, E, per_program, total_rows, UNIT: tl.constexpr, HID: tl.constexpr,
    PAIRED: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # dw[k, n, hid] = sum over e of x[k, e] * h[e, hid] * dy[n, e] over this program's edges.
    unit = units_ptr + tl.program_id(1) * UNIT
    x_plus, x_minus, inputs = tl.load(unit).to(tl.int64), tl.load(unit + 1).to(tl.int64), tl.load(unit + 2)
    y_plus, y_minus, outputs = tl.load(unit + 3).to(tl.int64), tl.load(unit + 4).to(tl.int64), tl.load(unit + 5)
    weight, first_k, first_n = tl.load(unit + 6), tl.load(unit + 7), tl.load(unit + 8)
    k = first_k + tl.arange(0, BK)
    n = first_n + tl.arange(0, BN)
    hidden = tl.arange(0, HID)
    start = tl.program_id(0) * per_program
    end = min(start + per_program, E)
    width: tl.constexpr = 2 if PAIRED else 1
    da = tl.zeros((BK * HID, BN), tl.float32)
    db = tl.zeros((BK * HID, BN), tl.float32)
    for block in range(start, end, BE):
        edges = block + tl.arange(0, BE)
        inside = edges < end
        h = tl.load(h_ptr + edges[None, :] * HID + hidden[:, None], mask=inside[None, :], other=0.0)  # HID x BE
        x_mask = (k < inputs)[:, None] & inside[None, :]
        y_mask = (n < outputs)[None, :] & inside[:, None]
        x_p = tl.load(x_ptr + (x_plus + k)[:, None] * E + edges[None, :], mask=x_mask, other=0.0)
        dy_p = tl.load(dy_ptr + (y_plus + n)[None, :] * E + edges[:, None], mask=y_mask, other=0.0)
        left_p = tl.reshape((x_p[:, None, :] * h[None, :, :]).to(h.dtype), (BK * HID, BE))
        da = tl.dot(left_p, dy_p, da, input_precision=PRECISION)
        if PAIRED:
            x_m = tl.load(x_ptr + (x_minus + k)[:, None] * E + edges[None, :], mask=x_mask, other=0.0)
            dy_m = tl.load(dy_ptr + (y_minus + n)[None, :] * E + edges[:, None], mask=y_mask, other=0.0)
            left_m = tl.reshape((x_m[:, None, :] * h[None, :, :]).to(h.dtype), (BK * HID, BE))
            da = tl.dot(left_m, dy_m, da, input_precision=PRECISION)
            db = tl.dot(left_p, dy_m, db, input_precision=PRECISION)
            db = tl.dot((-left_m).to(h.dtype), dy_p, db, input_precision=PRECISION)
    row = tl.arange(0, BK * HID)
    place_k, place_h = first_k + row // HID, row % HID
    mask = (place_k < inputs)[:, None] & (n < outputs)[None, :]
    target = (weight + place_k[:, None] * width * outputs + n[None, :]) * HID + place_h[:, None]
    target += tl.program_id(0).to(tl.int64) * total_rows * HID
    tl.store(dw_ptr + target, da, mask=mask)
    if PAIRED:
        tl.store(dw_ptr + target + outputs * HID, db, mask=mask)


@functools.cache
@torch.inference_mode(False)
def _units(blocks: tuple[int, ...], step_k: int, step_n: int, device: torch.device) -> list[tuple[bool, int, Tensor]]:
    """Shares of the blocks for m = 0 and for m > 0: (paired, how many, table), numbered on from one to the next.

    ``step_k``, ``step_n``: inputs and outputs of a share, 0 for all.
    """
    found, number = [], 0
    for paired in (False, True):
        rows = []
        for position in range(0, len(blocks), 8):
            m, x_plus, x_minus, inputs, y_plus, y_minus, outputs, weight = blocks[position : position + 8]
            if bool(m) != paired:
                continue
            for first_k in range(0, inputs, step_k or inputs):
                for first_n in range(0, outputs, step_n or outputs):
                    last = first_n if step_k and step_n else number
                    share = [first_k if step_k else first_n, last]
                    rows.append([x_plus, x_minus, inputs, y_plus, y_minus, outputs, weight, *share])
                    number += 1
        if rows:
            found.append((paired, len(rows), torch.tensor(rows, dtype=torch.int32, device=device)))
    return found


def conv_forward(x: Tensor, h: Tensor, w: Tensor, blocks: tuple[int, ...], rows: int) -> Tensor:
    """x (rows in, E), h (E, HID), w (weight rows, HID) -> (rows, E); ``blocks`` are 8 numbers each."""
    edges = x.shape[1]
    y = x.new_empty(rows, edges)
    tile_e, tile_n, warps = FORWARD
    for paired, count, table in _units(blocks, 0, tile_n, x.device) if edges else []:
        _conv_forward_kernel[(triton.cdiv(edges, tile_e), count)](
            x, h, w, y, table, edges, UNIT=UNIT, HID=h.shape[1], PAIRED=paired, BE=tile_e, BN=tile_n,
            PRECISION=_precision(x.dtype), num_warps=warps,
        )  # fmt: skip
    return y


def conv_backward_input(dy: Tensor, x: Tensor, h: Tensor, w: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Gradients of x and h. Rows of x that no block reads get zeros."""
    edges, hidden = h.shape
    tile_e, step_k, warps = BACKWARD_INPUT
    shares = _units(blocks, step_k, 0, x.device)
    read = sum(inputs * (2 if m else 1) for m, inputs in zip(blocks[::8], blocks[3::8], strict=True))
    dx = torch.empty_like(x) if read == len(x) else torch.zeros_like(x)
    parts = h.new_empty(sum(count for _, count, _ in shares), edges, hidden, dtype=torch.float32)
    widest = max(blocks[6::8])
    tile_n = min(128, _power(widest))
    for paired, count, table in shares if edges else []:
        _conv_backward_input_kernel[(triton.cdiv(edges, tile_e), count)](
            dy, x, h, w, dx, parts, table, edges, UNIT=UNIT, HID=hidden, PAIRED=paired, BE=tile_e, BK=step_k, BN=tile_n,
            ONE_TILE=widest <= tile_n, PRECISION=_precision(x.dtype), num_warps=warps,
        )  # fmt: skip
    return dx, parts.sum(0).to(h.dtype)


def conv_backward_weight(dy: Tensor, x: Tensor, h: Tensor, rows: int, blocks: tuple[int, ...]) -> Tensor:
    """The gradient of w, float32 (rows, HID); the edges are split in a fixed way and the parts summed."""
    edges, hidden = h.shape
    wide = x.dtype == torch.float32
    tile_e, step_k, tile_n, per_processor, warps = BACKWARD_WEIGHT_FP32 if wide else BACKWARD_WEIGHT
    shares = _units(blocks, step_k, tile_n, x.device)
    wanted = max(1, _processors(x.device) * per_processor // sum(count for _, count, _ in shares))
    per_program = triton.cdiv(triton.cdiv(max(edges, 1), wanted), tile_e) * tile_e
    splits = triton.cdiv(max(edges, 1), per_program)
    dw = h.new_empty(splits, rows, hidden, dtype=torch.float32)
    for paired, count, table in shares:
        _conv_backward_weight_kernel[(splits, count)](
            dy, x, h, dw, table, edges, per_program, rows, UNIT=UNIT, HID=hidden, PAIRED=paired, BE=tile_e, BK=step_k,
            BN=tile_n, PRECISION=_precision(x.dtype), num_warps=warps,
        )  # fmt: skip
    return dw[0] if splits == 1 else dw.sum(0)


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


# Rotations


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
    tile_e, tile_c, warps = ROTATE
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
    tile_e, tile_c, warps = ROTATE_BACK
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


# Sums and attention over the edges of a node


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
        tile = min(1024, _power(width))
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
    tiles = {"BH": _power(heads, 1), "BV": _power(value_size, 1), "BK": _power(key_size, 1)}
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


# Norm


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
    wide = _power(channels, 1)
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
