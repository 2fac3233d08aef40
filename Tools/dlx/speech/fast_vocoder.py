"""HiFi-GAN on the kernel of `conv_kernels`: every convolution is one launch that also adds, scales and activates.

What comes between convolutions in `vocoder.HifiGan` (leaky ReLU, bias, the way around a pair, the mean of the blocks)
is done while a result is still in registers, and batches are masked where they are read. On a GPU shapes that come
again are replayed as CUDA graphs. `ladder` has what each step on the way there is worth.
B batch, M mels, F frames, C channels, P positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dlx.inference import Replayed
from dlx.kernels import DTYPES, has_kernels

from .vocoder import SLOPE, HifiGan, Vocoder

FINAL_SLOPE = 0.01  # before the last convolution
BUCKET = 32  # frames to a multiple of which spectrograms are filled up, so that shapes come again


class FastHifiGan(HifiGan):
    """A `HifiGan`, its weights taken over in their type, whose forward pass goes through the kernels."""

    def __init__(self, model: HifiGan) -> None:
        super().__init__(model.config, model.mel)
        weight = model.conv_pre.weight
        if weight.dtype not in DTYPES or not has_kernels(weight.device.type):
            raise ValueError(
                f"the kernels need a CUDA device and fp32, bf16 or fp16, got {weight.device} {weight.dtype}"
            )
        if (narrowest := self.conv_post.in_channels) % 16:
            raise ValueError(f"the kernels need channels in multiples of 16, got {narrowest}")
        from .conv_kernels import Packed  # Triton comes only with GPU builds of PyTorch

        self.load_state_dict(model.state_dict())
        self.to(weight.device, weight.dtype).eval().requires_grad_(False)
        self.first, self.last = Packed.of(self.conv_pre), Packed.of(self.conv_post)
        self.raised = [Packed.transposed(up) for up in self.ups]
        self.pairs = [
            [(Packed.of(a), Packed.of(b)) for a, b in zip(block.convs1, block.convs2, strict=True)]
            for block in self.resblocks
        ]
        self.replayed = Replayed(self._rows, keep=32)

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        if mel.dim() != 3 or mel.shape[1] != self.config.num_mels:
            raise ValueError(f"expected mel spectrograms (B, {self.config.num_mels}, F), got {tuple(mel.shape)}")
        batch, _, frames = mel.shape
        if lengths is None:
            lengths = torch.full((batch,), frames, device=mel.device)
        inputs = self.first.weight.shape[1]
        fill = (0, inputs - mel.shape[1], 0, -frames % BUCKET)
        rows = F.pad(mel.to(self.first.weight.dtype).transpose(1, 2), fill)
        audio = self.replayed(rows, lengths.to(mel.device, torch.int32))
        return audio[:, : frames * self.mel.hop_length].clone()

    def _rows(self, x: Tensor, limits: Tensor) -> Tensor:
        """(B, F, M or more) -> (B, F * hop_length), float32."""
        from .conv_kernels import convolve

        batch, frames, _ = x.shape
        config, blocks, rate = self.config, len(self.config.resblock_kernels), 1
        _, active = convolve(x, self.first, limits, raw=False, slope=SLOPE)
        for stage, up in enumerate(self.raised):
            last_stage = stage == len(self.raised) - 1
            x, active = convolve(active, up, limits, rate, slope=SLOPE)
            rate *= config.upsample_rates[stage]
            x, active = (rows.view(batch, frames * rate, -1) for rows in (x, active))
            total: Tensor | None = None
            for number in range(blocks):
                y, inner = x, active
                pairs = self.pairs[stage * blocks + number]
                for place, (first, second) in enumerate(pairs):
                    _, inner = convolve(inner, first, limits, rate, raw=False, slope=SLOPE)
                    if place < len(pairs) - 1:
                        y, inner = convolve(inner, second, limits, rate, add=(y,), slope=SLOPE)
                    elif number < blocks - 1:
                        total, _ = convolve(inner, second, limits, rate, add=(y,) if total is None else (y, total))
                    else:
                        add, slope = (y,) if total is None else (y, total), FINAL_SLOPE if last_stage else SLOPE
                        options = {"scale": 1 / blocks, "raw": False, "slope": slope}
                        _, active = convolve(inner, second, limits, rate, add=add, **options)
        audio, _ = convolve(active, self.last, limits, rate)
        audio = torch.tanh(audio[:, :, 0].float())
        positions = torch.arange(audio.shape[1], device=audio.device)
        return audio.masked_fill_(positions >= limits[:, None] * rate, 0)


def optimize(vocoder: Vocoder, dtype: torch.dtype = torch.float32) -> Vocoder:
    """The vocoder in ``dtype``, on kernels where it is a HiFi-GAN that they take, else as it is."""
    if not isinstance(vocoder, HifiGan) or isinstance(vocoder, FastHifiGan):
        return vocoder
    vocoder = vocoder.to(dtype)
    try:
        return FastHifiGan(vocoder)
    except ValueError:  # no GPU, another type, or kernels of another shape
        return vocoder


class ChannelsLastHifiGan(HifiGan):
    """A `HifiGan` whose sound is a picture of one row with its channels last in memory, as tensor cores read them."""

    def __init__(self, model: HifiGan) -> None:
        super().__init__(model.config, model.mel)
        weight = model.conv_pre.weight
        self.to(weight.device, weight.dtype).load_state_dict(model.state_dict())
        for parent in list(self.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Conv1d | nn.ConvTranspose1d):
                    setattr(parent, name, _of_two_dimensions(child))
        self.eval().requires_grad_(False)

    def _sound(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x[:, :, None].contiguous(memory_format=torch.channels_last)
        return super()._sound(x, None if mask is None else mask[:, :, None])


def _of_two_dimensions(layer: nn.Conv1d | nn.ConvTranspose1d) -> nn.Module:
    kind = nn.Conv2d if isinstance(layer, nn.Conv1d) else nn.ConvTranspose2d
    sizes = {
        name: (low, *getattr(layer, name))
        for name, low in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
    }
    weight = layer.weight.detach()[:, :, None]
    wide = kind(layer.in_channels, layer.out_channels, **sizes, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        wide.weight.copy_(weight)
        wide.bias.copy_(layer.bias)
    return wide.to(memory_format=torch.channels_last)


def _with_weight_norm(model: HifiGan) -> HifiGan:
    """As it is trained: magnitude and direction of each kernel, multiplied anew in every call."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            parametrizations.weight_norm(module)
    return model.eval().requires_grad_(False)


def ladder(model: HifiGan, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[Tensor], Tensor] | str]:
    """The steps from a published vocoder to `optimize`'s, each with those before it: (B, M, F) -> (B, F * hop_length),
    all frames counting. In place of one that cannot be here stands the reason. ``model`` is float32 and stays as it is.
    """
    model = copy.deepcopy(model).float().eval().requires_grad_(False)
    half = copy.deepcopy(model).to(dtype)
    channels_last = ChannelsLastHifiGan(half)
    steps: dict[str, Callable[[Tensor], Tensor] | str] = {
        "weight norm, fp32": _with_weight_norm(model),
        "folded": model,
        f"+ {str(dtype).removeprefix('torch.')}": half,
        "+ channels last": channels_last,
    }
    if half.conv_pre.weight.is_cuda:
        steps["+ CUDA graph"] = Replayed(channels_last)
    else:
        steps["+ CUDA graph"] = "graphs need a CUDA device"
    try:
        fused = FastHifiGan(half)
    except ValueError as error:
        return steps | {"fused kernels": str(error), "fused kernels + CUDA graph": str(error)}
    launched = FastHifiGan(half)
    launched.replayed = launched._rows
    return steps | {"fused kernels": launched, "fused kernels + CUDA graph": fused}
