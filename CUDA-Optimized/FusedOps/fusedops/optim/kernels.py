"""Triton kernels of the optimizers: one launch updates every tensor of a bucket (tensors of one combination of dtypes).

Lists of a bucket's table: 0 gradients, 1 parameters, 2 ... the moments, then master weights or remainders if there
are any. All scalars that change from step to step can lie in device memory: the learning rate, the gradient scale,
the flag of an overflow, the partial sums of the global norm, the step counters. So a captured CUDA graph stays right
when they change.

Weights have four forms (``MASTER``): 0 the parameter itself, 1 a float32 master beside it, 2 a bfloat16 parameter and
the 16 bits of the float32 master that it lacks, 3 a bfloat16 parameter, rounded stochastically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.ops.multi_tensor_kernels import is_finite, item_of, places, start_of, sum_of_partials, within

# Tuning values.
BLOCK = 1024  # elements per step of a program
NUM_WARPS = 4  # launched without fused multiply-adds: every form of a kernel then rounds the same way
TENSORS = 1024  # step counters advanced at once

NONE, FP32, REMAINDER, STOCHASTIC = 0, 1, 2, 3


@triton.jit
def gate(
    scale, found_inf, partials, count, max_norm, clip_epsilon, sign, norm_out, found_out,
    SCALED: tl.constexpr, FOUND: tl.constexpr, NORMED: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """-> what gradients are multiplied by (sign / scale * clip coefficient), and whether the step is skipped (1.0 or
    0.0).
    """
    inverse = 1.0
    if SCALED:
        inverse = 1.0 / tl.load(scale).to(tl.float32)
    factor = sign * inverse
    skip = 0.0
    if FOUND:
        skip = tl.where(tl.load(found_inf).to(tl.float32) != 0.0, 1.0, 0.0)
    if NORMED:
        norm = tl.sqrt(sum_of_partials(partials, count, 1024)) * inverse
        if CHECKED:
            skip = tl.where(is_finite(norm), skip, 1.0)
        if CLIPPED:
            clip = max_norm / (norm + clip_epsilon)
            factor *= tl.where(clip > 1.0, 1.0, clip)
        if tl.program_id(0) == 0:
            tl.store(norm_out, norm)
    if tl.program_id(0) == 0:
        tl.store(found_out, skip)
    return factor, skip


@triton.jit
def advance(steps, num_tensors, skip, SIZE: tl.constexpr):
    for begin in range(0, num_tensors, SIZE):
        tensors = begin + tl.arange(0, SIZE)
        mask = tensors < num_tensors
        tl.store(steps + tensors, tl.load(steps + tensors, mask=mask) + (1.0 - skip), mask=mask)


@triton.jit
def is_last(ticket):
    """Whether all other programs of the launch are through; then the ticket is 0 again."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def mix(x):
    """A permutation of the 32-bit numbers in which every bit of the input moves half of the output's."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_key(seed, tensor, step):
    """-> two 32-bit keys of a tensor's random numbers in a step."""
    first = mix((seed + tensor.to(tl.int32)).to(tl.uint32))
    second = mix(step.to(tl.int32).to(tl.uint32))
    return first, second


@triton.jit
def read_weights(p, w, offsets, mask, MASTER: tl.constexpr, VECTOR: tl.constexpr):
    if MASTER == 1:
        x = tl.load(places(w, offsets, VECTOR), mask=mask, other=0.0)
    elif MASTER == 2:
        high = tl.load(places(p, offsets, VECTOR), mask=mask, other=0).to(tl.int32)
        low = tl.load(places(w, offsets, VECTOR), mask=mask, other=0).to(tl.int32)
        high -= (low < 0).to(tl.int32)
        x = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        x = tl.load(places(p, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def write_weights(p, w, x, offsets, mask, start, key, second_key, MASTER: tl.constexpr, VECTOR: tl.constexpr):
    if MASTER == 2:
        bits = x.to(tl.int32, bitcast=True)
        low = (bits << 16) >> 16
        high = (bits >> 16) + (low < 0).to(tl.int32)
        tl.store(places(p, offsets, VECTOR), high.to(tl.int16), mask=mask)
        tl.store(places(w, offsets, VECTOR), low.to(tl.int16), mask=mask)
    elif MASTER == 3:
        random = mix(mix((start + offsets).to(tl.uint32) + key) ^ second_key)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + (random & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        rounded = tl.where(is_finite(x), rounded, x)
        tl.store(places(p, offsets, VECTOR), rounded.to(p.dtype.element_ty), mask=mask)
    else:
        tl.store(places(p, offsets, VECTOR), x.to(p.dtype.element_ty), mask=mask)
        if MASTER == 1:
            tl.store(places(w, offsets, VECTOR), x, mask=mask)


@triton.jit
def load_as_float(pointer, offsets, mask, VECTOR: tl.constexpr):
    return tl.load(places(pointer, offsets, VECTOR), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_as_kept(pointer, x, offsets, mask, VECTOR: tl.constexpr):
    tl.store(places(pointer, offsets, VECTOR), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def zero_span(g, length, VECTOR: tl.constexpr, SIZE: tl.constexpr):
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        store_as_kept(g, tl.zeros([SIZE], tl.float32), offsets, within(offsets, length, VECTOR), VECTOR)


@triton.jit
def _adam_span(
    g, p, m, v, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, beta2, rest2, epsilon,
    correction1, root_correction2, MASTER: tl.constexpr, DECOUPLED: tl.constexpr, ZERO: tl.constexpr, VECTOR:
    tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        grad = load_as_float(g, offsets, mask, VECTOR) * factor
        x = read_weights(p, w, offsets, mask, MASTER, VECTOR)
        exp_avg = load_as_float(m, offsets, mask, VECTOR)
        exp_avg_sq = load_as_float(v, offsets, mask, VECTOR)
        if DECOUPLED:
            x -= lr * weight_decay * x
        else:
            grad += weight_decay * x
        exp_avg = beta1 * exp_avg + rest1 * grad
        exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
        x -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq) / root_correction2 + epsilon)
        store_as_kept(m, exp_avg, offsets, mask, VECTOR)
        store_as_kept(v, exp_avg_sq, offsets, mask, VECTOR)
        write_weights(p, w, x, offsets, mask, start, key, second_key, MASTER, VECTOR)
        if ZERO:
            store_as_kept(g, tl.zeros([SIZE], tl.float32), offsets, mask, VECTOR)


@triton.jit
def bias_correction(step, log_beta, CORRECTED: tl.constexpr):
    """-> 1 - beta ** step, in float64 since the difference is small at first; 1 where there is no correction."""
    if CORRECTED:
        result = (1.0 - tl.exp(step.to(tl.float64) * log_beta)).to(tl.float32)
    else:
        result = step * 0.0 + 1.0
    return result


@triton.jit
def adam_kernel(
    addresses, items, num_items, num_tensors, ticket, steps, scale, found_inf, partials, count, max_norm,
    clip_epsilon, sign, norm_out, found_out, seed, lr, weight_decay, beta1, rest1, log_beta1, beta2, rest2, log_beta2,
    epsilon, G: tl.constexpr, P: tl.constexpr, M: tl.constexpr, V: tl.constexpr, W: tl.constexpr, MASTER:
    tl.constexpr, SCALED: tl.constexpr, FOUND: tl.constexpr, NORMED: tl.constexpr, CHECKED: tl.constexpr, CLIPPED:
    tl.constexpr, ZERO: tl.constexpr, LR_LOADED: tl.constexpr, DECOUPLED: tl.constexpr, CORRECTED: tl.constexpr, SIZE:
    tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Adam (L2 decay) and AdamW (``DECOUPLED``). Lists: gradients, parameters, exp_avg, exp_avg_sq, weights."""
    factor, skip = gate(
        scale, found_inf, partials, count, max_norm, clip_epsilon, sign, norm_out, found_out,
        SCALED, FOUND, NORMED, CHECKED, CLIPPED,
    )  # fmt: skip
    if LR_LOADED:
        lr = tl.load(lr).to(tl.float32)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        g = start_of(addresses, 0, num_tensors, tensor, start, G)
        if skip == 0.0:
            step = tl.load(steps + tensor) + 1.0
            correction1 = bias_correction(step, log_beta1, CORRECTED)
            root_correction2 = tl.sqrt(bias_correction(step, log_beta2, CORRECTED))
            key, second_key = random_key(seed, tensor, step)
            p = start_of(addresses, 1, num_tensors, tensor, start, P)
            m = start_of(addresses, 2, num_tensors, tensor, start, M)
            v = start_of(addresses, 3, num_tensors, tensor, start, V)
            w = p
            if MASTER == 1 or MASTER == 2:
                w = start_of(addresses, 4, num_tensors, tensor, start, W)
            if vectorised != 0:
                _adam_span(
                    g, p, m, v, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, beta2, rest2,
                    epsilon, correction1, root_correction2, MASTER, DECOUPLED, ZERO, True, SIZE,
                )  # fmt: skip
            else:
                _adam_span(
                    g, p, m, v, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, beta2, rest2,
                    epsilon, correction1, root_correction2, MASTER, DECOUPLED, ZERO, False, SIZE,
                )  # fmt: skip
        elif ZERO:
            zero_span(g, length, False, SIZE)
    if is_last(ticket):
        advance(steps, num_tensors, skip, TENSORS)


@triton.jit
def _sgd_span(
    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, momentum, rest, MASTER: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY_LAST: tl.constexpr, ZERO: tl.constexpr, VECTOR: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        change = load_as_float(g, offsets, mask, VECTOR) * factor
        x = read_weights(p, w, offsets, mask, MASTER, VECTOR)
        if not DECAY_LAST:
            change += weight_decay * x
        if MOMENTUM:
            buffer = momentum * load_as_float(m, offsets, mask, VECTOR) + rest * change
            store_as_kept(m, buffer, offsets, mask, VECTOR)
            if NESTEROV:
                change += momentum * buffer
            else:
                change = buffer
        if DECAY_LAST:
            change += weight_decay * x
        write_weights(p, w, x - lr * change, offsets, mask, start, key, second_key, MASTER, VECTOR)
        if ZERO:
            store_as_kept(g, tl.zeros([SIZE], tl.float32), offsets, mask, VECTOR)


@triton.jit
def sgd_kernel(
    addresses, items, num_items, num_tensors, ticket, steps, scale, found_inf, partials, count, max_norm,
    clip_epsilon, sign, norm_out, found_out, seed, lr, weight_decay, momentum, dampening, G: tl.constexpr, P:
    tl.constexpr, M: tl.constexpr, W: tl.constexpr, MASTER: tl.constexpr, SCALED: tl.constexpr, FOUND: tl.constexpr,
    NORMED: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr, ZERO: tl.constexpr, LR_LOADED: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY_LAST: tl.constexpr, SIZE: tl.constexpr, TENSORS:
    tl.constexpr,
):  # fmt: skip
    """SGD. Lists: gradients, parameters, momentum buffers (with ``MOMENTUM``), weights. The first step does not
    dampen.
    """
    factor, skip = gate(
        scale, found_inf, partials, count, max_norm, clip_epsilon, sign, norm_out, found_out,
        SCALED, FOUND, NORMED, CHECKED, CLIPPED,
    )  # fmt: skip
    if LR_LOADED:
        lr = tl.load(lr).to(tl.float32)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        g = start_of(addresses, 0, num_tensors, tensor, start, G)
        if skip == 0.0:
            step = tl.load(steps + tensor)
            rest = tl.where(step == 0.0, 1.0, 1.0 - dampening)
            key, second_key = random_key(seed, tensor, step + 1.0)
            p = start_of(addresses, 1, num_tensors, tensor, start, P)
            m = p
            if MOMENTUM:
                m = start_of(addresses, 2, num_tensors, tensor, start, M)
            w = p
            if MASTER == 1 or MASTER == 2:
                w = start_of(addresses, 2 + MOMENTUM, num_tensors, tensor, start, W)
            if vectorised != 0:
                _sgd_span(
                    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, momentum, rest, MASTER,
                    MOMENTUM, NESTEROV, DECAY_LAST, ZERO, True, SIZE,
                )  # fmt: skip
            else:
                _sgd_span(
                    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, momentum, rest, MASTER,
                    MOMENTUM, NESTEROV, DECAY_LAST, ZERO, False, SIZE,
                )  # fmt: skip
        elif ZERO:
            zero_span(g, length, False, SIZE)
    if is_last(ticket):
        advance(steps, num_tensors, skip, TENSORS)


@triton.jit
def _adagrad_span(
    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, epsilon, MASTER: tl.constexpr,
    DECOUPLED: tl.constexpr, ZERO: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        grad = load_as_float(g, offsets, mask, VECTOR) * factor
        x = read_weights(p, w, offsets, mask, MASTER, VECTOR)
        if not DECOUPLED:
            grad += weight_decay * x
        total = load_as_float(m, offsets, mask, VECTOR) + grad * grad
        store_as_kept(m, total, offsets, mask, VECTOR)
        change = grad / (tl.sqrt(total) + epsilon)
        if DECOUPLED:
            change += weight_decay * x
        write_weights(p, w, x - lr * change, offsets, mask, start, key, second_key, MASTER, VECTOR)
        if ZERO:
            store_as_kept(g, tl.zeros([SIZE], tl.float32), offsets, mask, VECTOR)


@triton.jit
def adagrad_kernel(
    addresses, items, num_items, num_tensors, ticket, steps, scale, found_inf, partials, count, max_norm,
    clip_epsilon, sign, norm_out, found_out, seed, lr, weight_decay, lr_decay, epsilon, G: tl.constexpr, P:
    tl.constexpr, M: tl.constexpr, W: tl.constexpr, MASTER: tl.constexpr, SCALED: tl.constexpr, FOUND: tl.constexpr,
    NORMED: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr, ZERO: tl.constexpr, LR_LOADED: tl.constexpr,
    DECOUPLED: tl.constexpr, SIZE: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Adagrad. Lists: gradients, parameters, sums of squares, weights."""
    factor, skip = gate(
        scale, found_inf, partials, count, max_norm, clip_epsilon, sign, norm_out, found_out,
        SCALED, FOUND, NORMED, CHECKED, CLIPPED,
    )  # fmt: skip
    if LR_LOADED:
        lr = tl.load(lr).to(tl.float32)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        g = start_of(addresses, 0, num_tensors, tensor, start, G)
        if skip == 0.0:
            step = tl.load(steps + tensor)
            rate = lr / (1.0 + step * lr_decay)
            key, second_key = random_key(seed, tensor, step + 1.0)
            p = start_of(addresses, 1, num_tensors, tensor, start, P)
            m = start_of(addresses, 2, num_tensors, tensor, start, M)
            w = p
            if MASTER == 1 or MASTER == 2:
                w = start_of(addresses, 3, num_tensors, tensor, start, W)
            if vectorised != 0:
                _adagrad_span(
                    g, p, m, w, start, key, second_key, length, factor, rate, weight_decay, epsilon, MASTER,
                    DECOUPLED, ZERO, True, SIZE,
                )  # fmt: skip
            else:
                _adagrad_span(
                    g, p, m, w, start, key, second_key, length, factor, rate, weight_decay, epsilon, MASTER,
                    DECOUPLED, ZERO, False, SIZE,
                )  # fmt: skip
        elif ZERO:
            zero_span(g, length, False, SIZE)
    if is_last(ticket):
        advance(steps, num_tensors, skip, TENSORS)
