"""Objectives: of Tacotron 2 with its masks and guided attention, and of WaveGlow's likelihood.

B batch, T symbols, F frames, M mels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .masking import length_mask
from .model import Prediction


class Losses(NamedTuple):
    """Means over the batch's frames; ``total`` is their weighted sum."""

    total: Tensor
    mel: Tensor
    refined: Tensor
    gate: Tensor
    guide: Tensor


def guided_attention(alignments: Tensor, text_lengths: Tensor, mel_lengths: Tensor, width: float = 0.2) -> Tensor:
    """How far attention is from the diagonal, 0 to 1, the mean over frames (Tachibana et al. 2018, arXiv:1710.08969).

    ``alignments`` (B, F, T). The weight of frame f on symbol t costs ``1 - exp(-(t / T - f / F)^2 / (2 width^2))``.
    """
    options = {"device": alignments.device, "dtype": alignments.dtype}
    frames, symbols = (torch.arange(size, **options) for size in alignments.shape[1:])
    down = frames / mel_lengths.clamp(min=1)[:, None]
    across = symbols / text_lengths[:, None]
    cost = 1 - torch.exp(-((across[:, None] - down[:, :, None]) ** 2) / (2 * width**2))
    mask = length_mask(mel_lengths, alignments.shape[1])
    cost = (alignments * cost).sum(2)
    return torch.where(mask, cost, 0).sum() / mask.sum().clamp(min=1)


def attention_focus(alignments: Tensor, mel_lengths: Tensor) -> Tensor:
    """The largest weight of a frame, the mean over all frames: near 1 once attention has found what it reads.

    ``alignments`` (B, F, T). A model that has not learnt to align stays near one over the number of symbols, however
    low its loss, and will not speak.
    """
    mask = length_mask(mel_lengths, alignments.shape[1])
    return torch.where(mask, alignments.amax(2), 0).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class Tacotron2Loss:
    """Squared errors of the frames before and after the postnet, and cross entropy of the gate; padding counts nothing.

    ``gate_positive``: weight of the one frame of an utterance that should fire, against all others; ``guide``: weight
    of `guided_attention`, which makes attention find the diagonal in fewer steps.
    """

    gate_positive: float = 1.0
    guide: float = 0.0
    guide_width: float = 0.2

    def __call__(
        self, found: Prediction, mel: Tensor, gate: Tensor, text_lengths: Tensor, mel_lengths: Tensor
    ) -> Losses:
        """``mel`` (B, M, F) and ``gate`` (B, F) are the truth."""
        with torch.autocast(mel.device.type, enabled=False):
            mask = length_mask(mel_lengths, mel.shape[2])
            count = mask.sum().clamp(min=1)
            errors = []
            for frames in (found.mel, found.refined):
                error = (frames.to(mel.dtype) - mel).square().mean(1)
                errors.append(torch.where(mask, error, 0).sum() / count)
            positive = mel.new_full((), self.gate_positive)
            logits = found.gate.to(mel.dtype)
            entropy = F.binary_cross_entropy_with_logits(logits, gate, reduction="none", pos_weight=positive)
            stop = torch.where(mask, entropy, 0).sum() / count
            guide = mel.new_zeros(())
            if self.guide:
                guide = guided_attention(found.alignments.to(mel.dtype), text_lengths, mel_lengths, self.guide_width)
            return Losses(errors[0] + errors[1] + stop + self.guide * guide, *errors, stop, guide)


def likelihood_loss(z: Tensor, log_scales: Tensor, log_determinants: Tensor, sigma: float = 1.0) -> Tensor:
    """Negative log likelihood per sample, up to a constant (Prenger et al. 2018, equation 9 ff.).

    ``z`` (B, C, L) with spherical Gaussian prior of deviation ``sigma``; ``log_scales``: sum over all couplings,
    ``log_determinants``: sum of log |det W| over the mixings, for one position.
    """
    z = z.float() if z.dtype != torch.float64 else z
    positions = z.shape[0] * z.shape[2]
    return (z.square().sum() / (2 * sigma**2) - log_scales - positions * log_determinants) / z.numel()
