"""What each kernel computes, in plain PyTorch, in the type of its input: the meaning of `torch_ops`, on any device.

B batch, T symbols, F frames, L either, C channels, I inputs, O outputs, K taps, H heads. Lengths are int32 (B,); what
lies beyond an item's length is read as 0 and written as 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import LONGEST, frame_symbols, length_mask, sinusoids


def keep(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, L, C), 0 beyond the lengths, whatever was there."""
    return x if lengths is None else torch.where(length_mask(lengths, x.shape[1])[:, :, None], x, 0)


def regulate(x: Tensor, durations: Tensor, size: int, least: int, with_positions: bool) -> tuple[Tensor, Tensor]:
    """x (B, T, C) repeated by int32 durations (B, T): (B, size, C) and int32 lengths (B,).

    An item without frames has ``least`` frames of its first symbol; positions of the frames are added if asked for.
    """
    durations = durations.clamp(min=0).long()
    if durations.shape[1]:
        empty = durations.sum(1) == 0
        durations = durations.clone()
        durations[:, 0] = torch.where(empty, least, durations[:, 0])
    lengths = durations.sum(1).clamp(max=size).int()
    index = frame_symbols(durations, size)
    expanded = x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
    if with_positions:
        expanded = expanded + sinusoids(size, x.shape[2], x.device, x.dtype)
    return keep(expanded, lengths), lengths


def add_positions(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, L, C) and the sinusoids of its positions."""
    return keep(x + sinusoids(x.shape[1], x.shape[2], x.device, x.dtype), lengths)


def embed(table: Tensor, symbols: Tensor, lengths: Tensor | None) -> Tensor:
    """Rows of the table (rows, C) that int32 symbols (B, L) name, and the sinusoids; a symbol without a row is 0."""
    there = (symbols >= 0) & (symbols < len(table))
    x = torch.where(there[:, :, None], table[torch.where(there, symbols, 0).long()], 0)
    return add_positions(x, lengths)


def residual_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, gain: Tensor, shift: Tensor, lengths: Tensor | None,
    epsilon: float,
) -> Tensor:  # fmt: skip
    """LayerNorm(x + bias + residual) over C."""
    x = x if bias is None else x + bias
    x = x if residual is None else x + residual
    return keep(F.layer_norm(x, x.shape[-1:], gain, shift, epsilon), lengths)


def attention64(qkv: Tensor, lengths: Tensor | None, heads: int) -> Tensor:
    """(B, L, 3 * H * 64) -> (B, L, H * 64), masked self-attention; an item of length 0 gives 0."""
    query, key, value = keep(qkv, lengths).unflatten(2, (3, heads, 64)).permute(2, 0, 3, 1, 4)
    mask = None
    if lengths is not None:  # a softmax over nothing is not a number: an empty item looks at one place
        mask = length_mask(lengths.clamp(min=1), qkv.shape[1])[:, None, None]
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return keep(found.transpose(1, 2).flatten(2), lengths)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, relu: bool) -> Tensor:
    """x (B, L, I) by weight (O, K, I), zeros beyond the ends, K 1 or 3."""
    y = F.conv1d(keep(x, lengths).transpose(1, 2), weight.transpose(1, 2), bias, padding=weight.shape[1] // 2)
    return keep((y.relu() if relu else y).transpose(1, 2), lengths)


def convolution_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gain: Tensor, shift: Tensor,
    lengths: Tensor | None, relu: bool, epsilon: float,
) -> Tensor:  # fmt: skip
    """LayerNorm(convolution (+ ReLU) + residual)."""
    return residual_norm(convolution(x, weight, bias, lengths, relu), None, residual, gain, shift, lengths, epsilon)


def predict_durations(
    x: Tensor, weights: list[Tensor], lengths: Tensor | None, speed: Tensor | None, emphasis: Tensor | None,
    pauses: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """float32 log(frames + 1) (B, T) and int32 whole frames (B, T).

    ``weights``: twice a convolution (P, 3, I), its bias, the norm's gain and shift; then a row (P,) and its bias (1,).
    Unlike `model.round_durations` an item without frames stays so; `regulate` gives it its one.
    """
    hidden = x
    for first in (0, 4):
        hidden = convolution(hidden, *weights[first : first + 2], lengths, True)
        hidden = keep(F.layer_norm(hidden, hidden.shape[-1:], *weights[first + 2 : first + 4], epsilon), lengths)
    logs = keep(F.linear(hidden, weights[8][None], weights[9]), lengths)[:, :, 0]
    logs = logs if logs.dtype == torch.float64 else logs.float()
    if lengths is None:
        lengths = torch.full((len(x),), x.shape[1], dtype=torch.int32, device=x.device)
    frames = (logs.float().exp() - 1).clamp(0, LONGEST)
    frames = frames if emphasis is None else frames * emphasis
    frames = frames if speed is None else frames / speed[:, None]
    frames = torch.floor(frames + 0.5)
    frames = torch.where(frames > 0, frames, 0).clamp(max=LONGEST).int()
    frames = frames if pauses is None else (frames + pauses).clamp(min=0)
    return logs, torch.where(length_mask(lengths, x.shape[1]), frames, 0).int()
