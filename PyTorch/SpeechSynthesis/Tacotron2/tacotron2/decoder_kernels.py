"""Triton kernels of one decoder step, for few items at a time: bound by reading the weights once, not by launches.

A step is eight launches: two of the prenet, the attention's RNN, its query, energies, context, the decoder's RNN, mel
and gate. Products run over tiles of the batch (16 rows or more, the matrix units' least), so that a weight is read once
for all items; the LSTM's gates are computed where its cell is. Sums are float32 whatever the weights are.

B batch, T symbols, E memory width, A attention width, H width of an RNN, K inputs and N outputs of a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_TILE = 64  # rows of the batch in a program
CHUNK = 64  # symbols whose memory is read at once


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _product(
    acc, x, x_stride, weight, weight_stride, batch, outputs, B, N,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc[b, n] + sum over k of x[b, k] * weight[n, k]."""
    k = tl.arange(0, BLOCK_K)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        left = tl.load(
            x + batch[:, None] * x_stride + start + k[None, :], mask=(batch < B)[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            weight + outputs[None, :] * weight_stride + start + k[:, None],
            mask=inside[:, None] & (outputs < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _linear_kernel(
    first, first_stride, second, second_stride, weight, bias, keep, keep_stride, out, out_stride, B, N,
    K1: tl.constexpr, K2: tl.constexpr, BIAS: tl.constexpr, DROPS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = (first, second) @ weight.T + bias; with DROPS relu of it, times keep."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    acc = tl.zeros([BLOCK_B, BLOCK_N], dtype=tl.float32)
    acc = _product(acc, first, first_stride, weight, K1 + K2, batch, outputs, B, N, K1, BLOCK_K, PRECISION)
    if K2:
        acc = _product(acc, second, second_stride, weight + K1, K1 + K2, batch, outputs, B, N, K2, BLOCK_K, PRECISION)
    inside = (batch < B)[:, None] & (outputs < N)[None, :]
    if BIAS:
        acc += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    if DROPS:
        factors = tl.load(keep + batch[:, None] * keep_stride + outputs[None, :], mask=inside, other=0.0)
        acc = tl.maximum(acc, 0.0) * factors.to(tl.float32)
    tl.store(out + batch[:, None] * out_stride + outputs[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _lstm_kernel(
    first, second, third, weight, bias, cell, new_hidden, new_cell, B,
    H: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
    BLOCK_B: tl.constexpr, UNITS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An LSTM step on (first, second, third); row 4 u + g of weight and bias is gate g (i, f, g, o) of unit u."""
    K: tl.constexpr = K1 + K2 + K3
    rows = tl.program_id(0) * (4 * UNITS) + tl.arange(0, 4 * UNITS)
    batch = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    acc = tl.zeros([BLOCK_B, 4 * UNITS], dtype=tl.float32)
    acc = _product(acc, first, K1, weight, K, batch, rows, B, 4 * H, K1, BLOCK_K, PRECISION)
    acc = _product(acc, second, K2, weight + K1, K, batch, rows, B, 4 * H, K2, BLOCK_K, PRECISION)
    acc = _product(acc, third, K3, weight + K1 + K2, K, batch, rows, B, 4 * H, K3, BLOCK_K, PRECISION)
    acc += tl.load(bias + rows)[None, :]
    even, odd = tl.split(tl.reshape(acc, [BLOCK_B, UNITS, 2, 2]))
    enter, value = tl.split(even)
    forget, leave = tl.split(odd)
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    places = batch[:, None] * H + units[None, :]
    inside = (batch < B)[:, None] & (units < H)[None, :]
    old = tl.load(cell + places, mask=inside, other=0.0)
    new = tl.sigmoid(forget) * old + tl.sigmoid(enter) * _tanh(value)
    tl.store(new_cell + places, new, mask=inside)
    hidden = tl.sigmoid(leave) * _tanh(new)
    tl.store(new_hidden + places, hidden.to(new_hidden.dtype.element_ty), mask=inside)


@triton.jit
def _energies_kernel(
    query, last, last_stride, total, total_stride, projected, kernel, score, outside, energies, T,
    A: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """energies[b, t] = score . tanh(query + projected + location), -inf where outside; TAPS >= 2 KERNEL."""
    item = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    a = tl.arange(0, BLOCK_A)
    taps = tl.arange(0, TAPS)
    second = taps >= KERNEL
    place = t[:, None] + (taps - tl.where(second, KERNEL, 0) - KERNEL // 2)[None, :]
    inside = (place >= 0) & (place < T) & (taps < 2 * KERNEL)[None, :]
    seen = tl.load(last + item * last_stride + place, mask=inside & (taps < KERNEL)[None, :], other=0.0)
    seen += tl.load(total + item * total_stride + place, mask=inside & second[None, :], other=0.0)
    kernels = tl.load(
        kernel + taps[:, None] * A + a[None, :], mask=(taps < 2 * KERNEL)[:, None] & (a < A)[None, :], other=0.0
    )
    acc = tl.dot(seen.to(kernels.dtype), kernels, input_precision=PRECISION)
    fits = (t < T)[:, None] & (a < A)[None, :]
    acc += tl.load(projected + (item * T + t)[:, None].to(tl.int64) * A + a[None, :], mask=fits, other=0.0)
    acc += tl.load(query + item * A + a, mask=a < A, other=0.0).to(tl.float32)[None, :]
    weights = tl.load(score + a, mask=a < A, other=0.0).to(tl.float32)
    energy = tl.sum(_tanh(acc) * weights[None, :], 1)
    hidden = tl.load(outside + item * T + t, mask=t < T, other=1) != 0
    tl.store(energies + item * T + t, tl.where(hidden, float("-inf"), energy), mask=t < T)


@triton.jit
def _context_kernel(
    energies, memory, total, total_stride, weights, new_total, context, context_stride, T,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """weights = softmax(energies), new_total = total + weights, context = weights @ memory."""
    item = tl.program_id(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.arange(0, BLOCK_T)
    energy = tl.load(energies + item * T + t, mask=t < T, other=float("-inf"))
    top = tl.max(energy, 0)
    exponents = tl.exp(energy - top)
    scale = 1 / tl.sum(exponents, 0)
    if tl.program_id(0) == 0:
        share = exponents * scale
        tl.store(weights + item * T + t, share, mask=t < T)
        before = tl.load(total + item * total_stride + t, mask=t < T, other=0.0)
        tl.store(new_total + item * T + t, before + share, mask=t < T)
    acc = tl.zeros([BLOCK_E], dtype=tl.float32)
    for start in range(0, T, CHUNK):
        places = start + tl.arange(0, CHUNK)
        share = tl.exp(tl.load(energies + item * T + places, mask=places < T, other=float("-inf")) - top) * scale
        share = share.to(memory.dtype.element_ty).to(tl.float32)  # as the plain product reads it
        values = tl.load(
            memory + (item * T + places)[:, None].to(tl.int64) * E + e[None, :],
            mask=(places < T)[:, None] & (e < E)[None, :],
            other=0.0,
        )
        acc += tl.sum(share[:, None] * values.to(tl.float32), 0)
    tl.store(context + item * context_stride + e, acc.to(context.dtype.element_ty), mask=e < E)


def units(width: int) -> int:
    """LSTM units of a program, 0 if the kernels do not fit an RNN of this width."""
    return 8 if width % 8 == 0 and width >= 1024 else 4 if width % 4 == 0 else 0


def _tile(batch: int) -> int:
    return min(LARGEST_TILE, max(16, triton.next_power_of_2(batch)))


def _options(dtype: torch.dtype) -> dict[str, object]:
    single = dtype == torch.float32
    return {"BLOCK_K": 64 if single else 128, "PRECISION": "ieee" if single else "tf32"}


def linear(
    out: Tensor, inputs: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None = None, keep: Tensor | None = None
) -> Tensor:
    """``out`` (B, N or wider) = the one or two ``inputs`` (B, K) side by side @ weight.T (N, K) + bias.

    With ``keep`` (B, N): relu of that, times ``keep``. Rows may be strided, columns not.
    """
    batch, outputs = len(out), len(weight)
    first, second = inputs[0], inputs[-1]
    grid = (triton.cdiv(outputs, 16), triton.cdiv(batch, _tile(batch)))
    _linear_kernel[grid](
        first, first.stride(0), second, second.stride(0), weight, weight if bias is None else bias,
        out if keep is None else keep, 0 if keep is None else keep.stride(0), out, out.stride(0), batch, outputs,
        K1=first.shape[1], K2=second.shape[1] if len(inputs) > 1 else 0, BIAS=bias is not None, DROPS=keep is not None,
        BLOCK_B=_tile(batch), BLOCK_N=16, num_warps=4, num_stages=4, **_options(weight.dtype),
    )  # fmt: skip
    return out


def lstm(
    hidden: Tensor, cell: Tensor, inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor, old: Tensor
) -> Tensor:
    """Fill ``hidden`` (B, H) and ``cell`` (B, H, float32) from three contiguous inputs and the old cell; -> hidden.

    ``weight`` (4 H, K) and ``bias`` (4 H, float32) as `interleaved` gives them.
    """
    batch, width = hidden.shape
    size = units(width)
    first, second, third = inputs
    _lstm_kernel[(width // size, triton.cdiv(batch, _tile(batch)))](
        first, second, third, weight, bias, old, hidden, cell, batch,
        H=width, K1=first.shape[1], K2=second.shape[1], K3=third.shape[1],
        BLOCK_B=_tile(batch), UNITS=size, num_warps=4, num_stages=4, **_options(weight.dtype),
    )  # fmt: skip
    return hidden


def interleaved(rows: Tensor) -> Tensor:
    """(4 H, ...) in torch.nn.LSTMCell's order of gates -> the four gates of a unit side by side."""
    return rows.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def attend(
    found: tuple[Tensor, Tensor, Tensor], query: Tensor, last: Tensor, total: Tensor, source: tuple[Tensor, ...],
    kernel: Tensor, score: Tensor,
) -> None:  # fmt: skip
    """One step of attention: fills ``found``: context (B, E), weights (B, T), their new total (B, T).

    ``query`` (B, A); ``last`` and ``total`` (B, T) float32; rows of these and of context may be apart; ``source``:
    memory (B, T, E), projected (B, T, A), outside (B, T) bool; ``kernel`` (2 K, A): taps of last, then of total;
    ``score`` (A,).
    """
    memory, projected, outside = source
    context, weights, new_total = found
    batch, symbols, width = memory.shape
    energies = torch.empty_like(weights)
    attention, taps = score.numel(), len(kernel)
    block = 16 if symbols <= 512 else 64
    _energies_kernel[(triton.cdiv(symbols, block), batch)](
        query, last, last.stride(0), total, total.stride(0), projected, kernel, score, outside, energies, symbols,
        A=attention, KERNEL=taps // 2, TAPS=max(16, triton.next_power_of_2(taps)), BLOCK_T=block,
        BLOCK_A=max(16, triton.next_power_of_2(attention)), num_warps=8 if kernel.dtype == torch.float32 else 4,
        PRECISION=_options(kernel.dtype)["PRECISION"],
    )  # fmt: skip
    _context_kernel[(triton.cdiv(width, 64), batch)](
        energies, memory, total, total.stride(0), weights, new_total, context, context.stride(0), symbols,
        E=width, BLOCK_T=triton.next_power_of_2(symbols), BLOCK_E=64, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
