"""The objective: squared errors of the spectrogram and of the logarithms of durations; padding counts nothing.

B batch, T symbols, F frames, M mels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Prediction, length_mask


class Losses(NamedTuple):
    """`total` is the weighted sum; `mel` a mean over values of frames, `duration` over symbols."""

    total: Tensor
    mel: Tensor
    duration: Tensor


@dataclass(frozen=True)
class FastSpeechLoss:
    """Ren et al. 2019, 3.3 and 4.2; `duration_weight` is 1 there."""

    duration_weight: float = 1.0

    def __call__(
        self, found: Prediction, mel: Tensor, mel_lengths: Tensor, durations: Tensor, text_lengths: Tensor
    ) -> Losses:
        """`mel` (B, M, F) and `durations` (B, T) are the truth."""
        with torch.autocast(mel.device.type, enabled=False):
            frames = length_mask(mel_lengths, mel.shape[2])
            error = (found.mel.to(mel.dtype) - mel).square().mean(1)
            of_mel = torch.where(frames, error, 0).sum() / frames.sum().clamp(min=1)
            symbols = length_mask(text_lengths, durations.shape[1]) & (mel_lengths > 0)[:, None]
            error = (found.log_durations.to(mel.dtype) - (durations.to(mel.dtype) + 1).log()).square()
            of_duration = torch.where(symbols, error, 0).sum() / symbols.sum().clamp(min=1)
            return Losses(of_mel + self.duration_weight * of_duration, of_mel, of_duration)
