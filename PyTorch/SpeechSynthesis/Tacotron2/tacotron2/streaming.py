"""Sound before the sentence is finished: what depends on some frames to each side, computed as frames come in.

Everything after the decoder is convolutions, so a piece computed with enough frames around it is the same as of the
whole. B batch, C channels, N new frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dlx.speech.vocoder import HifiGan, HifiGanConfig, Vocoder

from .vocoding import WaveGlowVocoder


class Growing:
    """``function`` of a tensor (B, C, F) that grows along F, in pieces that together are its value of the whole.

    ``function(window, first)`` gets frames from ``first`` on and gives ``scale`` values for each, along the last
    dimension; a value depends on ``reach`` frames to each side at most. Pieces have at least ``minimum`` frames.
    """

    def __init__(self, function: Callable[[Tensor, int], Tensor], reach: int, scale: int = 1, minimum: int = 1):
        self.function, self.reach, self.scale, self.minimum = function, reach, scale, minimum
        self.kept: Tensor | None = None
        self.first = self.done = 0  # frames: where `kept` begins, how many were given out

    def push(self, frames: Tensor | None, last: bool = False) -> Tensor | None:
        """What is certain after the new frames (B, C, N), everything if they are the last; None if that is too few."""
        if frames is not None:
            self.kept = frames if self.kept is None else torch.cat((self.kept, frames), 2)
        if self.kept is None:
            return None
        total = self.first + self.kept.shape[2]
        end = total if last else total - self.reach
        if end - self.done < (1 if last else self.minimum):
            return None
        window = self.kept[:, :, max(0, self.done - self.reach) - self.first :]
        start = total - window.shape[2]
        found = self.function(window, start)[..., (self.done - start) * self.scale : (end - start) * self.scale]
        self.done = end
        keep = max(0, end - self.reach)
        self.kept, self.first = self.kept[:, :, keep - self.first :], keep
        return found


def hifigan_reach(config: HifiGanConfig) -> int:
    """On how many frames to each side a sample of HiFi-GAN depends."""
    reach, rate = 3.0, 1
    widest = max(kernel // 2 * sum(1 + d for d in config.resblock_dilations) for kernel in config.resblock_kernels)
    for up, kernel in zip(config.upsample_rates, config.upsample_kernels, strict=True):
        reach += math.ceil(kernel / up) / rate
        rate *= up
        reach += widest / rate
    return math.ceil(reach + 3 / rate)


def growing_sound(vocoder: Vocoder, minimum: int) -> Growing | None:
    """A vocoder for spectrograms that grow, None for one that needs the whole (Griffin-Lim)."""
    if isinstance(vocoder, WaveGlowVocoder):
        return Growing(vocoder.window, vocoder.reach, vocoder.mel.hop_length, minimum)
    if isinstance(vocoder, HifiGan):
        reach = hifigan_reach(vocoder.config)
        return Growing(lambda mel, first: vocoder(mel), reach, vocoder.mel.hop_length, minimum)
    return None
