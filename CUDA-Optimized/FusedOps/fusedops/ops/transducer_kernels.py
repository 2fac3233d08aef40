"""Triton kernels of `transducer`: sums of every frame with every symbol, and the loss by forward and backward scans.

A row of the lattice (all symbols of a frame) is one vector; along it x_u = log(e^(x_{u-1} + a_u) + e^b_u) is an
associative scan, so that a sequence costs as many steps as it has frames.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2

JOINT = (8, 256, 4)  # symbols (or frames) and features in a tile, warps
CLASSES = (4096, 4)  # classes at a time, warps
NOTHING = tl.constexpr(-1e30)  # log of 0, but finite, so that differences of two are no NaN


@triton.jit
def _joint(f, g, seed, offset, RELU: tl.constexpr, dropout, DROPOUT: tl.constexpr):
    """The joint's value and what its gradient is multiplied by."""
    value = f + g
    factor = value * 0.0 + 1.0
    if RELU:
        factor = tl.where(value > 0.0, 1.0, 0.0)
        value = tl.where(value < 0.0, 0.0, value)
    if DROPOUT:
        kept = tl.rand(seed, offset) >= dropout
        factor = tl.where(kept, factor / (1.0 - dropout), 0.0)
        value = tl.where(kept, value / (1.0 - dropout), 0.0)
    return value, factor


@triton.jit
def _length(length_ptr, item, least, most):
    """An item's length, at least ``least`` and at most ``most``."""
    length = tl.load(length_ptr + item).to(tl.int64)
    return tl.minimum(tl.maximum(length, least), most)


@triton.jit
def _span(end_ptr, item, items, rows):
    """(first row, end) of an item in a packed tensor of ``rows`` rows, all of which belong to some item."""
    start = tl.load(end_ptr + item - 1, mask=item > 0, other=0).to(tl.int64)
    end = tl.load(end_ptr + item, mask=item < items - 1, other=0).to(tl.int64)
    return start, tl.where(item < items - 1, end, rows)


@triton.jit
def _joint_kernel(
    f_ptr, g_ptr, f_len_ptr, g_len_ptr, end_ptr, seed_ptr, y_ptr, items, frames, symbols, width, rows, padding, dropout,
    PACKED: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    item = (tl.program_id(0) // frames).to(tl.int64)
    frame = tl.program_id(0) % frames
    symbol = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U).to(tl.int64)
    feature = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    own_frames = _length(f_len_ptr, item, 0, frames)
    own_symbols = _length(g_len_ptr, item, 0, symbols)
    valid = symbol < tl.where(frame < own_frames, own_symbols, 0)
    inside = (feature < width)[None, :]
    f = tl.load(f_ptr + (item * frames + frame) * width + feature, mask=feature < width, other=0.0).to(tl.float32)
    source = g_ptr + (item * symbols + symbol[:, None]) * width + feature[None, :]
    g = tl.load(source, mask=valid[:, None] & inside, other=0.0).to(tl.float32)
    dense = ((item * frames + frame) * symbols + symbol[:, None]) * width + feature[None, :]
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    y, _ = _joint(f[None, :], g, seed, dense, RELU, dropout, DROPOUT)
    if PACKED:
        start, end = _span(end_ptr, item, items, rows)
        if end - start == own_frames * own_symbols:
            target = start + frame * own_symbols + symbol
            valid = valid & (target >= 0) & (target < rows)
            target = target[:, None] * width + feature[None, :]
            tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=valid[:, None] & inside)
        elif tl.program_id(1) == 0:  # lengths and offsets contradict each other
            for row in range(tl.maximum(start, 0) + frame, tl.minimum(end, rows), frames):
                nothing = tl.full((BLOCK_H,), float("nan"), tl.float32).to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + row * width + feature, nothing, mask=feature < width)
    else:
        y = tl.where(valid[:, None], y, padding)
        tl.store(y_ptr + dense, y.to(y_ptr.dtype.element_ty), mask=(symbol < symbols)[:, None] & inside)


@triton.jit
def _joint_backward_kernel(
    dy_ptr, f_ptr, g_ptr, f_len_ptr, g_len_ptr, end_ptr, seed_ptr, out_ptr, frames, symbols, width, rows, dropout,
    OF_F: tl.constexpr, PACKED: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    count = frames if OF_F else symbols
    item = (tl.program_id(0) // count).to(tl.int64)
    own = tl.program_id(0) % count
    feature = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    inside = feature < width
    own_frames = _length(f_len_ptr, item, 0, frames)
    own_symbols = _length(g_len_ptr, item, 0, symbols)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    start_row = item * 0
    if PACKED:
        start_row = tl.load(end_ptr + item - 1, mask=item > 0, other=0).to(tl.int64)
    total = tl.zeros((BLOCK, BLOCK_H), tl.float32)
    other = own_symbols if OF_F else own_frames
    other = tl.where(own < (own_frames if OF_F else own_symbols), other, 0)  # nothing to add beyond the item's length
    for start in range(0, other, BLOCK):
        step = (start + tl.arange(0, BLOCK).to(tl.int64))[:, None]
        frame = own if OF_F else step
        symbol = step if OF_F else own
        mask = (step < other) & inside
        f = tl.load(f_ptr + (item * frames + frame) * width + feature, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + (item * symbols + symbol) * width + feature, mask=mask, other=0.0).to(tl.float32)
        dense = ((item * frames + frame) * symbols + symbol) * width + feature
        source = dense
        if PACKED:
            source = start_row + frame * own_symbols + symbol
            mask = mask & (source >= 0) & (source < rows)
            source = source * width + feature
        dy = tl.load(dy_ptr + source, mask=mask, other=0.0).to(tl.float32)
        _, factor = _joint(f, g, seed, dense, RELU, dropout, DROPOUT)
        total += dy * factor
    target = out_ptr + tl.program_id(0).to(tl.int64) * width + tl.reshape(feature, (BLOCK_H,))
    tl.store(target, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=tl.reshape(inside, (BLOCK_H,)))


@triton.jit
def _place(row, end_ptr, symbols_ptr, frames, symbols, PACKED: tl.constexpr, ITEMS: tl.constexpr, items):
    """(item, frame, symbol) of a row of the dense or packed lattice."""
    if PACKED:
        index = tl.arange(0, ITEMS)
        ends = tl.load(end_ptr + index, mask=index < items, other=0).to(tl.int64)
        ends = tl.where(index < items, ends, 9223372036854775807)
        item = tl.minimum(tl.sum((ends <= row).to(tl.int64), 0), items - 1)
        start = tl.max(tl.where(ends <= row, ends, 0), 0)
        own_symbols = _length(symbols_ptr, item, 0, symbols - 1) + 1
        frame = (row - start) // own_symbols
        symbol = (row - start) % own_symbols
    else:
        item = row // (frames * symbols)
        frame = (row // symbols) % frames
        symbol = row % symbols
    return item, frame, symbol


@triton.jit
def _scores_kernel(
    x_ptr, label_ptr, f_len_ptr, y_len_ptr, end_ptr, lse_ptr, blank_ptr, symbol_ptr, items, frames, symbols, classes,
    blank, label_stride, PACKED: tl.constexpr, ITEMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    item, frame, symbol = _place(row, end_ptr, y_len_ptr, frames, symbols, PACKED, ITEMS, items)
    labels = _length(y_len_ptr, item, 0, symbols - 1)
    if symbol <= tl.where(frame < _length(f_len_ptr, item, 0, frames), labels, -1):
        base = -float("inf")
        total = 0.0
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * classes + column, mask=column < classes, other=-float("inf")).to(tl.float32)
            largest = tl.maximum(base, tl.max(x, 0))
            total = total * tl.exp(base - largest) + tl.sum(tl.exp(x - largest), 0)
            base = largest
        lse = base + tl.log(total)
        place = (item * frames + frame) * symbols + symbol
        tl.store(lse_ptr + row, lse)
        tl.store(blank_ptr + place, tl.load(x_ptr + row * classes + blank).to(tl.float32) - lse)
        label = tl.load(label_ptr + item * label_stride + symbol, mask=symbol < labels, other=0)
        known = (symbol < labels) & (label >= 0) & (label < classes)
        score = tl.load(x_ptr + row * classes + label, mask=known, other=float("nan")).to(tl.float32)
        tl.store(symbol_ptr + place, score - lse, mask=symbol < labels)


@triton.jit
def _add_logs(a, b):
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _chain(a1, b1, a2, b2):
    """Two steps x -> log(e^(x + a) + e^b) as one."""
    return a1 + a2, _add_logs(b1 + a2, b2)


@triton.jit
def _lattice_kernel(
    f_len_ptr, y_len_ptr, end_ptr, blank_ptr, symbol_ptr, alpha_ptr, beta_ptr, loss_ptr, items, frames, symbols, rows,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    count = tl.load(f_len_ptr + item).to(tl.int64)
    labels = tl.load(y_len_ptr + item).to(tl.int64)
    sound = (count >= 1) & (count <= frames) & (labels >= 0) & (labels < symbols)
    if PACKED:
        start, end = _span(end_ptr, item, items, rows)
        sound = sound & (start >= 0) & (end <= rows) & (end - start == count * (labels + 1))
    count = tl.where(sound, count, 0)
    labels = tl.where(sound, labels, 0)
    u = tl.arange(0, BLOCK)
    inside = u <= labels
    place = item * frames * symbols + u
    row = tl.where(u == 0, 0.0, NOTHING)
    if tl.program_id(1) == 0:
        for t in range(0, count):
            here = place + t * symbols
            come = tl.load(symbol_ptr + here - 1, mask=(u > 0) & inside, other=NOTHING)
            _, row = tl.associative_scan((come, row), 0, _chain)
            tl.store(alpha_ptr + here, row, mask=inside)
            row += tl.load(blank_ptr + here, mask=inside, other=NOTHING)
            row = tl.maximum(row, NOTHING)
    else:
        row = tl.where(u == labels, 0.0, NOTHING)
        for back in range(0, count):
            here = place + (count - 1 - back) * symbols
            row += tl.load(blank_ptr + here, mask=inside, other=NOTHING)
            row = tl.maximum(row, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            leave = tl.load(symbol_ptr + here, mask=u < labels, other=NOTHING)
            _, row = tl.associative_scan((leave, row), 0, _chain, reverse=True)
            tl.store(beta_ptr + here, row, mask=inside)
        loss = -tl.sum(tl.where(u == 0, row, 0.0), 0)
        tl.store(loss_ptr + item, tl.where(sound, loss, float("nan")))


@triton.jit
def _gradient_kernel(
    factor_ptr, x_ptr, label_ptr, f_len_ptr, y_len_ptr, end_ptr, lse_ptr, blank_ptr, symbol_ptr, alpha_ptr, beta_ptr,
    loss_ptr, dx_ptr, items, frames, symbols, classes, blank, label_stride, PACKED: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    item, frame, symbol = _place(row, end_ptr, y_len_ptr, frames, symbols, PACKED, ITEMS, items)
    labels = _length(y_len_ptr, item, 0, symbols - 1)
    count = _length(f_len_ptr, item, 0, frames)
    limit = tl.where(frame < count, labels, -1)
    real = symbol <= limit
    place = (item * frames + frame) * symbols + symbol
    factor = tl.load(factor_ptr + item).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=real, other=0.0)
    through = tl.load(alpha_ptr + place, mask=real, other=NOTHING) + tl.load(loss_ptr + item)
    last = symbol == tl.where(frame == count - 1, labels, -2)
    after = tl.load(beta_ptr + place + symbols, mask=frame < count - 1, other=NOTHING)
    after = tl.where(last, 0.0, after)
    by_blank = tl.exp(through + tl.load(blank_ptr + place, mask=real, other=NOTHING) + after) * factor
    beside = tl.load(beta_ptr + place + 1, mask=symbol < limit, other=NOTHING)
    score = tl.load(symbol_ptr + place, mask=symbol < limit, other=NOTHING)
    by_label = tl.exp(through + score + beside) * factor
    label = tl.load(label_ptr + item * label_stride + symbol, mask=symbol < limit, other=-1)
    known = tl.where(real, classes, 0)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * classes + column, mask=column < known, other=0.0).to(tl.float32)
        dx = tl.exp(x - lse) * (by_blank + by_label)
        dx -= tl.where(column == blank, by_blank, 0.0) + tl.where(column == label, by_label, 0.0)
        dx = tl.where(column < known, dx, 0.0)
        tl.store(dx_ptr + row * classes + column, dx.to(dx_ptr.dtype.element_ty), mask=column < classes)


def joint(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, ends: Tensor | None, seed: Tensor, relu: bool, dropout: float,
    padding: float, y: Tensor,
) -> None:  # fmt: skip
    """Fill y, dense (items, frames, symbols, width) or, with `ends`, packed (rows, width)."""
    items, frames, width = f.shape
    block_u, block_h, warps = JOINT
    block_h = min(block_h, next_power_of_2(width))
    grid = (items * frames, ceil_div(g.shape[1], block_u), ceil_div(width, block_h))
    with device_guard(f):
        _joint_kernel[grid](
            f, g, f_len, g_len, ends, seed, y, items, frames, g.shape[1], width, y.shape[0], padding, dropout,
            PACKED=ends is not None, RELU=relu, DROPOUT=dropout > 0, BLOCK_U=block_u, BLOCK_H=block_h, num_warps=warps,
        )  # fmt: skip


def joint_backward(
    dy: Tensor, f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, ends: Tensor | None, seed: Tensor, relu: bool,
    dropout: float, df: Tensor, dg: Tensor,
) -> None:  # fmt: skip
    """Fill df and dg."""
    items, frames, width = f.shape
    symbols = g.shape[1]
    block, block_h, warps = JOINT
    block_h = min(block_h, next_power_of_2(width))
    with device_guard(f):
        for of_f, out in ((True, df), (False, dg)):
            grid = (items * (frames if of_f else symbols), ceil_div(width, block_h))
            _joint_backward_kernel[grid](
                dy, f, g, f_len, g_len, ends, seed, out, frames, symbols, width, dy.shape[0], dropout, OF_F=of_f,
                PACKED=ends is not None, RELU=relu, DROPOUT=dropout > 0, BLOCK=block, BLOCK_H=block_h, num_warps=warps,
            )  # fmt: skip


def _lattice_shape(x: Tensor, label: Tensor, ends: Tensor | None, blank: int) -> tuple[tuple, dict]:
    items, symbols = label.shape[0], label.shape[1] + 1
    classes = x.shape[-1]
    flags = {
        "PACKED": ends is not None, "ITEMS": next_power_of_2(items),
        "BLOCK": min(CLASSES[0], next_power_of_2(classes)), "num_warps": CLASSES[1],
    }  # fmt: skip
    return (symbols, classes, blank, label.stride(0)), flags


def loss(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, frames: int, blank: int,
    losses: Tensor, lse: Tensor, lattice: Tensor,
) -> None:  # fmt: skip
    """Fill losses (items,), lse (rows of x,) and lattice (4, items, frames, symbols): blank, label, alpha, beta."""
    items = label.shape[0]
    sizes, flags = _lattice_shape(x, label, ends, blank)
    rows = lse.numel()
    block = next_power_of_2(label.shape[1] + 1)
    with device_guard(x):
        _scores_kernel[(rows,)](
            x, label, f_len, y_len, ends, lse, lattice[0], lattice[1], items, frames, *sizes, **flags
        )
        _lattice_kernel[(items, 2)](
            f_len, y_len, ends, *lattice.unbind(0), losses, items, frames, sizes[0], rows, PACKED=ends is not None,
            BLOCK=block, num_warps=1 if block <= 128 else 4,
        )  # fmt: skip


def loss_backward(
    factor: Tensor, x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, frames: int,
    blank: int, losses: Tensor, lse: Tensor, lattice: Tensor, dx: Tensor,
) -> None:  # fmt: skip
    """Fill dx, of x's shape."""
    sizes, flags = _lattice_shape(x, label, ends, blank)
    with device_guard(x):
        _gradient_kernel[(lse.numel(),)](
            factor, x, label, f_len, y_len, ends, lse, *lattice.unbind(0), losses, dx, label.shape[0], frames, *sizes,
            **flags,
        )  # fmt: skip
