"""The training steps of the acoustic model and of the vocoder: forward, loss, update. `dlx.step` does the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dlx import step
from dlx.precision import autocast
from dlx.speech.mel import MelSpectrogram

from .data import AudioBatch, TextMelBatch
from .loss import Tacotron2Loss, likelihood_loss


@dataclass
class TrainState(step.TrainState):
    """What a step of Tacotron 2 reads and changes. ``hide``, ``hide_run``: see `hide_frames`."""

    loss: Tacotron2Loss = field(default_factory=Tacotron2Loss)
    hide: float = 0.0
    hide_run: int = 1


@dataclass
class VocoderState(step.TrainState):
    """What a step of WaveGlow reads and changes; spectrograms are made of the pieces of sound, on the device."""

    mel: MelSpectrogram = field(default_factory=MelSpectrogram)
    sigma: float = 1.0


def hide_frames(mel: Tensor, share: float, run: int) -> Tensor:
    """Spectrograms (B, M, F) with about this share of their frames set to 0, in runs of at least ``run`` frames.

    Told every true frame before, a voice learns to go on from those and hardly to read, and is lost when it speaks,
    where it is told its own (Liu et al. 2019, arXiv:1909.01145, drop single frames for that). What it has to say
    through a run it can only know from the text.
    """
    if not share:
        return mel
    begins = torch.rand_like(mel[:, :1], dtype=torch.float32) < 1 - (1 - share) ** (1 / run)
    hidden = F.max_pool1d(begins.float(), run, 1, run // 2)[:, :, : mel.shape[2]] > 0
    return mel.masked_fill(hidden, 0.0)


def train_step(state: TrainState, batch: list[TextMelBatch]) -> Tensor:
    """One optimiser update over the micro-batches. Returns the mean loss as a tensor on the device, not waited for."""

    def loss_of(micro: TextMelBatch) -> Tensor:
        told = hide_frames(micro.mel, state.hide, state.hide_run)
        with autocast(state.precision, micro.mel.device):
            found = state(micro.text, micro.text_lengths, told, micro.mel_lengths)
        return state.loss(found, micro.mel, micro.gate, micro.text_lengths, micro.mel_lengths).total

    return step.update(state, batch, [micro.mel_lengths.sum() for micro in batch], loss_of)


def train_vocoder_step(state: VocoderState, batch: list[AudioBatch]) -> Tensor:
    """The same for WaveGlow."""

    def loss_of(micro: AudioBatch) -> Tensor:
        mel = state.mel(micro.audio)
        with autocast(state.precision, micro.audio.device):
            density = state(mel, micro.audio)
        return likelihood_loss(*density, sigma=state.sigma)

    return step.update(state, batch, [len(micro.audio) for micro in batch], loss_of)


def capture(state: TrainState | VocoderState, batch: list[TextMelBatch] | list[AudioBatch]) -> step.GraphedStep:
    """The step as a CUDA graph, to be called with a batch of the same shapes."""
    chosen = train_vocoder_step if isinstance(state, VocoderState) else train_step
    return step.GraphedStep(state, lambda inputs: chosen(state, inputs), batch)
