"""One step of the decoder after the other, in plain PyTorch on merged weights: no choice here depends on a value.

K steps, B batch, T symbols, M mels, E encoder width, A attention width, P prenet width, H width of the RNNs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .masking import length_mask
from .model import Tacotron2, attend
from .recurrence import lstm_cell


class Block(NamedTuple):
    """K steps: frames (K, B, M), gate logits (K, B), attention weights (K, B, T)."""

    frames: Tensor
    gates: Tensor
    weights: Tensor


class State(NamedTuple):
    """What a step needs of the one before it."""

    frame: Tensor  # (B, M)
    attention_hidden: Tensor  # (B, H)
    attention_cell: Tensor
    decoder_hidden: Tensor
    decoder_cell: Tensor
    context: Tensor  # (B, E)
    history: Tensor  # (B, 2, T)


class Source(NamedTuple):
    """What stays the same through all steps; `offsets` are the biases of the two RNNs, (B, 4 H) each."""

    memory: Tensor  # (B, T, E)
    projected: Tensor  # (B, A, T)
    outside: Tensor  # (B, T) bool, true for padding
    offsets: tuple[Tensor, Tensor]


class Stepper:
    """The decoder's weights merged for single steps: each RNN is one product, mel and gate are one."""

    def __init__(self, model: Tacotron2):
        decoder = model.decoder
        self.config, attention = model.config, decoder.attention
        self.prenet = [layer.weight.detach() for layer in decoder.prenet.layers]
        rnns = (decoder.attention_rnn, decoder.decoder_rnn)
        self.rnns = [torch.cat((rnn.weight_ih, rnn.weight_hh), 1).detach() for rnn in rnns]
        self.dtype = decoder.mel.weight.dtype
        self.exact = torch.promote_types(self.dtype, torch.float32)  # of cell states and attention weights
        self.biases = [(rnn.bias_ih + rnn.bias_hh).detach().to(self.exact) for rnn in rnns]
        self.project = attention.memory.weight.detach()
        self.query, self.score = attention.query.weight.detach(), attention.score.weight.detach()
        self.kernel = attention.location_kernel().detach()
        self.output = torch.cat((decoder.mel.weight, decoder.gate.weight)).detach()
        self.bias = torch.cat((decoder.mel.bias, decoder.gate.bias)).detach()

    def source(self, memory: Tensor, lengths: Tensor) -> Source:
        """What the steps read of the encoder's memory (B, T, E)."""
        projected = F.linear(memory, self.project).transpose(1, 2).contiguous()
        offsets = tuple(bias.repeat(len(memory), 1) for bias in self.biases)
        return Source(memory, projected, ~length_mask(lengths, memory.shape[1]), offsets)

    def start(self, memory: Tensor) -> State:
        """The state before the first step: all zeros."""
        batch, width = len(memory), self.config.rnn
        zeros = memory.new_zeros
        return State(
            zeros(batch, self.config.num_mels),
            zeros(batch, width),
            zeros(batch, width, dtype=self.exact),
            zeros(batch, width),
            zeros(batch, width, dtype=self.exact),
            zeros(batch, self.config.encoder),
            zeros(batch, 2, memory.shape[1], dtype=self.exact),
        )

    def step(self, state: State, source: Source, keep: Tensor) -> tuple[State, Tensor]:
        """The next state, whose frame is this step's, and its gate logit (B,). ``keep`` (B, layers, P): `dropout`."""
        x = state.frame
        for number, weight in enumerate(self.prenet):
            x = torch.relu(F.linear(x, weight)) * keep[:, number]
        product = F.linear(torch.cat((x, state.context, state.attention_hidden), 1), self.rnns[0])
        hidden, cell = lstm_cell(source.offsets[0], product, state.attention_cell)
        hidden = hidden.to(self.dtype)
        query = F.linear(hidden, self.query)
        fixed = (source.projected, source.memory, source.outside, self.kernel, self.score)
        context, weights = attend(query, state.history, *fixed)
        history = torch.stack((weights, state.history[:, 1] + weights), 1)
        product = F.linear(torch.cat((hidden, context, state.decoder_hidden), 1), self.rnns[1])
        second, second_cell = lstm_cell(source.offsets[1], product, state.decoder_cell)
        second = second.to(self.dtype)
        both = F.linear(torch.cat((second, context), 1), self.output, self.bias)
        frame, gate = both.split((self.config.num_mels, 1), 1)
        return State(frame, hidden, cell, second, second_cell, context, history), gate[:, 0]

    def block(self, state: State, source: Source, keep: Tensor) -> tuple[State, Block]:
        """As many steps as ``keep`` (K, B, layers, P) has."""
        found = []
        for factors in keep.unbind(0):
            state, gate = self.step(state, source, factors)
            found.append((state.frame, gate, state.history[:, 0]))
        return state, Block(*(torch.stack(parts) for parts in zip(*found, strict=True)))
