"""Triton kernels of the multi-tensor operations, and the pieces that the optimizers' kernels share with them.

Every kernel walks the work items of a `TensorTable` with persistent programs: program i takes items i, i + P, i + 2P
... for P programs, so that the work's division, and with it the order of every sum, is the same in each run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int16: tl.int16,
}

# Tuning values.
BLOCK = 2048  # elements per step of a program
NUM_WARPS = 4
PARTIALS = 1024  # partial sums read at once


@triton.jit
def item_of(items, number):
    """-> tensor, first element, elements, vectorised of a work item."""
    row = items + number * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32), tl.load(row + 3)


@triton.jit
def start_of(addresses, LIST: tl.constexpr, num_tensors, tensor, start, TYPE: tl.constexpr):
    """-> pointer to element ``start`` of a tensor of list ``LIST``."""
    return tl.load(addresses + LIST * num_tensors + tensor).to(tl.pointer_type(TYPE)) + start


@triton.jit
def places(pointer, offsets, VECTOR: tl.constexpr):
    """-> pointers to elements; the compiler is told of the alignment, which it cannot see through a loaded address."""
    pointers = pointer + offsets
    if VECTOR:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def within(offsets, length, VECTOR: tl.constexpr):
    """-> mask of the offsets below ``length``, known to be constant over 16 neighbours where vectorised."""
    if VECTOR:
        length = length // 16 * 16
    return offsets < length


@triton.jit
def sum_of_partials(partials, count, SIZE: tl.constexpr):
    """-> the sum of ``count`` float32 numbers, always added in the same order."""
    total = tl.zeros([SIZE], tl.float32)
    for begin in range(0, count, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        total += tl.load(partials + offsets, mask=offsets < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def is_finite(x):
    """-> whether a float32 number is neither infinite nor not a number."""
    return tl.abs(x) < float("inf")


@triton.jit
def clip_factor(norm, max_norm):
    """-> min(1, max_norm / (norm + 1e-6)); not a number where the norm is none, as in torch's clip_grad_norm_."""
    factor = max_norm / (norm + 1e-6)
    return tl.where(factor > 1.0, 1.0, factor)


@triton.jit
def _scale_span(x, y, length, factor, Y: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr):
    worst = tl.zeros([SIZE], tl.float32)
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        values = tl.load(places(x, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32)
        worst = tl.where(is_finite(values), worst, 1.0)
        tl.store(places(y, offsets, VECTOR), (values * factor).to(Y), mask=mask)
    return tl.max(worst, 0)


@triton.jit
def scale_kernel(
    addresses, items, num_items, num_tensors, factor, found_inf,
    FACTOR_LOADED: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """y = x * factor (lists x, y); ``found_inf`` becomes 1 where an x is not finite."""
    if FACTOR_LOADED:
        factor = tl.load(factor).to(tl.float32)
    bad = 0.0
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        x = start_of(addresses, 0, num_tensors, tensor, start, X)
        y = start_of(addresses, 1, num_tensors, tensor, start, Y)
        if vectorised != 0:
            bad = tl.maximum(bad, _scale_span(x, y, length, factor, Y, True, SIZE))
        else:
            bad = tl.maximum(bad, _scale_span(x, y, length, factor, Y, False, SIZE))
    if bad > 0:
        tl.store(found_inf, 1.0)


@triton.jit
def _axpby_span(
    x, y, out, length, a, b, OUT: tl.constexpr, CHECK: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr
):
    worst = tl.zeros([SIZE], tl.float32)
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        x_values = tl.load(places(x, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32)
        y_values = tl.load(places(y, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32)
        if CHECK != 1:
            worst = tl.where(is_finite(x_values), worst, 1.0)
        if CHECK != 0:
            worst = tl.where(is_finite(y_values), worst, 1.0)
        tl.store(places(out, offsets, VECTOR), (a * x_values + b * y_values).to(OUT), mask=mask)
    return tl.max(worst, 0)


@triton.jit
def axpby_kernel(
    addresses, items, num_items, num_tensors, a, b, found_inf,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, CHECK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out = a x + b y (lists x, y, out); ``found_inf`` becomes 1 where x (CHECK 0), y (1) or either (-1) is not
    finite.
    """
    bad = 0.0
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        x = start_of(addresses, 0, num_tensors, tensor, start, X)
        y = start_of(addresses, 1, num_tensors, tensor, start, Y)
        out = start_of(addresses, 2, num_tensors, tensor, start, OUT)
        if vectorised != 0:
            bad = tl.maximum(bad, _axpby_span(x, y, out, length, a, b, OUT, CHECK, True, SIZE))
        else:
            bad = tl.maximum(bad, _axpby_span(x, y, out, length, a, b, OUT, CHECK, False, SIZE))
    if bad > 0:
        tl.store(found_inf, 1.0)


@triton.jit
def _squares_span(x, length, VECTOR: tl.constexpr, SIZE: tl.constexpr):
    total = tl.zeros([SIZE], tl.float32)
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        values = tl.load(places(x, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32)
        total += values * values
    return tl.sum(total, 0)


@triton.jit
def _largest_span(x, length, VECTOR: tl.constexpr, SIZE: tl.constexpr):
    largest = tl.zeros([SIZE], tl.float32)
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        values = tl.abs(tl.load(places(x, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(is_finite(values), values, float("inf")))
    return tl.max(largest, 0)


@triton.jit
def squares_kernel(
    addresses, items, num_items, num_tensors, partials, item_partials,
    LIST: tl.constexpr, X: tl.constexpr, PER_ITEM: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """First stage of a norm: the sum of squares by program, float32 [P], and (``PER_ITEM``) by work item, float32 [C].

    ``LARGEST``: by work item the largest magnitude instead.
    """
    total = 0.0
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        x = start_of(addresses, LIST, num_tensors, tensor, start, X)
        if vectorised != 0:
            squares = _squares_span(x, length, True, SIZE)
        else:
            squares = _squares_span(x, length, False, SIZE)
        total += squares
        if PER_ITEM:
            if LARGEST:
                tl.store(item_partials + number, _largest_span(x, length, False, SIZE))
            else:
                tl.store(item_partials + number, squares)
    tl.store(partials + tl.program_id(0), total)


@triton.jit
def norms_kernel(
    partials, count, item_partials, first_item, num_tensors, factor, norm, tensor_norms,
    FACTOR_LOADED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Second stage: program i < N writes the norm of tensor i, program N the norm of all; both times ``factor``."""
    if FACTOR_LOADED:
        factor = tl.abs(tl.load(factor).to(tl.float32))
    number = tl.program_id(0)
    if number < num_tensors:
        first = tl.load(first_item + number)
        last = tl.load(first_item + number + 1)
        tl.store(tensor_norms + number, tl.sqrt(sum_of_partials(item_partials + first, last - first, SIZE)) * factor)
    else:
        tl.store(norm, tl.sqrt(sum_of_partials(partials, count, SIZE)) * factor)


@triton.jit
def _multiply_span(x, length, factor, X: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr):
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        values = tl.load(places(x, offsets, VECTOR), mask=mask).to(tl.float32)
        tl.store(places(x, offsets, VECTOR), (values * factor).to(X), mask=mask)


@triton.jit
def clip_kernel(
    addresses, items, num_items, num_tensors, partials, count, max_norm, norm,
    X: tl.constexpr, SIZE: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Second launch of a clip: every program adds the partial sums, then scales its items if the norm is above the
    limit.
    """
    total = tl.sqrt(sum_of_partials(partials, count, PARTIALS))
    if tl.program_id(0) == 0:
        tl.store(norm, total)
    factor = clip_factor(total, max_norm)
    if factor != 1.0:
        for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
            tensor, start, length, vectorised = item_of(items, number)
            x = start_of(addresses, 0, num_tensors, tensor, start, X)
            if vectorised != 0:
                _multiply_span(x, length, factor, X, True, SIZE)
            else:
                _multiply_span(x, length, factor, X, False, SIZE)
