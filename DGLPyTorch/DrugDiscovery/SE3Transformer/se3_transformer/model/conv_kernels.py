"""Triton kernels of the convolution in edge frames, and the functions that launch them.

No kernel of this folder uses atomics or waits for the host; sums are taken in float32. Matrices of edges' components
are (rows, P), so that neighbouring threads take neighbouring edges (``frame_tables``); P is the number of edges E
padded with zeros to a multiple of 16, without which loads are neither wide nor asynchronous. HID: hidden width of the
radial profile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Edges x outputs of a forward tile, edges and inputs per program of the backward pass to inputs, and edges, inputs,
# outputs and programs per multiprocessor of the one to weights; (tile..., warps). Registers, not arithmetic, set these
# sizes: none of them spills on sm_90. `benchmark --mode tiles` measures others; those of the backward pass are the
# fastest for training steps on full graphs (73,440 edges), and no slower for bonds.
FORWARD = (64, 32, 4)
BACKWARD_INPUT = (128, 16, 4)
BACKWARD_WEIGHT = (128, 4, 64, 4, 8)
# Float32 takes twice the shared memory, of which many GPUs have no more than 99 KiB for a program: these fit there, and
# so do those of 16-bit types (compiled for sm_89).
BACKWARD_INPUT_FP32 = (64, 16, 4)
BACKWARD_WEIGHT_FP32 = (64, 2, 64, 4, 4)
UNIT = 9  # numbers that describe a program's share of a block


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _precision(dtype: torch.dtype) -> str:
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


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
    wide = x.dtype == torch.float32
    tile_e, step_k, warps = BACKWARD_INPUT_FP32 if wide else BACKWARD_INPUT
    shares = _units(blocks, step_k, 0, x.device)
    read = sum(inputs * (2 if m else 1) for m, inputs in zip(blocks[::8], blocks[3::8], strict=True))
    dx = torch.empty_like(x) if read == len(x) else torch.zeros_like(x)
    parts = h.new_empty(sum(count for _, count, _ in shares), edges, hidden, dtype=torch.float32)
    widest = max(blocks[6::8])
    most = 64 if wide else 128  # outputs at once; half of it in a loop, whose loads run ahead
    tile_n = max(16, triton.next_power_of_2(widest)) if widest <= most else most // 2
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
