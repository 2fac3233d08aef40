"""Triton kernels of the loops over time in training: the LSTM's cell, and attention's way back.

Forward, attention is that of `decoder_kernels`. What its way back needs is computed again from the weights of the step
before, so that nothing of size T * A is kept per step. B batch, T symbols, E memory width, A attention width, H width
of an RNN, K taps of the location kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decoder_kernels import _tanh


@triton.jit
def _cell_kernel(
    offset, product, old, keep, gates, new, hidden, hidden_stride, scale,
    H: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gates (activated), new cell and hidden (dropped) of offset + product, (B, 4 H) in the order i, f, g, o."""
    item = tl.program_id(1)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < H
    place = item * 4 * H + unit
    enter = tl.load(offset + place, mask=inside, other=0.0).to(tl.float32)
    enter = tl.sigmoid(enter + tl.load(product + place, mask=inside, other=0.0).to(tl.float32))
    forget = tl.load(offset + place + H, mask=inside, other=0.0).to(tl.float32)
    forget = tl.sigmoid(forget + tl.load(product + place + H, mask=inside, other=0.0).to(tl.float32))
    value = tl.load(offset + place + 2 * H, mask=inside, other=0.0).to(tl.float32)
    value = _tanh(value + tl.load(product + place + 2 * H, mask=inside, other=0.0).to(tl.float32))
    leave = tl.load(offset + place + 3 * H, mask=inside, other=0.0).to(tl.float32)
    leave = tl.sigmoid(leave + tl.load(product + place + 3 * H, mask=inside, other=0.0).to(tl.float32))
    cell = forget * tl.load(old + item * H + unit, mask=inside, other=0.0) + enter * value
    tl.store(gates + place, enter, mask=inside)
    tl.store(gates + place + H, forget, mask=inside)
    tl.store(gates + place + 2 * H, value, mask=inside)
    tl.store(gates + place + 3 * H, leave, mask=inside)
    tl.store(new + item * H + unit, cell, mask=inside)
    out = leave * _tanh(cell)
    if DROPS:
        kept = tl.load(keep + item * H + unit, mask=inside, other=0) != 0
        out = tl.where(kept, out * scale, 0.0)
    tl.store(hidden + item * hidden_stride + unit, out.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _cell_backward_kernel(
    gates, old, new, keep, first, first_stride, second, carry, found, scale,
    H: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found: gradient of offset + product, from those of hidden (first + second) and of the cell (carry, renewed)."""
    item = tl.program_id(1)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < H
    place, here = item * 4 * H + unit, item * H + unit
    enter = tl.load(gates + place, mask=inside, other=0.0)
    forget = tl.load(gates + place + H, mask=inside, other=0.0)
    value = tl.load(gates + place + 2 * H, mask=inside, other=0.0)
    leave = tl.load(gates + place + 3 * H, mask=inside, other=0.0)
    hidden = tl.load(first + item * first_stride + unit, mask=inside, other=0.0).to(tl.float32)
    hidden += tl.load(second + here, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        kept = tl.load(keep + here, mask=inside, other=0) != 0
        hidden = tl.where(kept, hidden * scale, 0.0)
    bent = _tanh(tl.load(new + here, mask=inside, other=0.0))
    cell = tl.load(carry + here, mask=inside, other=0.0) + hidden * leave * (1 - bent * bent)
    kind = found.dtype.element_ty
    tl.store(found + place, (cell * value * enter * (1 - enter)).to(kind), mask=inside)
    before = tl.load(old + here, mask=inside, other=0.0)
    tl.store(found + place + H, (cell * before * forget * (1 - forget)).to(kind), mask=inside)
    tl.store(found + place + 2 * H, (cell * enter * (1 - value * value)).to(kind), mask=inside)
    tl.store(found + place + 3 * H, (hidden * bent * leave * (1 - leave)).to(kind), mask=inside)
    tl.store(carry + here, cell * forget, mask=inside)


@triton.jit
def _weights_backward_kernel(
    weights, memory, given, given_stride, outer, contexts, alignments, windows, carry, energies, T,
    E: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """energies: gradient of a step's scores, through softmax, from all that its weights went into.

    contexts = outer + given is the context's; alignments the weights' own; windows (B, T, TAPS) is that of what the
    next step saw of this one's weights and total; carry that of the total, renewed.
    """
    item = tl.program_id(0)
    t = tl.arange(0, BLOCK_T)
    inside = t < T
    acc = tl.load(alignments + item * T + t, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(carry + item * T + t, mask=inside, other=0.0)
    for tap in range(KERNEL):
        place = t - tap + KERNEL // 2  # whose window has this symbol at the tap
        seen = (place >= 0) & (place < T)
        row = windows + (item * T + place) * TAPS + tap
        acc += tl.load(row, mask=seen, other=0.0)
        total += tl.load(row + KERNEL, mask=seen, other=0.0)
    tl.store(carry + item * T + t, total, mask=inside)
    acc += total
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        context = tl.load(outer + item * E + e, mask=e < E, other=0.0).to(tl.float32)
        context += tl.load(given + item * given_stride + e, mask=e < E, other=0.0).to(tl.float32)
        tl.store(contexts + item * E + e, context.to(contexts.dtype.element_ty), mask=e < E)
        values = tl.load(
            memory + (item * T + t)[:, None].to(tl.int64) * E + e[None, :],
            mask=inside[:, None] & (e < E)[None, :],
            other=0.0,
        )
        acc += tl.sum(values.to(tl.float32) * context[None, :], 1)
    share = tl.load(weights + item * T + t, mask=inside, other=0.0)
    tl.store(energies + item * T + t, share * (acc - tl.sum(share * acc, 0)), mask=inside)


@triton.jit
def _energies_backward_kernel(
    energies, query, last, total, projected, kernel, score, queries, windows, projections, kernels, scores, T,
    A: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of a step's scores: queries (B, A) and windows (B, T, TAPS) of the step; added to what is there
    for all steps: projections (B, T, A), kernels (B, TAPS, A), scores (B, A)."""
    item = tl.program_id(0)
    a, taps = tl.arange(0, BLOCK_A), tl.arange(0, TAPS)
    second, wide = taps >= KERNEL, a < A
    shift = taps - tl.where(second, KERNEL, 0) - KERNEL // 2
    both = (taps < 2 * KERNEL)[:, None] & wide[None, :]
    stencil = tl.load(kernel + taps[:, None] * A + a[None, :], mask=both, other=0.0)
    asked = tl.load(query + item * A + a, mask=wide, other=0.0).to(tl.float32)
    factor = tl.load(score + a, mask=wide, other=0.0).to(tl.float32)
    of_kernel = tl.zeros([TAPS, BLOCK_A], dtype=tl.float32)
    of_query = tl.zeros([BLOCK_A], dtype=tl.float32)
    of_score = tl.zeros([BLOCK_A], dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        place = t[:, None] + shift[None, :]
        inside = (place >= 0) & (place < T) & (taps < 2 * KERNEL)[None, :]
        seen = tl.load(last + item * T + place, mask=inside & (taps < KERNEL)[None, :], other=0.0)
        seen += tl.load(total + item * T + place, mask=inside & second[None, :], other=0.0)
        seen = seen.to(stencil.dtype)
        fits = (t < T)[:, None] & wide[None, :]
        spot = (item * T + t)[:, None].to(tl.int64) * A + a[None, :]
        bent = tl.dot(seen, stencil, input_precision=PRECISION)
        bent = _tanh(bent + tl.load(projected + spot, mask=fits, other=0.0).to(tl.float32) + asked[None, :])
        energy = tl.load(energies + item * T + t, mask=t < T, other=0.0)[:, None]
        of_score += tl.sum(energy * bent, 0)
        before = tl.where(fits, energy * factor[None, :] * (1 - bent * bent), 0.0)
        of_query += tl.sum(before, 0)
        tl.store(projections + spot, tl.load(projections + spot, mask=fits, other=0.0) + before, mask=fits)
        before = before.to(stencil.dtype)
        of_windows = tl.dot(before, tl.trans(stencil), input_precision=PRECISION)
        tl.store(windows + (item * T + t)[:, None] * TAPS + taps[None, :], of_windows, mask=(t < T)[:, None])
        of_kernel = tl.dot(tl.trans(seen), before, of_kernel, input_precision=PRECISION)
    tl.store(queries + item * A + a, of_query.to(queries.dtype.element_ty), mask=wide)
    tl.store(scores + item * A + a, tl.load(scores + item * A + a, mask=wide, other=0.0) + of_score, mask=wide)
    spot = kernels + (item * TAPS + taps)[:, None] * A + a[None, :]
    tl.store(spot, tl.load(spot, mask=both, other=0.0) + of_kernel, mask=both)


def taps_of(kernel: Tensor) -> int:
    """TAPS of a location kernel (2 K, A)."""
    return max(16, triton.next_power_of_2(len(kernel)))


def cell(
    hidden: Tensor, gates: Tensor, new: Tensor, offset: Tensor, product: Tensor, old: Tensor, keep: Tensor | None,
    scale: float,
) -> None:  # fmt: skip
    """Fill ``hidden`` (B, H), ``gates`` (B, 4 H) and ``new`` (B, H), both float32, from the two summands of the gates.

    ``keep`` (B, H) uint8: which hidden values are not dropped; those are scaled. Rows of ``hidden`` may be apart.
    """
    batch, width = old.shape
    block = min(512, triton.next_power_of_2(width))
    _cell_kernel[(triton.cdiv(width, block), batch)](
        offset, product, old, old if keep is None else keep, gates, new, hidden, hidden.stride(0), scale,
        H=width, DROPS=keep is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def cell_backward(
    found: Tensor, carry: Tensor, saved: tuple[Tensor, Tensor, Tensor], first: Tensor, second: Tensor,
    keep: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """Fill ``found`` (B, 4 H) and renew ``carry`` (B, H, float32); ``saved``: gates, old cell, new cell.

    ``first`` (rows may be apart) and ``second``: the two summands of the hidden state's gradient.
    """
    gates, old, new = saved
    batch, width = old.shape
    block = min(512, triton.next_power_of_2(width))
    _cell_backward_kernel[(triton.cdiv(width, block), batch)](
        gates, old, new, old if keep is None else keep, first, first.stride(0), second, carry, found, scale,
        H=width, DROPS=keep is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def weights_backward(
    energies: Tensor, contexts: Tensor, carry: Tensor, weights: Tensor, memory: Tensor, given: Tensor, outer: Tensor,
    alignments: Tensor, windows: Tensor, taps: int,
) -> None:  # fmt: skip
    """Fill ``energies`` (B, T) and ``contexts`` (B, E), renew ``carry`` (B, T); see the kernel. ``taps`` is K."""
    batch, symbols, width = memory.shape
    block = triton.next_power_of_2(symbols)
    _weights_backward_kernel[(batch,)](
        weights, memory, given, given.stride(0), outer, contexts, alignments, windows, carry, energies, symbols,
        E=width, KERNEL=taps, TAPS=windows.shape[2], BLOCK_T=block, BLOCK_E=32, num_warps=4 if block <= 256 else 8,
    )  # fmt: skip


def energies_backward(
    queries: Tensor, windows: Tensor, sums: tuple[Tensor, Tensor, Tensor], energies: Tensor, query: Tensor,
    last: Tensor, total: Tensor, projected: Tensor, kernel: Tensor, score: Tensor,
) -> None:  # fmt: skip
    """Fill ``queries`` and ``windows``, add to ``sums`` (projections, kernels, scores), all float32; see the kernel."""
    batch, symbols, attention = projected.shape
    single = kernel.dtype == torch.float32
    _energies_backward_kernel[(batch,)](
        energies, query, last, total, projected, kernel, score, queries, windows, *sums, symbols,
        A=attention, KERNEL=len(kernel) // 2, TAPS=windows.shape[2], BLOCK_T=16 if single else 32,
        BLOCK_A=max(16, triton.next_power_of_2(attention)), PRECISION="ieee" if single else "tf32",
        num_warps=8 if single else 4,
    )  # fmt: skip
