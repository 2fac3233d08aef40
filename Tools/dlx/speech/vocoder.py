"""Log-mel spectrograms into sound: the HiFi-GAN V1 generator, for inference, and Griffin-Lim behind one interface.

Kong, Kim and Bae, "HiFi-GAN: Generative Adversarial Networks for Efficient and High Fidelity Speech Synthesis", 2020.
Shapes: B batch, M mels, F frames, C channels, T samples (F * hop_length).

    vocoder = load("hifigan_v1.universal")      # or "griffin-lim", or a checkpoint's path
    vocoder.mel.require_same(acoustic.mel)
    audio = vocoder(mel)                        # (B, M, F) -> (B, T), float32 in -1..1
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlx import weights

from .mel import MelConfig, griffin_lim

SLOPE = 0.1  # of the leaky ReLUs but the last, which has torch's default of 0.01
GRIFFIN_LIM = "griffin-lim"


class Vocoder(Protocol):
    """What makes sound of spectrograms: HiFi-GAN, Griffin-Lim, and a task's own (WaveGlow)."""

    mel: MelConfig

    def __call__(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(B, M, F) -> (B, F * hop_length). With `lengths` (B,) in frames, a row is what it would be alone, then 0."""
        ...


@dataclass(frozen=True)
class HifiGanConfig:
    """The generator's shape; the default is V1. `upsample_rates` multiply to the hop length."""

    channels: int = 512
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2)
    upsample_kernels: tuple[int, ...] = (16, 16, 4, 4)
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    resblock_dilations: tuple[int, ...] = (1, 3, 5)
    num_mels: int = 80

    def __post_init__(self) -> None:
        if len(self.upsample_rates) != len(self.upsample_kernels):
            raise ValueError(f"{len(self.upsample_rates)} upsample_rates, but {len(self.upsample_kernels)} kernels")
        if self.channels % 2 ** len(self.upsample_rates):
            raise ValueError(f"{self.channels} channels cannot be halved {len(self.upsample_rates)} times")


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


class ResidualBlock(nn.Module):
    """Pairs of convolutions, the first of each dilated, each pair with a way around it; (B, C, T) -> (B, C, T)."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel - 1) // 2) for d in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in dilations)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for first, second in zip(self.convs1, self.convs2, strict=True):
            inner = first(_masked(F.leaky_relu(x, SLOPE), mask))
            x = x + second(_masked(F.leaky_relu(inner, SLOPE), mask))
        return x


class HifiGan(nn.Module):
    """The generator with its weight normalisation folded in, (B, M, F) -> (B, F * hop_length)."""

    def __init__(self, config: HifiGanConfig | None = None, mel: MelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or HifiGanConfig()
        self.mel = mel or MelConfig(padding="same")
        hop = math.prod(config.upsample_rates)
        if hop != self.mel.hop_length or config.num_mels != self.mel.num_mels:
            raise ValueError(
                f"the generator makes {hop} samples of {config.num_mels} mels, the spectrograms have "
                f"{self.mel.hop_length} and {self.mel.num_mels}"
            )
        channels = config.channels
        self.conv_pre = nn.Conv1d(config.num_mels, channels, 7, padding=3)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernels, strict=True):
            up = nn.ConvTranspose1d(channels, channels // 2, kernel, rate, padding=(kernel - rate) // 2)
            self.ups.append(up)
            channels //= 2
            self.resblocks.extend(
                ResidualBlock(channels, size, config.resblock_dilations) for size in config.resblock_kernels
            )
        self.conv_post = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        if mel.dim() != 3 or mel.shape[1] != self.config.num_mels:
            raise ValueError(f"expected mel spectrograms (B, {self.config.num_mels}, F), got {tuple(mel.shape)}")
        x, mask = mel.to(self.conv_pre.weight.dtype), None
        if lengths is not None and bool((lengths != mel.shape[2]).any()):
            steps = torch.arange(mel.shape[2], device=mel.device)
            mask = (steps < lengths.to(mel.device)[:, None])[:, None].to(self.conv_pre.weight.dtype)
        return self._sound(x, mask)

    def _sound(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, M, F) and a mask (B, 1, F), or both with dimensions of 1 between, to float32 (B, F * hop_length)."""
        x = self.conv_pre(_masked(x, mask))
        blocks = len(self.config.resblock_kernels)
        for stage, (up, rate) in enumerate(zip(self.ups, self.config.upsample_rates, strict=True)):
            x = up(_masked(F.leaky_relu(x, SLOPE), mask))
            mask = None if mask is None else mask.repeat_interleave(rate, -1)
            several = [block(x, mask) for block in self.resblocks[stage * blocks : (stage + 1) * blocks]]
            x = sum(several[1:], several[0]) / blocks
        audio = torch.tanh(self.conv_post(_masked(F.leaky_relu(x), mask)))
        return _masked(audio, mask).flatten(1).float()


def audible(model: HifiGan) -> HifiGan:
    """Fresh weights scaled so that what every convolution makes deviates by 1: sounds that fade from layer to layer
    would be rounding alone in 16 bits, and say nothing about a program."""

    def scale(layer: nn.Module, inputs: tuple[Tensor, ...], made: Tensor) -> Tensor:
        deviation = made.std()
        layer.weight /= deviation
        layer.bias /= deviation
        return made / deviation

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d)]
    handles = [layer.register_forward_hook(scale) for layer in layers]
    with torch.no_grad():
        model(torch.randn(1, model.config.num_mels, 20))
    for handle in handles:
        handle.remove()
    return model


class GriffinLim(nn.Module):
    """`mel.griffin_lim` as a vocoder: no weights, any spectrogram, a metallic sound."""

    def __init__(self, mel: MelConfig | None = None, iterations: int = 60, seed: int = 0) -> None:
        super().__init__()
        self.mel, self.iterations, self.seed = mel or MelConfig(), iterations, seed

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        options = {"iterations": self.iterations, "seed": self.seed}
        if lengths is None:
            return griffin_lim(mel, self.mel, **options)
        audio = mel.new_zeros(len(mel), mel.shape[2] * self.mel.hop_length, dtype=torch.float32)
        for row, length in enumerate(lengths.tolist()):
            audio[row, : length * self.mel.hop_length] = griffin_lim(
                mel[row : row + 1, :, :length], self.mel, **options
            )
        return audio


# Weights


def fold_weight_norm(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with every pair of magnitude and direction (`weight_g`, `weight_v`, or newer names) multiplied."""
    names = {".weight_g": ".weight_v", ".parametrizations.weight.original0": ".parametrizations.weight.original1"}
    folded = {}
    for name, tensor in state_dict.items():
        for magnitude, direction in names.items():
            if name.endswith(magnitude):
                stem = name.removesuffix(magnitude)
                if stem + direction not in state_dict:
                    raise ValueError(f"{name} has no {stem + direction} beside it")
                v = state_dict[stem + direction].double()
                norm = v.flatten(1).norm(dim=1).view(-1, *[1] * (v.dim() - 1))
                folded[stem + ".weight"] = (v * (tensor.double() / norm)).to(tensor.dtype)
                break
            if name.endswith(direction) and name.removesuffix(direction) + magnitude in state_dict:
                break
        else:
            folded[name] = tensor
    return folded


def to_canonical(state_dict: Mapping[str, Tensor], blocks: int = 3) -> dict[str, Tensor]:
    """The authors' or NVIDIA's key layout as `HifiGan` names it.

    NVIDIA's residual blocks are counted per stage (`resblocks.STAGE.BLOCK.convs1...`), the authors' throughout
    (`resblocks.NUMBER.convs1...`); old NVIDIA files hold kernels with one dimension more.
    """
    renamed = {}
    for name, tensor in state_dict.items():
        match = re.match(r"resblocks\.(\d+)\.(\d+)\.(?=convs[12]\.)", name)
        if match:
            name = f"resblocks.{int(match[1]) * blocks + int(match[2])}.{name[match.end() :]}"
        is_kernel = name.endswith((".weight", ".weight_v", ".weight_g", "original0", "original1"))
        renamed[name] = tensor.squeeze(-1) if is_kernel and tensor.dim() == 4 else tensor
    return fold_weight_norm(renamed)


def load_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The generator's tensors of a published file or a .safetensors file, in `HifiGan`'s names.

    The authors keep them in an entry "generator", NVIDIA in "gen_ema" (averaged, taken first where it is filled), too.
    """
    for key in ("gen_ema", "generator"):
        try:
            return to_canonical(weights.load_state_dict(path, key))
        except ValueError:
            continue  # it has no such entry, or cannot be read, which the next line says
    return to_canonical(weights.load_state_dict(path))


def load(
    source: str | os.PathLike[str] = "hifigan_v1.universal",
    *,
    device: str | torch.device = "cpu",
    mel: MelConfig | None = None,
    home: str | os.PathLike[str] | None = None,
) -> HifiGan | GriffinLim:
    """A vocoder by its name ("griffin-lim", or a card's) or from a HiFi-GAN V1 file. `mel`: what the file does not say.

    Raises ValueError when the name is unknown or the tensors do not fit (naming each).
    """
    if str(source) == GRIFFIN_LIM:
        return GriffinLim(mel).to(device).eval()
    config, meaning = HifiGanConfig(), mel or MelConfig(padding="same")
    if not Path(source).is_file():
        card = weights.card(str(source))
        meaning = MelConfig.from_dict(card.preprocessing["mel"])
    model = HifiGan(config, meaning)
    weights.load_into(model, load_state(weights.resolve(source, home)))
    return model.to(device).eval()
