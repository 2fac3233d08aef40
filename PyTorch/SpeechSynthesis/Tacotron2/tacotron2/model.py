"""Tacotron 2 (Shen et al. 2018, arXiv:1712.05884): from symbols to a mel spectrogram, one frame a step.

As in NVIDIA's published model there is plain dropout where the paper has zoneout, and the mel and gate layers read the
decoder's hidden state with the attention's context. Padding never changes a result, in training neither: what lies
behind an item's end is kept at zero, the backward LSTM begins at its last symbol, batch norms leave padding out.

B batch, T symbols, F frames, M mels, E encoder width, A attention width, P prenet width, H width of the RNNs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import fused_recurrence
from .masking import length_mask, reverse_within
from .recurrence import Product, lstm_cell


@dataclass(frozen=True)
class Tacotron2Config:
    """The defaults are those of the published model."""

    num_symbols: int = 148
    num_mels: int = 80
    encoder: int = 512
    encoder_layers: int = 3
    prenet: int = 256
    prenet_layers: int = 2
    rnn: int = 1024
    attention: int = 128
    location_filters: int = 32
    location_kernel: int = 31
    postnet: int = 512
    postnet_layers: int = 5
    kernel: int = 5
    dropout: float = 0.5  # of the prenet, in speech as in training
    conv_dropout: float = 0.5  # of the convolutions of encoder and postnet
    rnn_dropout: float = 0.1  # of the RNNs' hidden states

    def __post_init__(self) -> None:
        for name in ("kernel", "location_kernel"):
            if getattr(self, name) % 2 == 0:
                raise ValueError(f"{name} must be odd, got {getattr(self, name)}")
        if self.encoder % 2:
            raise ValueError(f"encoder must be even, for two directions, got {self.encoder}")


class Prediction(NamedTuple):
    """Of a whole batch with given frames. `mel` is before the postnet, `refined` after; gates are logits."""

    mel: Tensor  # (B, M, F)
    refined: Tensor  # (B, M, F)
    gate: Tensor  # (B, F)
    alignments: Tensor  # (B, F, T)


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm of (B, C, L) whose statistics leave padding out; ``mask`` (B, 1, L) is true for what counts."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.training or mask is None:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.weight.dtype)
            count = mask.sum()
            mean = (x * mask).sum((0, 2)) / count
            centred = (x - mean[:, None]) * mask
            variance = centred.square().sum((0, 2)) / count
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(unbiased, self.momentum)
                self.num_batches_tracked += 1
            scale = self.weight * torch.rsqrt(variance + self.eps)
            return centred * scale[:, None] + self.bias[:, None]


class ConvBlock(nn.Module):
    """Convolution, batch norm, ``activation`` (relu, tanh or none), dropout; zero behind each item's end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, activation: str, dropout: float):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)
        self.norm = MaskedBatchNorm(outputs)
        self.activation, self.dropout = activation, dropout
        gain = nn.init.calculate_gain("linear" if activation == "none" else activation)
        nn.init.xavier_uniform_(self.conv.weight, gain)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.conv(x), mask)
        if self.activation != "none":
            x = torch.relu(x) if self.activation == "relu" else torch.tanh(x)
        return F.dropout(x, self.dropout, self.training) * mask


class Encoder(nn.Module):
    """Symbols (B, T) and lengths (B,) -> memory (B, T, E), zero behind each item's end."""

    def __init__(self, config: Tacotron2Config):
        super().__init__()
        width = config.encoder
        self.embedding = nn.Embedding(config.num_symbols, width)
        nn.init.xavier_uniform_(self.embedding.weight)
        self.layers = nn.ModuleList(
            ConvBlock(width, width, config.kernel, "relu", config.conv_dropout) for _ in range(config.encoder_layers)
        )
        self.forward_lstm = nn.LSTM(width, width // 2, batch_first=True)
        self.backward_lstm = nn.LSTM(width, width // 2, batch_first=True)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        mask = length_mask(lengths, text.shape[1])[:, None]
        x = self.embedding(text).transpose(1, 2) * mask
        for layer in self.layers:
            x = layer(x, mask)
        x = x.transpose(1, 2)
        ahead, _ = self.forward_lstm(x)
        back, _ = self.backward_lstm(reverse_within(x, lengths))
        return torch.cat((ahead, reverse_within(back, lengths)), 2) * mask.transpose(1, 2)


class Prenet(nn.Module):
    """Frames (..., M) -> (..., P). Its dropout is never off; ``keep`` (layers, ..., P) replaces the drawn one.

    There are no biases, so a frame of zeros, with which decoding begins, comes out as zeros.
    """

    def __init__(self, config: Tacotron2Config):
        super().__init__()
        widths = [config.num_mels] + [config.prenet] * config.prenet_layers
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.dropout = config.dropout
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            x = F.dropout(x, self.dropout) if keep is None else x * keep[number]
        return x


class Attention(nn.Module):
    """Location-sensitive attention (Chorowski et al. 2015): scores see where it was before, and ever."""

    def __init__(self, config: Tacotron2Config):
        super().__init__()
        self.query = nn.Linear(config.rnn, config.attention, bias=False)
        self.memory = nn.Linear(config.encoder, config.attention, bias=False)
        self.score = nn.Linear(config.attention, 1, bias=False)
        self.location_conv = nn.Conv1d(2, config.location_filters, config.location_kernel, bias=False)
        self.location_dense = nn.Linear(config.location_filters, config.attention, bias=False)
        for layer in (self.query, self.memory, self.location_dense):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))

    def project(self, memory: Tensor) -> Tensor:
        """What does not depend on the step: (B, T, E) -> (B, A, T)."""
        return self.memory(memory).transpose(1, 2)

    def location_kernel(self) -> Tensor:
        """The two location layers as one kernel (A, 2, K), since nothing is between them."""
        return torch.einsum("af,fck->ack", self.location_dense.weight, self.location_conv.weight)


def attend(
    query: Tensor, history: Tensor, projected: Tensor, memory: Tensor, outside: Tensor, kernel: Tensor, score: Tensor
) -> tuple[Tensor, Tensor]:
    """Context (B, E) and weights (B, T) of one step.

    ``query`` (B, A); ``history`` (B, 2, T): the weights of the last step and the sum of all; ``outside`` (B, T):
    true for padding; ``kernel`` (A, 2, K) and ``score`` (1, A) of `Attention`.
    """
    location = F.conv1d(history.to(kernel.dtype), kernel, padding=kernel.shape[2] // 2)
    energies = torch.tanh(projected + location + query[:, :, None])
    scores = (score @ energies)[:, 0].to(history.dtype)
    weights = scores.masked_fill(outside, float("-inf")).softmax(1)
    return torch.bmm(weights[:, None].to(memory.dtype), memory)[:, 0], weights


class Decoder(nn.Module):
    """All frames at once from given ones: only what truly depends on the step before is within a loop.

    The loops run on kernels where they can (`fused_recurrence`), unless ``fused`` is set to False.
    """

    def __init__(self, config: Tacotron2Config):
        super().__init__()
        self.config, self.fused = config, True
        self.prenet = Prenet(config)
        self.attention_rnn = nn.LSTMCell(config.prenet + config.encoder, config.rnn)
        self.attention = Attention(config)
        self.decoder_rnn = nn.LSTMCell(config.rnn + config.encoder, config.rnn)
        self.mel = nn.Linear(config.rnn + config.encoder, config.num_mels)
        self.gate = nn.Linear(config.rnn + config.encoder, 1)
        nn.init.xavier_uniform_(self.mel.weight)
        nn.init.xavier_uniform_(self.gate.weight)

    def forward(
        self, memory: Tensor, lengths: Tensor, mel: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Frames (B, M, F), gate logits (B, F), alignments (B, F, T); frame t is told the frames of ``mel`` before t.

        ``keep`` (F, B, layers, P): prenet dropout, see `Prenet`; row t is for the frame before t.
        """
        device = memory.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else memory.dtype
        offsets = self._attention_offsets(mel, keep)
        with torch.autocast(device, enabled=False):
            queries, contexts, alignments = self._attend_all(offsets, memory, lengths, dtype)
        inputs = torch.cat((queries, contexts), 2)
        offsets = F.linear(inputs, self.decoder_rnn.weight_ih, self.decoder_rnn.bias_ih + self.decoder_rnn.bias_hh)
        with torch.autocast(device, enabled=False):
            hidden = self._decode_all(offsets, dtype)
        outputs = torch.cat((hidden, contexts), 2)
        weight, bias = torch.cat((self.mel.weight, self.gate.weight)), torch.cat((self.mel.bias, self.gate.bias))
        both = F.linear(outputs, weight, bias)
        frames, gates = both.split((self.config.num_mels, 1), 2)
        return frames.permute(1, 2, 0), gates[:, :, 0].T, alignments.transpose(0, 1)

    def _attention_offsets(self, mel: Tensor, keep: Tensor | None) -> Tensor:
        """What the prenet adds to the gates of each step, (F, B, 4 H).

        The frames are read where they are. The first step is told a frame of zeros, of which the prenet makes zeros, so
        these are put before what it makes of the others.
        """
        rnn = self.attention_rnn
        told = mel.permute(2, 0, 1)[:-1]
        known = self.prenet(told, None if keep is None else keep[1:].permute(2, 0, 1, 3))
        known = F.pad(known, (0, 0, 0, 0, 1, 0))  # of the prenet's width, the gates are sixteen times as wide
        return F.linear(known, rnn.weight_ih[:, : self.config.prenet], rnn.bias_ih + rnn.bias_hh)

    def _attend_all(
        self, offsets: Tensor, memory: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (F, B, H), contexts (F, B, E) and weights (F, B, T) of all steps."""
        if self.fused and fused_recurrence.applies(memory, dtype):
            outside = ~length_mask(lengths, memory.shape[1])
            return fused_recurrence.attend_all(self, offsets, memory, outside, dtype)
        config, rnn, attention = self.config, self.attention_rnn, self.attention
        exact = torch.promote_types(dtype, torch.float32)  # of cell states and attention weights
        frames, batch = offsets.shape[:2]
        recurrent = torch.cat((rnn.weight_ih[:, config.prenet :], rnn.weight_hh), 1)
        gates = Product(offsets, recurrent, dtype)
        nothing = offsets.new_zeros((), dtype=dtype).expand(frames, batch, config.attention)
        queries = Product(nothing, attention.query.weight, dtype)
        memory = memory.to(dtype)
        projected = F.linear(memory, attention.memory.weight.to(dtype)).transpose(1, 2)
        kernel, score = attention.location_kernel().to(dtype), attention.score.weight.to(dtype)
        outside = ~length_mask(lengths, memory.shape[1])
        context = memory.new_zeros(batch, config.encoder)
        hidden = memory.new_zeros(batch, config.rnn)
        cell = hidden.to(exact)
        history = memory.new_zeros(batch, 2, memory.shape[1], dtype=exact)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(frames):
            hidden, cell = lstm_cell(*gates.parts(step, torch.cat((context, hidden), 1)), cell)
            hidden = F.dropout(hidden, config.rnn_dropout, self.training).to(dtype)
            context, weights = attend(queries(step, hidden), history, projected, memory, outside, kernel, score)
            history = torch.stack((weights, history[:, 1] + weights), 1)
            found.append((hidden, context, weights))
        hiddens, contexts, alignments = (torch.stack(parts) for parts in zip(*found, strict=True))
        return hiddens, contexts, alignments

    def _decode_all(self, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Hidden states (F, B, H) of the second RNN."""
        if self.fused and fused_recurrence.applies(offsets, dtype):
            return fused_recurrence.decode_all(self, offsets, dtype)
        frames, batch = offsets.shape[:2]
        gates = Product(offsets, self.decoder_rnn.weight_hh, dtype)
        hidden = offsets.new_zeros(batch, self.config.rnn, dtype=dtype)
        cell = hidden.to(torch.promote_types(dtype, torch.float32))
        found = []
        for step in range(frames):
            hidden, cell = lstm_cell(*gates.parts(step, hidden), cell)
            hidden = F.dropout(hidden, self.config.rnn_dropout, self.training).to(dtype)
            found.append(hidden)
        return torch.stack(found)


class Postnet(nn.Module):
    """Adds detail to whole spectrograms: (B, M, F) and a mask (B, 1, F) -> (B, M, F)."""

    def __init__(self, config: Tacotron2Config):
        super().__init__()
        widths = [config.num_mels] + [config.postnet] * (config.postnet_layers - 1) + [config.num_mels]
        activations = ["tanh"] * (config.postnet_layers - 1) + ["none"]
        self.layers = nn.ModuleList(
            ConvBlock(a, b, config.kernel, activation, config.conv_dropout)
            for a, b, activation in zip(widths[:-1], widths[1:], activations, strict=True)
        )

    @property
    def reach(self) -> int:
        """On how many frames to each side a frame depends."""
        return sum(layer.conv.kernel_size[0] // 2 for layer in self.layers)

    def forward(self, mel: Tensor, mask: Tensor) -> Tensor:
        x = mel = mel * mask
        for layer in self.layers:
            x = layer(x, mask)
        return mel + x


class Tacotron2(nn.Module):
    """Training and evaluation with given frames; `decoding.decode` speaks."""

    def __init__(self, config: Tacotron2Config | None = None):
        super().__init__()
        self.config = config or Tacotron2Config()
        self.encoder = Encoder(self.config)
        self.decoder = Decoder(self.config)
        self.postnet = Postnet(self.config)

    def forward(
        self, text: Tensor, text_lengths: Tensor, mel: Tensor, mel_lengths: Tensor, keep: Tensor | None = None
    ) -> Prediction:
        """Every frame predicted from the true ones before it.

        ``text`` (B, T) int64, ``mel`` (B, M, F). ``keep`` (F, B, layers, P) fixes the prenet's dropout, which is drawn
        anew otherwise, see `decoding.dropout`. Frames behind an item's end are 0 in ``mel`` and ``refined``.
        """
        memory = self.encoder(text, text_lengths)
        frames, gates, alignments = self.decoder(memory, text_lengths, mel, keep)
        mask = length_mask(mel_lengths, mel.shape[2])[:, None]
        frames = frames * mask
        return Prediction(frames, self.postnet(frames, mask), gates, alignments)
