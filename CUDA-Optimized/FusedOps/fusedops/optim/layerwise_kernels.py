"""Triton kernels of the optimizers that need a norm of each tensor: LAMB, NovoGrad and the LARC wrapper.

The norm of a tensor is the sum of its work items' partial sums (they follow each other), added always in one order, by
every program that works on the tensor (NovoGrad) or by the one that leaves the last of them (LAMB): it needs no launch.
See `kernels` for the lists and the forms of the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.ops.multi_tensor_kernels import item_of, places, start_of, sum_of_partials, within
from fusedops.optim.kernels import (
    advance,
    bias_correction,
    gate,
    is_last,
    load_as_float,
    random_key,
    read_weights,
    store_as_kept,
    write_weights,
    zero_span,
)

# Tuning values.
BLOCK = 1024  # elements per step of a program
NUM_WARPS = 4
PARTIALS = 256  # partial sums of a tensor read at once


@triton.jit
def norm_of(item_partials, first_item, tensor, SIZE: tl.constexpr):
    """-> the L2 norm of a tensor."""
    first = tl.load(first_item + tensor)
    return tl.sqrt(sum_of_partials(item_partials + first, tl.load(first_item + tensor + 1) - first, SIZE))


@triton.jit
def largest_of(item_partials, first_item, tensor, SIZE: tl.constexpr):
    """-> the largest magnitude in a tensor."""
    first = tl.load(first_item + tensor)
    last = tl.load(first_item + tensor + 1)
    largest = tl.zeros([SIZE], tl.float32)
    for begin in range(first, last, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        largest = tl.maximum(largest, tl.load(item_partials + offsets, mask=offsets < last, other=0.0))
    return tl.max(largest, 0)


@triton.jit
def load_written(pointer, offsets, mask, VECTOR: tl.constexpr):
    """What other programs of this launch have written: from the L2 cache, past the multiprocessor's own."""
    return tl.load(places(pointer, offsets, VECTOR), mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def load_once(pointer, offsets, mask, VECTOR: tl.constexpr):
    """What no one reads again: the first to make room in the cache."""
    return tl.load(places(pointer, offsets, VECTOR), mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _lamb_moments_span(
    g, p, m, v, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, beta2, rest2, epsilon,
    correction1, root_correction2, MASTER: tl.constexpr, ADAPTED: tl.constexpr, DECOUPLED: tl.constexpr,
    ZERO: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """First pass: the moments; -> sums of squares of weights and updates. Not ``ADAPTED``: the weights as well."""
    weights = tl.zeros([SIZE], tl.float32)
    updates = tl.zeros([SIZE], tl.float32)
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        grad = load_once(g, offsets, mask, VECTOR) * factor
        x = read_weights(p, w, offsets, mask, MASTER, VECTOR)
        if not DECOUPLED:
            grad += weight_decay * x
        exp_avg = beta1 * load_as_float(m, offsets, mask, VECTOR) + rest1 * grad
        exp_avg_sq = beta2 * load_as_float(v, offsets, mask, VECTOR) + rest2 * grad * grad
        store_as_kept(m, exp_avg, offsets, mask, VECTOR)
        store_as_kept(v, exp_avg_sq, offsets, mask, VECTOR)
        update = exp_avg / correction1 / (tl.sqrt(exp_avg_sq) / root_correction2 + epsilon)
        if DECOUPLED:
            update += weight_decay * x
        if ADAPTED:
            weights += x * x
            updates += update * update
        else:
            write_weights(p, w, x - lr * update, offsets, mask, start, key, second_key, MASTER, VECTOR)
        if ZERO:
            store_as_kept(g, tl.zeros([SIZE], tl.float32), offsets, mask, VECTOR)
    return tl.sum(weights, 0), tl.sum(updates, 0)


@triton.jit
def _lamb_weights_span(
    p, m, v, w, start, key, second_key, length, rate, weight_decay, epsilon, correction1, root_correction2,
    MASTER: tl.constexpr, DECOUPLED: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Second pass: the weights, from the moments as the first has left them."""
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        x = read_weights(p, w, offsets, mask, MASTER, VECTOR)
        exp_avg = load_written(m, offsets, mask, VECTOR)
        exp_avg_sq = load_written(v, offsets, mask, VECTOR)
        update = exp_avg / correction1 / (tl.sqrt(exp_avg_sq) / root_correction2 + epsilon)
        if DECOUPLED:
            update += weight_decay * x
        write_weights(p, w, x - rate * update, offsets, mask, start, key, second_key, MASTER, VECTOR)


@triton.jit
def _arrive(
    weights, updates, number, tensor, first_item, weight_partials, update_partials, arrived, ready, rates, lr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Leave an item's sums; the program that leaves a tensor's last ones makes its learning rate."""
    tl.store(weight_partials + number, weights)
    tl.store(update_partials + number, updates)
    tl.debug_barrier()  # all that this program has written comes before its arrival
    others = tl.load(first_item + tensor + 1) - tl.load(first_item + tensor) - 1
    if tl.atomic_add(arrived + tensor, 1) == others:
        weight_norm = norm_of(weight_partials, first_item, tensor, SIZE)
        update_norm = norm_of(update_partials, first_item, tensor, SIZE)
        both = (weight_norm > 0.0) & (update_norm > 0.0)
        tl.store(rates + tensor, tl.where(both, lr * weight_norm / tl.where(both, update_norm, 1.0), lr))
        tl.debug_barrier()
        tl.atomic_xchg(ready + tensor, 1)


@triton.jit
def _await(tensor, ready, rates):
    """-> a tensor's learning rate, when it is made."""
    seen = tl.atomic_add(ready + tensor, 0)
    while seen == 0:
        seen = tl.atomic_add(ready + tensor, 0)
    return tl.load(rates + tensor, cache_modifier=".cg")


@triton.jit
def _clear(counters, count, SIZE: tl.constexpr):
    for begin in range(0, count, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        tl.store(counters + offsets, tl.zeros([SIZE], tl.int32), mask=offsets < count)


@triton.jit
def lamb_kernel(
    addresses, items, num_items, num_tensors, first_item, schedule, num_entries, ticket, steps, scale, found_inf,
    partials, count, max_norm, clip_epsilon, sign, norm_out, found_out, weight_partials, update_partials, counters,
    rates, seed, lr, weight_decay, beta1, rest1, log_beta1, beta2, rest2, log_beta2, epsilon, G: tl.constexpr, P:
    tl.constexpr, M: tl.constexpr, V: tl.constexpr, W: tl.constexpr, MASTER: tl.constexpr, SCALED: tl.constexpr, FOUND:
    tl.constexpr, NORMED: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr, ZERO: tl.constexpr, LR_LOADED:
    tl.constexpr, ADAPTED: tl.constexpr, DECOUPLED: tl.constexpr, CORRECTED: tl.constexpr, SIZE: tl.constexpr,
    PARTIALS: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """LAMB. Lists: gradients, parameters, exp_avg, exp_avg_sq, weights.

    Programs take the entries of ``schedule`` in its order, by a counter: first passes over items, and second ones,
    which wait for the norms of their tensor. What they wait for was taken earlier, by a program that runs and does not
    wait itself, so it comes. ``counters``, int32 [1 + 2 N], zero between launches: entries taken, first passes done of
    each tensor, whether its rate is there.
    """
    factor, skip = gate(
        scale, found_inf, partials, count, max_norm, clip_epsilon, sign, norm_out, found_out,
        SCALED, FOUND, NORMED, CHECKED, CLIPPED,
    )  # fmt: skip
    if LR_LOADED:
        lr = tl.load(lr).to(tl.float32)
    arrived = counters + 1
    ready = arrived + num_tensors
    if skip == 0.0:
        place = tl.atomic_add(counters, 1)
        while place < num_entries:
            entry = place
            if ADAPTED:
                entry = tl.load(schedule + place)
            number = tl.where(entry < 0, -1 - entry, entry)
            tensor, start, length, vectorised = item_of(items, number)
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
            if entry >= 0:
                g = start_of(addresses, 0, num_tensors, tensor, start, G)
                if vectorised != 0:
                    weights, updates = _lamb_moments_span(
                        g, p, m, v, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, beta2,
                        rest2, epsilon, correction1, root_correction2, MASTER, ADAPTED, DECOUPLED, ZERO, True, SIZE,
                    )  # fmt: skip
                else:
                    weights, updates = _lamb_moments_span(
                        g, p, m, v, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, beta2,
                        rest2, epsilon, correction1, root_correction2, MASTER, ADAPTED, DECOUPLED, ZERO, False, SIZE,
                    )  # fmt: skip
                if ADAPTED:
                    _arrive(
                        weights, updates, number, tensor, first_item, weight_partials, update_partials, arrived, ready,
                        rates, lr, PARTIALS,
                    )  # fmt: skip
            elif ADAPTED:
                rate = _await(tensor, ready, rates)
                if vectorised != 0:
                    _lamb_weights_span(
                        p, m, v, w, start, key, second_key, length, rate, weight_decay, epsilon, correction1,
                        root_correction2, MASTER, DECOUPLED, True, SIZE,
                    )  # fmt: skip
                else:
                    _lamb_weights_span(
                        p, m, v, w, start, key, second_key, length, rate, weight_decay, epsilon, correction1,
                        root_correction2, MASTER, DECOUPLED, False, SIZE,
                    )  # fmt: skip
            place = tl.atomic_add(counters, 1)
    elif ZERO:
        for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
            tensor, start, length, vectorised = item_of(items, number)
            zero_span(start_of(addresses, 0, num_tensors, tensor, start, G), length, False, SIZE)
    if is_last(ticket):
        advance(steps, num_tensors, skip, TENSORS)
        _clear(counters, 2 * num_tensors + 1, TENSORS)


@triton.jit
def _novograd_span(
    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, divisor, correction1,
    MASTER: tl.constexpr, INSIDE: tl.constexpr, ZERO: tl.constexpr, VECTOR: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        grad = load_as_float(g, offsets, mask, VECTOR) * factor
        x = read_weights(p, w, offsets, mask, MASTER, VECTOR)
        if INSIDE:
            grad = grad / divisor + weight_decay * x
        exp_avg = beta1 * load_as_float(m, offsets, mask, VECTOR) + rest1 * grad
        store_as_kept(m, exp_avg, offsets, mask, VECTOR)
        change = exp_avg / correction1
        if not INSIDE:
            change = change / divisor + weight_decay * x
        write_weights(p, w, x - lr * change, offsets, mask, start, key, second_key, MASTER, VECTOR)
        if ZERO:
            store_as_kept(g, tl.zeros([SIZE], tl.float32), offsets, mask, VECTOR)


@triton.jit
def novograd_kernel(
    addresses, items, num_items, num_tensors, ticket, steps, scale, found_inf, partials, count, max_norm,
    clip_epsilon, sign, norm_out, found_out, first_item, item_partials, running, fresh, seed, lr, weight_decay, beta1,
    rest1, log_beta1, beta2, rest2, log_beta2, epsilon, G: tl.constexpr, P: tl.constexpr, M: tl.constexpr, W:
    tl.constexpr, MASTER: tl.constexpr, SCALED: tl.constexpr, FOUND: tl.constexpr, NORMED: tl.constexpr, CHECKED:
    tl.constexpr, CLIPPED: tl.constexpr, ZERO: tl.constexpr, LR_LOADED: tl.constexpr, LARGEST: tl.constexpr, INSIDE:
    tl.constexpr, INIT_ZERO: tl.constexpr, CORRECTED: tl.constexpr, SIZE: tl.constexpr, PARTIALS: tl.constexpr,
    TENSORS: tl.constexpr,
):  # fmt: skip
    """NovoGrad. Lists: gradients, parameters, exp_avg, weights. ``running``: float32 [N], the norms' running means.

    The new means go to ``fresh`` and are copied by the last program, when no other reads the old ones any more.
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
            step = tl.load(steps + tensor) + 1.0
            old = tl.load(running + tensor)
            if LARGEST:
                norm = largest_of(item_partials, first_item, tensor, PARTIALS) * factor
                new = beta2 * old + rest2 * norm
            else:
                norm = norm_of(item_partials, first_item, tensor, PARTIALS) * factor
                new = tl.sqrt(beta2 * old * old + rest2 * norm * norm)
            if not INIT_ZERO:
                new = tl.where(step == 1.0, norm, new)
            if start == 0:
                tl.store(fresh + tensor, new)
            correction1 = bias_correction(step, log_beta1, CORRECTED)
            divisor = new / tl.sqrt(bias_correction(step, log_beta2, CORRECTED)) + epsilon
            key, second_key = random_key(seed, tensor, step)
            p = start_of(addresses, 1, num_tensors, tensor, start, P)
            m = start_of(addresses, 2, num_tensors, tensor, start, M)
            w = p
            if MASTER == 1 or MASTER == 2:
                w = start_of(addresses, 3, num_tensors, tensor, start, W)
            if vectorised != 0:
                _novograd_span(
                    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, divisor,
                    correction1, MASTER, INSIDE, ZERO, True, SIZE,
                )  # fmt: skip
            else:
                _novograd_span(
                    g, p, m, w, start, key, second_key, length, factor, lr, weight_decay, beta1, rest1, divisor,
                    correction1, MASTER, INSIDE, ZERO, False, SIZE,
                )  # fmt: skip
        elif ZERO:
            zero_span(g, length, False, SIZE)
    if is_last(ticket):
        advance(steps, num_tensors, skip, TENSORS)
        if skip == 0.0:
            for begin in range(0, num_tensors, TENSORS):
                tensors = begin + tl.arange(0, TENSORS)
                mask = tensors < num_tensors
                tl.store(running + tensors, tl.load(fresh + tensors, mask=mask), mask=mask)


@triton.jit
def _larc_span(g, p, length, ratio, weight_decay, VECTOR: tl.constexpr, SIZE: tl.constexpr):
    for begin in range(0, length, SIZE):
        offsets = begin + tl.arange(0, SIZE)
        mask = within(offsets, length, VECTOR)
        grad = load_as_float(g, offsets, mask, VECTOR) + weight_decay * load_as_float(p, offsets, mask, VECTOR)
        store_as_kept(g, grad * ratio, offsets, mask, VECTOR)


@triton.jit
def larc_kernel(
    addresses, items, num_items, num_tensors, gradient_norms, weight_norms, lr, weight_decay, trust, epsilon,
    G: tl.constexpr, P: tl.constexpr, LR_LOADED: tl.constexpr, CLIP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """g = (g + weight_decay p) * local rate. Lists: gradients, parameters; norms: float32 [N]."""
    if LR_LOADED:
        lr = tl.load(lr).to(tl.float32)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tensor, start, length, vectorised = item_of(items, number)
        gradient_norm = tl.load(gradient_norms + tensor)
        weight_norm = tl.load(weight_norms + tensor)
        if (gradient_norm != 0.0) & (weight_norm != 0.0):
            ratio = trust * weight_norm / (gradient_norm + weight_norm * weight_decay + epsilon)
            if CLIP:
                ratio = tl.minimum(ratio / lr, 1.0)
            g = start_of(addresses, 0, num_tensors, tensor, start, G)
            p = start_of(addresses, 1, num_tensors, tensor, start, P)
            if vectorised != 0:
                _larc_span(g, p, length, ratio, weight_decay, True, SIZE)
            else:
                _larc_span(g, p, length, ratio, weight_decay, False, SIZE)
