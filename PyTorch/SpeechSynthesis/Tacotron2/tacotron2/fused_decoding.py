"""The decoder's steps on the kernels of `decoder_kernels`: what `stepper.Stepper` computes, in eight launches a step.

K steps, B batch, T symbols, M mels, E encoder width, A attention width, H width of the RNNs.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from dlx.kernels import DTYPES, has_kernels

from .masking import length_mask
from .model import Tacotron2
from .stepper import Block, Source, State, Stepper


@functools.cache
def _kernels():
    """The kernel module, imported on first use because Triton comes only with GPU builds of PyTorch."""
    from . import decoder_kernels

    return decoder_kernels


def applies(model: Tacotron2) -> bool:
    """Whether the kernels take this model: on a GPU, of a type they know, its RNNs' width a multiple of 4."""
    weight = model.decoder.mel.weight
    return weight.dtype in DTYPES and has_kernels(weight.device.type) and model.config.rnn % 4 == 0


class FusedStepper(Stepper):
    """Takes the place of `Stepper` within `FastDecoder`: same states, same dropout, sums in float32 throughout."""

    def __init__(self, model: Tacotron2):
        super().__init__(model)
        kernels = _kernels()
        self.rnns = [kernels.interleaved(weight) for weight in self.rnns]
        self.biases = [kernels.interleaved(bias) for bias in self.biases]
        self.taps = self.kernel.flatten(1).T.contiguous()  # (2 K, A)
        self.query, self.output = self.query.contiguous(), self.output.contiguous()
        self.weights = self.score[0].contiguous()

    def source(self, memory: Tensor, lengths: Tensor) -> Source:
        """As the base's, but ``projected`` is (B, T, A), and the biases are not repeated."""
        projected = F.linear(memory, self.project).contiguous()
        outside = ~length_mask(lengths, memory.shape[1])
        return Source(memory.contiguous(), projected, outside, (self.biases[0], self.biases[1]))

    def step(self, state: State, source: Source, keep: Tensor) -> tuple[State, Tensor]:
        state, found = self.block(state, source, keep[None])
        return state, found.gates[0]

    def block(self, state: State, source: Source, keep: Tensor) -> tuple[State, Block]:
        """As many steps as ``keep`` (K, B, layers, P) has, each step's results in a place of its own."""
        kernels, memory = _kernels(), source.memory
        steps, batch, layers, prenet = keep.shape
        symbols, mels = memory.shape[1], self.config.num_mels
        made, exact = memory.new_empty, {"dtype": torch.float32}
        outputs = made(steps, batch, -(-(mels + 1) // 16) * 16)  # rows that begin at multiples of 32 bytes
        known = made(steps, layers, batch, prenet)
        hiddens, cells = made(2, steps, batch, self.config.rnn), made(2, steps, batch, self.config.rnn, **exact)
        queries, contexts = made(steps, batch, self.config.attention), made(steps, batch, self.config.encoder)
        weights, totals = made(2, steps, batch, symbols, **exact)
        frame, context = state.frame, state.context
        first, first_cell = state.attention_hidden, state.attention_cell
        second, second_cell = state.decoder_hidden, state.decoder_cell
        last, total = state.history.unbind(1)
        for step in range(steps):
            x = frame
            for layer, weight in enumerate(self.prenet):
                x = kernels.linear(known[step, layer], (x,), weight, keep=keep[step, :, layer])
            found, cell = hiddens[0, step], cells[0, step]
            first = kernels.lstm(found, cell, (x, context, first), self.rnns[0], source.offsets[0], first_cell)
            first_cell = cell
            query = kernels.linear(queries[step], (first,), self.query)
            context, seen, whole = contexts[step], weights[step], totals[step]
            given = (memory, source.projected, source.outside)
            kernels.attend((context, seen, whole), query, last, total, given, self.taps, self.weights)
            last, total = seen, whole
            found, cell = hiddens[1, step], cells[1, step]
            second = kernels.lstm(found, cell, (first, context, second), self.rnns[1], source.offsets[1], second_cell)
            second_cell = cell
            frame = kernels.linear(outputs[step], (second, context), self.output, self.bias)[:, :mels]
        history = torch.stack((last, total), 1)
        state = State(frame, first, first_cell, second, second_cell, context, history)
        return state, Block(outputs[..., :mels], outputs[..., mels], weights)
