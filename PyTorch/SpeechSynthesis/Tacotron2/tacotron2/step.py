"""The training steps of the acoustic model and of the vocoder: forward, loss, update. `dlx.step` does the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dlx import step
from dlx.precision import autocast
from dlx.speech.mel import MelSpectrogram

from .data import AudioBatch, TextMelBatch
from .loss import Tacotron2Loss, likelihood_loss


@dataclass
class TrainState(step.TrainState):
    """What a step of Tacotron 2 reads and changes."""

    loss: Tacotron2Loss = field(default_factory=Tacotron2Loss)


@dataclass
class VocoderState(step.TrainState):
    """What a step of WaveGlow reads and changes; spectrograms are made of the pieces of sound, on the device."""

    mel: MelSpectrogram = field(default_factory=MelSpectrogram)
    sigma: float = 1.0


def train_step(state: TrainState, batch: list[TextMelBatch]) -> Tensor:
    """One optimiser update over the micro-batches. Returns the mean loss as a tensor on the device, not waited for."""

    def loss_of(micro: TextMelBatch) -> Tensor:
        with autocast(state.precision, micro.mel.device):
            found = state(micro.text, micro.text_lengths, micro.mel, micro.mel_lengths)
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
