"""torch.hub entries: a voice, and what makes symbols of texts for it.

voice = torch.hub.load(REPOSITORY, "nvidia_fastspeech", source="local", checkpoint="runs/flite")
utils = torch.hub.load(REPOSITORY, "nvidia_fastspeech_utils", source="local", voice=voice)
symbols, lengths = utils.prepare_input_sequence(["Hello world, I missed you so much."])
mel, mel_lengths, durations = voice.infer(symbols, lengths, speed=0.9)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlx import weights
from dlx.speech.frontend import FrontEnd
from dlx.speech.hub import TextUtils
from dlx.speech.mel import MelConfig

from . import pretrained as loading
from . import registry
from .cuda.engine import check
from .data import lead_of
from .model import FastSpeech

PUBLISHED = "fastspeech_compact.flite"  # the card that pretrained=True takes, once it is there
MATH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class HubFastSpeech(FastSpeech):
    """A FastSpeech that knows its symbols (`front_end`), spectrograms (`mel`), and whether texts are led in."""

    front_end: FrontEnd
    mel_config: MelConfig
    leads: bool

    @torch.no_grad()
    def infer(
        self,
        text: Tensor,
        lengths: Tensor,
        speed: float | Tensor = 1.0,
        emphasis: Tensor | None = None,
        pauses: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Symbols (B, T) with lengths (B,), anywhere -> spectrograms (B, M, F), their lengths, durations (B, T).

        See `FastSpeech.forward`. The voice should be in evaluation mode, as it comes from a checkpoint. ValueError for
        symbols, lengths or a speed out of range, where these are on the host.
        """
        device = self.embedding.weight.device
        check(text, lengths, self.config.num_symbols, speed)
        inputs = [value.to(device) if isinstance(value, Tensor) else value for value in (speed, emphasis, pauses)]
        found = self(text.to(device), lengths.to(device), None, None, *inputs)
        return found.mel, found.mel_lengths, found.durations


def nvidia_fastspeech(
    pretrained=True, model_math="fp32", checkpoint=None, device="cpu", arch="fastspeech", num_symbols=registry.SYMBOLS
):
    """FastSpeech (45.5 M parameters, 22,050 Hz spectrograms): your own weights, fresh ones, or this repository's.

    ``checkpoint``: a run's folder, a checkpoint, a weights file (ours or of NVIDIA's layout) or a published name.
    Otherwise ``pretrained=True`` takes what this repository publishes, a ValueError while that is nothing (NVIDIA has
    published no weights of FastSpeech), and ``pretrained=False`` gives fresh ones of ``arch`` in training mode, without
    network or files. ``model.infer(symbols, lengths)`` -> spectrograms, lengths, durations;
    ``nvidia_fastspeech_utils`` makes the symbols.
    """
    if model_math not in MATH:
        raise ValueError(f"model_math {model_math!r} is none of {', '.join(MATH)}")
    if checkpoint is None and pretrained:
        if PUBLISHED not in weights.cards():
            raise ValueError("no weights of FastSpeech are published: give checkpoint=..., or pretrained=False")
        checkpoint = PUBLISHED
    if checkpoint is None:
        front_end = FrontEnd() if num_symbols == registry.SYMBOLS else None
        found = loading.Found(registry.build(arch, num_symbols), arch, MelConfig(), front_end, "fresh weights")
    else:
        found = loading.load(checkpoint)
    model = found.model
    model.__class__ = HubFastSpeech
    model.front_end, model.mel_config, model.leads = found.front_end, found.mel, found.leads
    return model.to(device, MATH[model_math])


def nvidia_fastspeech_utils(voice=None, device="cpu"):
    """An object with ``prepare_input_sequence``; ``voice``, of these entries, decides on the symbols.

    By default they are the published English ones, led in by a space as this repository's voices expect.
    """
    front_end = FrontEnd() if voice is None or voice.front_end is None else voice.front_end
    return TextUtils(front_end, device, lead_of(front_end) if voice is None or voice.leads else ())
