"""Training steps on one made-up batch, for `benchmark`: ours, and the same model written plainly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlx import optim
from dlx.precision import LossScaler
from dlx.speech.mel import MelSpectrogram

from . import registry
from .data import AudioBatch, TextMelBatch
from .decoding import dropout
from .model import Tacotron2
from .plain import teacher_forced
from .step import TrainState, VocoderState, capture, train_step, train_vocoder_step

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig


def voice_batch(config: BenchmarkConfig, batch: int, symbols: int, device: torch.device) -> TextMelBatch:
    """Texts and spectrograms of full length."""
    generator = torch.Generator().manual_seed(config.seed)
    text = torch.randint(1, symbols, (batch, config.text_length), generator=generator)
    mel = torch.randn(batch, 80, config.frames, generator=generator)
    gate = torch.zeros(batch, config.frames)
    gate[:, -1] = 1
    lengths = (torch.full((batch,), config.text_length), torch.full((batch,), config.frames))
    made = TextMelBatch(text, lengths[0], mel, lengths[1], gate)
    return TextMelBatch(*(tensor.to(device) for tensor in made))


def audio_batch(config: BenchmarkConfig, batch: int, device: torch.device) -> AudioBatch:
    """Pieces of noise."""
    generator = torch.Generator().manual_seed(config.seed)
    audio = 0.1 * torch.randn(batch, config.segment, generator=generator)
    return AudioBatch(audio.to(device), torch.full((batch,), config.segment, device=device))


def engine_of(config: BenchmarkConfig, device: torch.device) -> str:
    """What "auto" means; ValueError for a graph where there is no GPU."""
    if config.engine == "graph" and device.type != "cuda":
        raise ValueError("engine graph needs a CUDA device; use eager or compile")
    return config.engine if config.engine != "auto" else "graph" if device.type == "cuda" else "eager"


@torch.no_grad()
def agreement(model: Tacotron2, batch: TextMelBatch) -> dict[str, float]:
    """How far ours is from the plain way of the same model in evaluation mode and float32, on a few frames."""
    frames = min(batch.mel.shape[2], 50)
    few = [batch.text, batch.text_lengths, batch.mel[:, :, :frames], batch.mel_lengths.clamp(max=frames)]
    keep = dropout(model, frames, len(batch.text), torch.Generator().manual_seed(0))
    model.eval()
    found, expected = model(*few, keep), teacher_forced(model, *few, keep)
    model.train()
    return {"largest_difference": float((found.refined - expected.refined).abs().max())}


def training_step(
    config: BenchmarkConfig, name: str, batch: int, device: torch.device
) -> tuple[Callable[[], Any], dict[str, float]]:
    """A call that makes one optimiser step, by "ours" or "plain", and how ours agrees with the plain way."""
    torch.manual_seed(config.seed)
    model = registry.build(config.arch).to(device).train()
    voice = isinstance(model, Tacotron2)
    decay = 1e-6 if voice else 0.0
    optimizer = optim.build_optimizer(model, "adam", lr=1e-4, momentum=0.9, weight_decay=decay)
    scaler = LossScaler(model.named_parameters(), enabled=config.precision == "fp16")
    options: dict[str, Any] = {"precision": config.precision, "scaler": scaler, "max_norm": 1.0 if voice else 65504.0}
    engine = engine_of(config, device) if name == "ours" else "eager"
    if name == "plain" and voice:
        options["forward"] = functools.partial(teacher_forced, model)
    elif engine == "compile":
        options["forward"] = torch.compile(model)
    checks: dict[str, float] = {}
    if voice:
        state: Any = TrainState(model, optimizer, **options)
        inputs: Any = voice_batch(config, batch, registry.SYMBOLS, device)
        if name == "ours":
            checks = agreement(model, inputs)
    else:
        state = VocoderState(model, optimizer, mel=MelSpectrogram().to(device), **options)
        inputs = audio_batch(config, batch, device)
    step: Callable[[Any], Tensor] = train_step if voice else train_vocoder_step
    if engine == "graph":
        graphed = capture(state, [inputs])
        return lambda: graphed([inputs]), checks
    return lambda: step(state, [inputs]), checks
