"""The loops over time of teacher-forced training as autograd functions of their own, on kernels.

A step of the first loop is five launches each way: two products, the cell, and two of attention. Gradients of weights
and of what all steps share (memory, its projection, the location kernel) are taken once for all steps, or summed in
float32. `model.Decoder` has the same in plain PyTorch: the reference, and what runs on a CPU.

F steps, B batch, T symbols, E memory width, A attention width, H width of an RNN, K taps of the location kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlx.kernels import DTYPES, has_kernels

LONGEST = 1024  # symbols, which a program holds at once


def applies(memory: Tensor, dtype: torch.dtype) -> bool:
    """Whether the loops take a memory (B, T, E), or offsets (F, B, 4 H) without one, and arithmetic of this type."""
    return (
        dtype in DTYPES
        and has_kernels(memory.device.type)
        and memory.shape[1] <= LONGEST
        and not torch.compiler.is_compiling()
    )


def kept(shape: tuple[int, ...], rate: float, training: bool, device: torch.device) -> Tensor | None:
    """What dropout at ``rate`` keeps, uint8, or None where nothing is dropped."""
    if not (training and rate):
        return None
    return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - rate)


class LstmLoop(torch.autograd.Function):
    """(F, B, 4 H) offsets of the gates and their recurrent weight (4 H, H) -> hidden states (F, B, H), dropped."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, weight: Tensor, keep: Tensor | None, scale: float) -> Tensor:
        from . import training_kernels as kernels

        steps, batch, width = offsets.shape[0], offsets.shape[1], weight.shape[1]
        hiddens = weight.new_empty(steps + 1, batch, width)
        cells = weight.new_empty(steps + 1, batch, width, dtype=torch.float32)
        hiddens[0].zero_()
        cells[0].zero_()
        gates = weight.new_empty(steps, batch, 4 * width, dtype=torch.float32)
        product = weight.new_empty(batch, 4 * width)
        offsets = offsets.contiguous()
        for step in range(steps):
            torch.mm(hiddens[step], weight.T, out=product)
            mask = None if keep is None else keep[step]
            new, old = cells[step + 1], cells[step]
            kernels.cell(hiddens[step + 1], gates[step], new, offsets[step], product, old, mask, scale)
        ctx.save_for_backward(weight, hiddens, cells, gates, keep)
        ctx.scale, ctx.dtype = scale, offsets.dtype
        return hiddens[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        from . import training_kernels as kernels

        weight, hiddens, cells, gates, keep = ctx.saved_tensors
        outer = outer.contiguous()
        steps, batch, width = outer.shape
        found = weight.new_empty(steps, batch, 4 * width)
        carry, given = torch.zeros_like(cells[0]), torch.zeros_like(hiddens[0])
        for step in reversed(range(steps)):
            mask = None if keep is None else keep[step]
            saved = gates[step], cells[step], cells[step + 1]
            kernels.cell_backward(found[step], carry, saved, given, outer[step], mask, ctx.scale)
            torch.mm(found[step], weight, out=given)
        of_weight = found.flatten(0, 1).T @ hiddens[:-1].flatten(0, 1)
        return found.to(ctx.dtype), of_weight, None, None


class AttentionLoop(torch.autograd.Function):
    """The attention's RNN and attention itself: -> hidden states (F, B, H), contexts (F, B, E), weights (F, B, T).

    ``offsets`` (F, B, 4 H); ``recurrent`` (4 H, E + H) of context and hidden state; ``query`` (A, H); ``memory``
    (B, T, E); ``projected`` (B, T, A); ``kernel`` (2 K, A): taps of the last weights, then of their sum; ``score``
    (A,); ``outside`` (B, T) bool; ``keep`` (F, B, H) uint8 or None. All but offsets are of one type.
    """

    @staticmethod
    def forward(
        ctx: Any, offsets: Tensor, recurrent: Tensor, query: Tensor, memory: Tensor, projected: Tensor, kernel: Tensor,
        score: Tensor, outside: Tensor, keep: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from . import decoder_kernels, training_kernels

        steps, batch, width = offsets.shape[0], offsets.shape[1], query.shape[1]
        symbols, size = memory.shape[1:]
        made, exact = memory.new_empty, {"dtype": torch.float32}
        inputs = made(steps + 1, batch, size + width)  # contexts, hidden states: what a step multiplies
        cells = made(steps + 1, batch, width, **exact)
        seen, totals = made(steps + 1, batch, symbols, **exact), made(steps + 1, batch, symbols, **exact)
        for first in (inputs[0], cells[0], seen[0], totals[0]):
            first.zero_()
        gates, queries = made(steps, batch, 4 * width, **exact), made(steps, batch, len(query))
        product = made(batch, 4 * width)
        offsets, source = offsets.contiguous(), (memory, projected, outside)
        for step in range(steps):
            torch.mm(inputs[step], recurrent.T, out=product)
            hidden = inputs[step + 1, :, size:]
            mask = None if keep is None else keep[step]
            new, old = cells[step + 1], cells[step]
            training_kernels.cell(hidden, gates[step], new, offsets[step], product, old, mask, scale)
            torch.mm(hidden, query.T, out=queries[step])
            found = inputs[step + 1, :, :size], seen[step + 1], totals[step + 1]
            decoder_kernels.attend(found, queries[step], seen[step], totals[step], source, kernel, score)
        ctx.save_for_backward(
            recurrent, query, *source[:2], kernel, score, inputs, cells, seen, totals, gates, queries, keep
        )
        ctx.scale, ctx.dtype = scale, offsets.dtype
        return inputs[1:, :, size:], inputs[1:, :, :size], seen[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_hiddens: Tensor, of_contexts: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:
        from . import training_kernels as kernels

        recurrent, query, memory, projected, kernel, score = ctx.saved_tensors[:6]
        inputs, cells, seen, totals, gates, queries, keep = ctx.saved_tensors[6:]
        (steps, batch, attention), (symbols, size) = queries.shape, memory.shape[1:]
        of_hiddens, of_contexts, of_weights = (x.contiguous() for x in (of_hiddens, of_contexts, of_weights))
        exact = {"dtype": torch.float32, "device": memory.device}
        found = torch.empty_like(gates, dtype=memory.dtype)
        contexts, asked = torch.empty_like(of_contexts), torch.empty_like(queries)
        windows = torch.zeros(batch, symbols, kernels.taps_of(kernel), **exact)
        energies, through = torch.empty(batch, symbols, **exact), torch.zeros(batch, symbols, **exact)
        sums = (
            torch.zeros(batch, symbols, attention, **exact),
            torch.zeros(batch, windows.shape[2], attention, **exact),
            torch.zeros(batch, attention, **exact),
        )
        carry, given = torch.zeros_like(cells[0]), torch.zeros_like(inputs[0])
        hidden = torch.empty_like(of_hiddens[0])
        taps = len(kernel) // 2
        for step in reversed(range(steps)):
            outer = (of_contexts[step], of_weights[step], windows, taps)
            kernels.weights_backward(energies, contexts[step], through, seen[step + 1], memory, given, *outer)
            before = (queries[step], seen[step], totals[step], projected, kernel, score)
            kernels.energies_backward(asked[step], windows, sums, energies, *before)
            torch.addmm(given[:, size:], asked[step], query, out=hidden)
            mask = None if keep is None else keep[step]
            saved = gates[step], cells[step], cells[step + 1]
            kernels.cell_backward(found[step], carry, saved, hidden, of_hiddens[step], mask, ctx.scale)
            torch.mm(found[step], recurrent, out=given)
        of_recurrent = found.flatten(0, 1).T @ inputs[:-1].flatten(0, 1)
        of_query = asked.flatten(0, 1).T @ inputs[1:, :, size:].flatten(0, 1)
        of_memory = torch.bmm(seen[1:].to(memory.dtype).permute(1, 2, 0), contexts.transpose(0, 1))
        of_kernel = sums[1].sum(0)[: len(kernel)]
        low = (of_recurrent, of_query, of_memory, sums[0], of_kernel, sums[2].sum(0))
        return found.to(ctx.dtype), *(x.to(memory.dtype) for x in low), None, None, None


def attend_all(
    decoder: Any, offsets: Tensor, memory: Tensor, outside: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`model.Decoder._attend_all` on `AttentionLoop`."""
    config, rnn, attention = decoder.config, decoder.attention_rnn, decoder.attention
    recurrent = torch.cat((rnn.weight_ih[:, config.prenet :], rnn.weight_hh), 1).to(dtype)
    memory = memory.to(dtype).contiguous()
    projected = F.linear(memory, attention.memory.weight.to(dtype))
    kernel = attention.location_kernel().flatten(1).T.to(dtype).contiguous()
    score, query = attention.score.weight[0].to(dtype), attention.query.weight.to(dtype)
    shape = (*offsets.shape[:2], config.rnn)
    keep = kept(shape, config.rnn_dropout, decoder.training, memory.device)
    scale = 1 / (1 - config.rnn_dropout)
    return AttentionLoop.apply(offsets, recurrent, query, memory, projected, kernel, score, outside, keep, scale)


def decode_all(decoder: Any, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """`model.Decoder._decode_all` on `LstmLoop`."""
    config = decoder.config
    shape = (*offsets.shape[:2], config.rnn)
    keep = kept(shape, config.rnn_dropout, decoder.training, offsets.device)
    return LstmLoop.apply(offsets, decoder.decoder_rnn.weight_hh.to(dtype), keep, 1 / (1 - config.rnn_dropout))
