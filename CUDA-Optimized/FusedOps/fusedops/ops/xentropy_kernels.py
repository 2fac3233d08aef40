"""Triton kernels of `xentropy`, one program per row of (rows, classes) logits.

The log-sum-exp is made in one pass (the online softmax of Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867).
Rows of up to 32,768 classes stay in registers, so that loss and gradient cost one read and one write; longer ones
are read again for the gradient, mostly from the L2 cache. Offsets of rows are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import ceil_div, device_guard, next_power_of_2, processors, stages_that_fit

# (up to so many classes, warps, programs per multiprocessor, stages) for rows that stay in registers; longer rows take
# the form in chunks. With 2 stages or more the next rows are on their way to shared memory.
ROWS = (
    (1024, 2, 16, 2),
    (2048, 4, 8, 2),
    (4096, 8, 4, 1),
    (8192, 8, 2, 3),
    (16384, 8, 1, 3),
    (32768, 16, 1, 3),
)
# For longer rows: (up to so many programs per multiprocessor, classes in a chunk, warps). There are as many programs as
# rows fit into KEPT bytes, or as can be where not one each fits.
CHUNKS = ((1, 16384, 32), (64, 8192, 16))
KEPT = 40 << 20  # of the L2 cache of an H100 or H200, which has 50 MiB
GRADIENT = (4096, 8)  # classes in a program, warps, for the gradient alone
SCALE = (4096, 8, 4)  # elements at a time, warps, programs per multiprocessor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(x, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(x / softcap), by the logistic function."""
    if SOFTCAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x


@triton.jit
def _derivative(
    x, lse, columns, target, scale, classes, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The gradient of one row's loss times `scale`, by its (capped) logits."""
    gradient = tl.exp2((x - lse) * LOG2_E) * (1.0 + 2.0 * z_loss * lse)
    if SMOOTH:
        gradient -= smoothing / classes
    gradient = tl.where(columns == target, gradient - (1.0 - smoothing), gradient)
    if SOFTCAP:
        gradient *= 1.0 - (x / softcap) * (x / softcap)
    return gradient * scale


@triton.jit
def _row_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr, gradient_ptr, count_ptr,
    rows, classes, stride, gradient_stride, ignore_index, smoothing, z_loss, softcap,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows in registers. Nothing in the loop branches, so that the next row can be fetched meanwhile."""
    columns = tl.arange(0, BLOCK)
    inside = columns < classes
    wide_stride = tl.cast(stride, tl.int64)
    wide_gradient_stride = tl.cast(gradient_stride, tl.int64)
    scale = 1.0
    if MEAN:
        scale = 1.0 / tl.load(count_ptr).to(tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(logits_ptr + row * wide_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
        target = tl.load(target_ptr + row)
        if SOFTCAP:
            x = tl.where(inside, _capped(x, softcap, SOFTCAP), -float("inf"))
        largest = tl.max(x, 0)
        base = tl.where(largest == -float("inf"), 0.0, largest)
        lse = largest + tl.log(tl.sum(tl.exp2((x - base) * LOG2_E), 0))
        at_target = tl.sum(tl.where(columns == target, x, 0.0), 0)
        # A target outside the classes gives NaN.
        at_target = tl.where(target < 0, float("nan"), tl.where(target < classes, at_target, float("nan")))
        loss = lse - (1.0 - smoothing) * at_target + z_loss * lse * lse
        if SMOOTH:
            loss -= smoothing * (tl.sum(tl.where(inside, x, 0.0), 0) / classes)
        counts = target != ignore_index
        tl.store(loss_ptr + row, tl.where(counts, loss * scale, 0.0))
        tl.store(lse_ptr + row, lse)
        if GRADIENT:
            gradient = _derivative(x, lse, columns, target, scale, classes, smoothing, z_loss, softcap, SMOOTH, SOFTCAP)
            gradient = tl.where(counts, gradient, 0.0).to(gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + row * wide_gradient_stride + columns, gradient, mask=inside)


@triton.jit
def _loss_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr, gradient_ptr, count_ptr,
    rows, classes, stride, gradient_stride, ignore_index, smoothing, z_loss, softcap,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows in chunks, each read twice: few rows at a time, so that the second reading finds them in the L2 cache."""
    wide_stride = tl.cast(stride, tl.int64)
    wide_gradient_stride = tl.cast(gradient_stride, tl.int64)
    scale = 1.0
    if MEAN:
        scale = 1.0 / tl.load(count_ptr).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row_ptr = logits_ptr + row * wide_stride
        row_gradient_ptr = gradient_ptr
        if GRADIENT:
            row_gradient_ptr = gradient_ptr + row * wide_gradient_stride
        target = tl.load(target_ptr + row)
        if target == ignore_index:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
            if GRADIENT:
                for start in range(0, classes, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    zero = tl.zeros((BLOCK,), gradient_ptr.dtype.element_ty)
                    tl.store(row_gradient_ptr + columns, zero, mask=columns < classes)
        else:
            known = (target >= 0) & (target < classes)
            # A target outside the classes gives NaN instead of reading somewhere else.
            at_target = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
            at_target = _capped(at_target, softcap, SOFTCAP)
            base = -float("inf")
            total = 0.0
            level = 0.0
            for start in range(0, classes, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < classes
                x = tl.load(row_ptr + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last")
                x = _capped(x.to(tl.float32), softcap, SOFTCAP)
                if SOFTCAP:
                    x = tl.where(inside, x, -float("inf"))
                if SMOOTH:
                    level += tl.sum(tl.where(inside, x, 0.0), 0)
                largest = tl.maximum(base, tl.max(x, 0))
                origin = tl.where(largest == -float("inf"), 0.0, largest)
                total = total * tl.exp2((base - origin) * LOG2_E) + tl.sum(tl.exp2((x - origin) * LOG2_E), 0)
                base = largest
            lse = base + tl.log(total)
            loss = lse - (1.0 - smoothing) * at_target + z_loss * lse * lse
            if SMOOTH:
                loss -= smoothing * (level / classes)
            tl.store(loss_ptr + row, loss * scale)
            tl.store(lse_ptr + row, lse)
            if GRADIENT:
                for start in range(0, classes, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    inside = columns < classes
                    x = tl.load(row_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_first")
                    x = _capped(x.to(tl.float32), softcap, SOFTCAP)
                    gradient = _derivative(
                        x, lse, columns, target, scale, classes, smoothing, z_loss, softcap, SMOOTH, SOFTCAP
                    )
                    tl.store(row_gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    upstream_ptr, logits_ptr, target_ptr, lse_ptr, gradient_ptr,
    classes, upstream_stride, stride, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < classes
    target = tl.load(target_ptr + row)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if target != ignore_index:
        scale = tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
        lse = tl.load(lse_ptr + row)
        x = tl.load(logits_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        x = _capped(x, softcap, SOFTCAP)
        gradient = _derivative(x, lse, columns, target, scale, classes, smoothing, z_loss, softcap, SMOOTH, SOFTCAP)
    target_ptr = gradient_ptr + row * classes + columns
    tl.store(target_ptr, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, rows, width, stride, factor_stride, ONE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    needed = True
    if ONE:
        needed = factor != 1.0  # the usual case costs one load
    wide_stride = tl.cast(stride, tl.int64)
    if needed:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            start_ptr = x_ptr + row * wide_stride
            if not ONE:
                factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
            if factor != 1.0:
                for start in range(0, width, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    inside = columns < width
                    x = tl.load(start_ptr + columns, mask=inside, other=0.0).to(tl.float32) * factor
                    tl.store(start_ptr + columns, x.to(x_ptr.dtype.element_ty), mask=inside)


def loss(
    logits: Tensor, target: Tensor, losses: Tensor, lse: Tensor, gradient: Tensor | None, count: Tensor | None,
    ignore_index: int, smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """Fill losses and lse (rows,), and `gradient`, which may be the logits themselves; both over `count` if given."""
    rows, classes = logits.shape
    tensors = (logits, target, losses, lse, gradient, count)
    scalars = (0 if gradient is None else gradient.stride(0), ignore_index, smoothing, z_loss, softcap)
    flags = {
        "GRADIENT": gradient is not None, "MEAN": count is not None, "SMOOTH": smoothing > 0, "SOFTCAP": softcap > 0,
    }  # fmt: skip
    tuned = next((row for row in ROWS if classes <= row[0]), None)
    with device_guard(logits):
        arguments = (*tensors, rows, classes, logits.stride(0), *scalars)
        if tuned is None:
            room = KEPT // (classes * logits.element_size() * processors(logits.device))
            _, block, warps = next(chunk for chunk in CHUNKS if room <= chunk[0] or chunk is CHUNKS[-1])
            per_processor = min(room, 64 // warps) or 64 // warps
            programs = min(rows, per_processor * processors(logits.device))
            _loss_kernel[(programs,)](*arguments, **flags, BLOCK=block, num_warps=warps)
        else:
            _, warps, per_processor, stages = tuned
            block = next_power_of_2(classes)
            stages = stages_that_fit(stages, block * logits.element_size(), logits.device)
            programs = min(rows, per_processor * processors(logits.device))
            _row_kernel[(programs,)](*arguments, **flags, STAGES=stages, BLOCK=block, num_warps=warps)


def gradient(
    upstream: Tensor, logits: Tensor, target: Tensor, lse: Tensor, out: Tensor, ignore_index: int, smoothing: float,
    z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """Fill `out` with the gradient of the losses times `upstream` (rows,), from the logits and their log-sum-exp."""
    rows, classes = logits.shape
    block, warps = GRADIENT
    block = min(block, next_power_of_2(classes))
    with device_guard(logits):
        _gradient_kernel[(rows, ceil_div(classes, block))](
            upstream, logits, target, lse, out, classes, upstream.stride(0), logits.stride(0), ignore_index, smoothing,
            z_loss, softcap, SMOOTH=smoothing > 0, SOFTCAP=softcap > 0, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def scale_(x: Tensor, factor: Tensor) -> None:
    """x (rows, width) times a factor of one element or one per row, in place; nothing is touched where it is 1."""
    block, warps, per_processor = SCALE
    rows, width = x.shape
    programs = min(rows, per_processor * processors(x.device))
    one = factor.numel() == 1
    with device_guard(x):
        _scale_kernel[(programs,)](
            x, factor, rows, width, x.stride(0), 0 if one else factor.stride(0), ONE=one,
            BLOCK=min(block, next_power_of_2(width)), num_warps=warps,
        )  # fmt: skip
