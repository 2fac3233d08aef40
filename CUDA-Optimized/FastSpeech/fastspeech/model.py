"""FastSpeech: text to mel spectrogram in one pass, all frames at once.

Ren et al. 2019, "FastSpeech: Fast, Robust and Controllable Text to Speech" (https://arxiv.org/abs/1905.09263), with the
sizes of NVIDIA's example. What differs from both: padding changes no result (the hidden layers of convolutions are
masked, too), and frames are counted in integers, so that half precision loses none.

B batch, T symbols, F frames, L either of them, C channels, H heads, D channels of a head, M mels. Sequences are
(B, L, C) inside; spectrograms are (B, M, F) outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0  # the symbol that pads
LONGEST = 1024  # frames that one symbol can last: a predictor that has gone astray fills no memory
LEVEL = -5.0  # mean of log mels
PERIOD = 10000.0  # of the slowest sinusoid, over 2 pi


@dataclass(frozen=True)
class FastSpeechConfig:
    """Sizes; the default is the published network. `blocks`: of the text's side and of the spectrogram's."""

    num_symbols: int = 148
    num_mels: int = 80
    channels: int = 384
    heads: int = 2
    head_channels: int = 64
    feed_forward: int = 1536
    encoder_blocks: int = 6
    decoder_blocks: int = 6
    predictor: int = 256
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.num_symbols < 2:
            raise ValueError(f"num_symbols must be at least 2, got {self.num_symbols}")
        if self.channels % 2:
            raise ValueError(f"channels must be even for sines and cosines, got {self.channels}")


class Prediction(NamedTuple):
    """`mel` is 0 beyond a row's length; `log_durations` is log(frames + 1) of each symbol as predicted."""

    mel: Tensor  # (B, M, F)
    mel_lengths: Tensor  # (B,) int64
    log_durations: Tensor  # (B, T) float32
    durations: Tensor  # (B, T) int64, those the spectrogram was made with


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """bool (B, size): true within each row's length."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def sinusoids(length: int, channels: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """(length, channels): row p is position p + 1; sine of even, cosine of odd channels, in pairs of one period."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(1, length + 1, device=device, dtype=wide)
    pairs = torch.arange(0, channels, 2, device=device, dtype=wide)
    angles = positions[:, None] * torch.exp(pairs * (-math.log(PERIOD) / channels))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1).to(dtype)


def round_durations(
    log_durations: Tensor,
    text_lengths: Tensor,
    speed: float | Tensor = 1.0,
    emphasis: Tensor | None = None,
    pauses: Tensor | None = None,
) -> Tensor:
    """Whole frames of each symbol, int64 (B, T), from predicted log(frames + 1).

    max(exp(x) - 1, 0), times ``emphasis`` (B, T), over ``speed`` (a number, or (B,)), rounded half up, at most LONGEST
    and 0 for what is not a number; then ``pauses`` (B, T), frames, are added, down to 0. 0 in the padding; a row of
    which nothing is left has one frame.
    """
    frames = (log_durations.float().exp() - 1).clamp(0, LONGEST)
    if emphasis is not None:
        frames = frames * emphasis
    divisor = speed[:, None] if isinstance(speed, Tensor) and speed.dim() else speed
    frames = torch.floor(frames / divisor + 0.5)
    frames = torch.where(frames > 0, frames, 0).clamp(max=LONGEST).long()  # also 0 where it is not a number
    if pauses is not None:
        frames = (frames + pauses.long()).clamp(min=0)
    frames = torch.where(length_mask(text_lengths, frames.shape[1]), frames, 0)
    first = torch.arange(frames.shape[1], device=frames.device) == 0
    return torch.where(first & (frames.sum(1, keepdim=True) == 0), 1, frames)


def frame_symbols(durations: Tensor, size: int) -> Tensor:
    """int64 (B, size): the symbol that each frame belongs to, from durations (B, T); beyond a row's end, its last one.

    Frames are counted in int64, whatever the precision of the network.
    """
    ends = durations.long().cumsum(1)
    steps = ends.new_zeros(ends.shape[0], size + 1)
    steps = steps.scatter_add(1, ends.clamp(max=size), torch.ones_like(ends))
    return steps.cumsum(1)[:, :size].clamp(max=durations.shape[1] - 1)


def regulate(x: Tensor, durations: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Length regulation (paper, 3.2): each row of x (B, T, C) repeated, (B, size, C), and the frames of each item (B,).

    0 beyond an item's frames; frames beyond ``size`` are cut.
    """
    lengths = durations.long().sum(1).clamp(max=size)
    index = frame_symbols(durations, size)
    expanded = x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
    return expanded * length_mask(lengths, size)[:, :, None].to(x.dtype), lengths


class Convolution(nn.Conv1d):
    """A convolution over (B, L, C), of kernel 3; zeros beyond the ends."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # channels come last in memory already, which is how tensor cores want them: nothing is moved
            weight = self.weight[:, :, None].contiguous(memory_format=torch.channels_last)
            return F.conv2d(x.transpose(1, 2)[:, :, None], weight, self.bias, padding=(0, 1))[:, :, 0].transpose(1, 2)
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention, residual, norm. ``keys`` bool (B, 1, 1, L): which positions are looked at."""

    def __init__(self, config: FastSpeechConfig) -> None:
        super().__init__()
        width = config.heads * config.head_channels
        self.heads = config.heads
        self.qkv = nn.Linear(config.channels, 3 * width)
        self.output = nn.Linear(width, config.channels)
        self.norm = nn.LayerNorm(config.channels)
        self.dropout = config.dropout

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            query, key, value, attn_mask=keys, dropout_p=self.dropout if self.training else 0.0
        )
        found = self.output(found.transpose(1, 2).flatten(2))
        return self.norm(x + F.dropout(found, self.dropout, self.training))


class FeedForward(nn.Module):
    """Two convolutions with a ReLU between, residual, norm. ``mask`` (B, L, 1) of x's type keeps padding out."""

    def __init__(self, config: FastSpeechConfig) -> None:
        super().__init__()
        self.first = Convolution(config.channels, config.feed_forward)
        self.second = Convolution(config.feed_forward, config.channels)
        self.norm = nn.LayerNorm(config.channels)
        self.dropout = config.dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        hidden = self.second(hidden * mask.to(hidden.dtype))
        return self.norm(x + F.dropout(hidden, self.dropout, self.training))


class Block(nn.Module):
    """A feed-forward Transformer block (paper, 3.1), (B, L, C) -> (B, L, C), 0 in the padding before and after."""

    def __init__(self, config: FastSpeechConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, keys) * mask
        return self.feed_forward(x, mask) * mask


class Stack(nn.Module):
    """Positions and blocks: one side of the network. x (B, L, C) is 0 in the padding."""

    def __init__(self, config: FastSpeechConfig, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(blocks))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        within = length_mask(lengths, x.shape[1])
        mask = within[:, :, None].to(x.dtype)
        # An empty item, which fills up a batch, looks at its first position: a softmax over nothing is not a number.
        keys = (within | (torch.arange(x.shape[1], device=x.device) == 0))[:, None, None]
        x = (x + sinusoids(x.shape[1], x.shape[2], x.device, x.dtype)) * mask
        for block in self.blocks:
            x = block(x, keys, mask)
        return x


class DurationPredictor(nn.Module):
    """log(frames + 1) of each symbol (paper, 3.3): (B, T, C) -> (B, T), 0 in the padding."""

    def __init__(self, config: FastSpeechConfig) -> None:
        super().__init__()
        self.first = Convolution(config.channels, config.predictor)
        self.first_norm = nn.LayerNorm(config.predictor)
        self.second = Convolution(config.predictor, config.predictor)
        self.second_norm = nn.LayerNorm(config.predictor)
        self.output = nn.Linear(config.predictor, 1)
        self.dropout = config.dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for convolution, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            x = F.dropout(norm(F.relu(convolution(x))), self.dropout, self.training)
            x = x * mask.to(x.dtype)
        return self.output(x)[:, :, 0] * mask[:, :, 0].to(x.dtype)


class FastSpeech(nn.Module):
    """Text to spectrogram. Symbol PAD pads; its embedding is 0 and stays so."""

    def __init__(self, config: FastSpeechConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or FastSpeechConfig()
        self.embedding = nn.Embedding(config.num_symbols, config.channels, padding_idx=PAD)
        self.encoder = Stack(config, config.encoder_blocks)
        self.durations = DurationPredictor(config)
        self.decoder = Stack(config, config.decoder_blocks)
        self.mel = nn.Linear(config.channels, config.num_mels)
        self._initialise()

    def _initialise(self) -> None:
        width = self.config.channels
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.constant_(self.mel.bias, LEVEL)  # else the first hundreds of steps would learn how loud speech is

    def encode(self, text: Tensor, text_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (B, T, C) of symbols (B, T), and log(frames + 1), float32 (B, T)."""
        mask = length_mask(text_lengths, text.shape[1])
        x = self.embedding(torch.where(mask, text, PAD)) * mask[:, :, None].to(self.embedding.weight.dtype)
        x = self.encoder(x, text_lengths)
        log_durations = self.durations(x, mask[:, :, None].to(x.dtype))
        return x, log_durations if log_durations.dtype == torch.float64 else log_durations.float()

    def decode(self, x: Tensor, durations: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Spectrogram (B, M, size) and its lengths (B,) of hidden states and whole frames of each symbol."""
        x, lengths = regulate(x, durations, size)
        mel = self.mel(self.decoder(x, lengths))
        mel = mel * length_mask(lengths, size)[:, :, None].to(mel.dtype)
        return mel.transpose(1, 2), lengths

    def forward(
        self,
        text: Tensor,
        text_lengths: Tensor,
        durations: Tensor | None = None,
        size: int | None = None,
        speed: float | Tensor = 1.0,
        emphasis: Tensor | None = None,
        pauses: Tensor | None = None,
    ) -> Prediction:
        """Spectrograms of symbols (B, T) with their lengths (B,).

        ``durations`` (B, T): true frames of each symbol, in training; else they are predicted, and ``speed`` (above 1
        is faster), ``emphasis`` (B, T; above 1 lasts longer) and ``pauses`` (B, T; frames) change them, see
        `round_durations`. ``size``: frames of the result; by default as many as the longest item has, which waits
        for the device.
        """
        x, log_durations = self.encode(text, text_lengths)
        if durations is None:
            durations = round_durations(log_durations, text_lengths, speed, emphasis, pauses)
        if size is None:
            size = max(int(durations.sum(1).max()), 1)
        mel, lengths = self.decode(x, durations, size)
        return Prediction(mel, lengths, log_durations, durations)
