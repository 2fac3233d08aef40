"""torch.hub entries: the names and calls that users of NVIDIA's hub know, on CPU or GPU.

tacotron2 = torch.hub.load(REPOSITORY, "nvidia_tacotron2", source="local", checkpoint="runs/voice")
waveglow = torch.hub.load(REPOSITORY, "nvidia_waveglow", source="local", checkpoint="runs/waveglow")
utils = torch.hub.load(REPOSITORY, "nvidia_tts_utils", source="local")
sequences, lengths = utils.prepare_input_sequence(["Hello world, I missed you so much."])
mel, mel_lengths, alignments = tacotron2.infer(sequences, lengths)
audio = waveglow.infer(mel)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlx import paths, weights
from dlx.speech.frontend import FrontEnd
from dlx.speech.hub import TextUtils
from dlx.speech.mel import MelConfig

from . import pretrained as loading
from . import registry
from .decoding import LIMIT, FastDecoder, Generators, decode
from .model import Tacotron2
from .waveglow import Denoiser, WaveGlow

NGC = "https://api.ngc.nvidia.com/v2/models/nvidia/"
FILES = {
    ("tacotron2", "fp32"): f"{NGC}tacotron2_pyt_ckpt_fp32/versions/19.09.0/files/nvidia_tacotron2pyt_fp32_20190427",
    ("tacotron2", "fp16"): f"{NGC}tacotron2_pyt_ckpt_amp/versions/19.09.0/files/nvidia_tacotron2pyt_fp16_20190427",
    ("waveglow", "fp32"): f"{NGC}waveglow_ckpt_fp32/versions/19.09.0/files/nvidia_waveglowpyt_fp32_20190427",
    ("waveglow", "fp16"): f"{NGC}waveglow_ckpt_amp/versions/19.09.0/files/nvidia_waveglowpyt_fp16_20190427",
}
MATH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class HubTacotron2(Tacotron2):
    """A Tacotron 2 that speaks by itself; ``front_end`` and ``mel`` say what it reads and writes."""

    front_end: FrontEnd
    mel: MelConfig
    _decoder: tuple[tuple[Any, ...], FastDecoder] | None = None

    def infer(
        self,
        inputs: Tensor,
        input_lengths: Tensor | None = None,
        *,
        generator: Generators | None = None,
        limit: int = LIMIT,
        threshold: float = 0.5,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Symbols (B, T) -> spectrograms (B, M, F), their lengths (B,), alignments (B, F, T), in the order given.

        The inputs may be anywhere and of any order. ``generator`` as for `decoding.decode`. Evaluation mode only.
        """
        if self.training:
            raise ValueError("infer needs evaluation mode: call eval() first")
        weight = self.decoder.mel.weight
        inputs = inputs.to(weight.device)
        if input_lengths is None:
            input_lengths = torch.full((len(inputs),), inputs.shape[1])
        state = tuple((parameter.data_ptr(), parameter._version) for parameter in self.decoder.parameters())
        if self._decoder is None or self._decoder[0] != state:  # weights that were moved or changed
            self._decoder = (state, FastDecoder(self))
        options = {"generator": generator, "limit": limit, "threshold": threshold}
        found = decode(self._decoder[1], inputs, input_lengths.to(weight.device), **options)
        return found.refined, found.lengths, found.alignments


class HubWaveGlow(WaveGlow):
    """A WaveGlow with the calls of NVIDIA's hub; ``mel`` says what it reads."""

    mel: MelConfig

    @torch.no_grad()
    def infer(
        self, mel: Tensor, sigma: float = 1.0, generator: torch.Generator | None = None, **options: Any
    ) -> Tensor:
        """Spectrograms (B, M, F) -> sound (B, F * 256) in -1..1, see `WaveGlow.infer`; they may be anywhere."""
        return super().infer(mel.to(self.upsample.weight.device), sigma, generator, **options)

    @staticmethod
    def remove_weightnorm(model: HubWaveGlow) -> HubWaveGlow:
        """The same model, ready for inference."""
        return model.prepare()

    def denoiser(self) -> Denoiser:
        """What takes the hum of this model away: ``waveglow.denoiser()(audio, strength=0.01)``."""
        return Denoiser(self)


def published_file(kind: str, model_math: str, force_reload: bool = False) -> Path:
    """NVIDIA's file in the cache, fetched once; see `dlx.weights.first_download` for what stands in for its hash."""
    address = FILES[kind, "fp32" if model_math == "fp32" else "fp16"]
    path = paths.weight_dir() / "nvidia" / f"{address.rpartition('/')[2]}.pt"
    return weights.first_download(address, path, force=force_reload)


def _find(
    kind: str, pretrained: bool, model_math: str, force_reload: bool, checkpoint: Any, arch: str, num_symbols: int
) -> loading.Found:
    if model_math not in MATH:
        raise ValueError(f"model_math {model_math!r} is none of {', '.join(MATH)}")
    if checkpoint is None and not pretrained:
        front_end = FrontEnd(loading.KNOWN_TABLES.get(num_symbols, FrontEnd().symbols)) if kind == "tacotron2" else None
        return loading.Found(registry.build(arch, num_symbols), arch, MelConfig(), front_end, "fresh weights")
    path = published_file(kind, model_math, force_reload) if checkpoint is None else checkpoint
    found = loading.load(path)
    if isinstance(found.model, Tacotron2) != (kind == "tacotron2"):
        raise ValueError(f"{path} holds a {found.arch}, not a {kind}")
    return found


def nvidia_tacotron2(
    pretrained=True,
    model_math="fp32",
    force_reload=False,
    checkpoint=None,
    device="cpu",
    arch="tacotron2",
    num_symbols=148,
):
    """Tacotron 2 (28.2 M parameters, 22,050 Hz): NVIDIA's LJSpeech weights, or your own.

    ``checkpoint``: a run's folder, a checkpoint, a weights file (ours, NVIDIA's, torchaudio's) or a published name.
    Otherwise ``pretrained=True`` fetches NVIDIA's file once, and ``pretrained=False`` gives fresh ones of ``arch`` in
    training mode, without network or files. ``device``: where to, the CPU by default whatever the weights come from.
    ``model.infer(symbols, lengths)`` -> spectrograms, lengths, alignments; ``nvidia_tts_utils`` makes the symbols.
    """
    found = _find("tacotron2", pretrained, model_math, force_reload, checkpoint, arch, num_symbols)
    model = found.model
    model.__class__ = HubTacotron2
    model.front_end, model.mel = found.front_end, found.mel
    return model.to(device, MATH[model_math])


def nvidia_waveglow(
    pretrained=True, model_math="fp32", force_reload=False, checkpoint=None, device="cpu", arch="waveglow"
):
    """WaveGlow (87.9 M parameters with 256 channels): NVIDIA's LJSpeech weights, or your own.

    Options as for ``nvidia_tacotron2``; the width is that of the file. Weights loaded with ``model_math`` "fp16" or
    "bf16" are ready for inference and no longer for training. ``model.infer(mel, sigma)`` -> sound (B, F * 256).
    """
    found = _find("waveglow", pretrained, model_math, force_reload, checkpoint, arch, registry.SYMBOLS)
    model = found.model
    model.__class__ = HubWaveGlow
    model.mel = found.mel
    model = model.to(device)
    return model if model_math == "fp32" else model.prepare(MATH[model_math])


def nvidia_tts_utils(voice=None, device="cpu"):
    """An object with ``prepare_input_sequence``; ``voice``, a Tacotron 2 of these entries, decides on the symbols.

    Order is kept: batches need not be sorted by length. By default the symbols are the published English ones.
    """
    return TextUtils(voice.front_end if voice is not None else None, device)
