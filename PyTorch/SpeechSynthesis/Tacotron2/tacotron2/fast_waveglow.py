"""WaveGlow's inference on kernels: two launches of matrix products a layer, replayed as a CUDA graph.

What `waveglow.WaveGlow.inverse` computes, over rows of channels (B, P, C): the spectrogram is spread to the positions
by one product, all layers of a flow are conditioned by another, a layer is one gated convolution and two products that
add to what they change. B batch, M mels, F frames, G group, P positions, S samples, C channels within a coupling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlx.inference import Replayed
from dlx.kernels import DTYPES, has_kernels
from dlx.speech.fast_vocoder import BUCKET

from .waveglow import WN, NormedConv, WaveGlow, WaveGlowConfig


def applies(model: WaveGlow) -> bool:
    """Whether the kernels take a model: prepared, on a GPU, of a type they know, channels a multiple of 16."""
    weight = model.upsample.weight
    prepared = not any(isinstance(module, NormedConv) for module in model.modules())
    return prepared and weight.dtype in DTYPES and has_kernels(weight.device.type) and model.config.channels % 16 == 0


def spreading(conv: nn.ConvTranspose1d, config: WaveGlowConfig) -> tuple[Tensor, Tensor]:
    """The upsampling as a matrix (M * spread, P per frame * M * G) from the last ``spread`` frames, and its bias.

    Inputs count mels, then frames from the oldest on; outputs positions, mels, places within a group.
    """
    mels, hop, group = config.num_mels, config.hop_length, config.group
    spread = -(-config.window // hop)
    kernel = conv.weight.detach()
    if conv.groups > 1:  # each band by itself
        eye = torch.eye(mels, device=kernel.device, dtype=kernel.dtype)
        kernel = eye[:, :, None] * kernel
    kernel = F.pad(kernel, (0, spread * hop - config.window)).unflatten(2, (spread, hop // group, group)).flip(2)
    matrix = kernel.permute(0, 2, 3, 1, 4).flatten(2).flatten(0, 1)
    return matrix.contiguous(), conv.bias.detach().repeat_interleave(group).repeat(hop // group)


class Coupling(NamedTuple):
    """A flow's tensors: of the condition (all layers), and for each layer of its convolution and its two outputs."""

    condition: tuple[Tensor, Tensor]
    filters: list[Tensor]
    residuals: list[object]
    skips: list[object]

    @staticmethod
    def of(wn: WN) -> Coupling:
        from dlx.speech.conv_kernels import Packed

        biases = torch.cat([layer.bias for layer in wn.filters])
        condition = wn.condition.weight[:, :, 0].T.contiguous(), wn.condition.bias + biases
        filters = [layer.weight.permute(2, 1, 0).contiguous() for layer in wn.filters]
        residuals, skips = [], []
        for layer in wn.outputs:
            weight, bias = layer.weight.permute(2, 1, 0), layer.bias
            if weight.shape[2] > wn.width:
                residuals.append(Packed.made(weight[:, :, : wn.width], bias[: wn.width]))
            skips.append(Packed.made(weight[:, :, -wn.width :], bias[-wn.width :]))
        return Coupling(condition, filters, residuals, skips)


class FastWaveGlow:
    """`infer` of a prepared `WaveGlow` that `applies` accepts, on its weights and in their type."""

    def __init__(self, model: WaveGlow):
        if not applies(model):
            raise ValueError(
                "the kernels need a CUDA device (and triton), a prepared WaveGlow in fp32, bf16 or fp16, and channels "
                f"in multiples of 16, got {model.upsample.weight.device} {model.upsample.weight.dtype} "
                f"and {model.config.channels}"
            )
        self.model, self.config = model, model.config
        self.spreading = spreading(model.upsample, model.config)
        self.couplings = [Coupling.of(flow.wn) for flow in model.flows]
        self.single = model.upsample.weight.dtype == torch.float32
        self.replayed = Replayed(self._rows)

    @torch.no_grad()
    def infer(self, mel: Tensor, sigma: float, noise: Tensor, lengths: Tensor | None = None) -> Tensor:
        """As `WaveGlow.infer`: sound float32 (B, F * hop_length) of ``mel`` (B, M, F), ``noise`` (B or 1, G, P)."""
        batch, _, frames = mel.shape
        fill = -frames % BUCKET
        if lengths is None:
            lengths = torch.full((batch,), frames, device=mel.device)
        rows = F.pad(mel.to(self.spreading[0].dtype), (0, fill))
        z = F.pad(sigma * noise.float().expand(batch, -1, -1), (0, fill * self.config.positions_per_frame))
        audio = self.replayed(rows, z, lengths.to(mel.device, torch.int32))
        return audio[:, : frames * self.config.hop_length].clone()

    def condition(self, mel: Tensor) -> Tensor:
        """`WaveGlow.condition` as rows (B, P, M G or narrower)."""
        spread = -(-self.config.window // self.config.hop_length)
        seen = F.pad(mel, (spread - 1, 0)).unfold(2, spread, 1).permute(0, 2, 1, 3).flatten(2)  # B F M*spread
        matrix, bias = self.spreading
        rows = torch.addmm(bias, seen.flatten(0, 1), matrix).view(
            len(mel), -1, self.config.num_mels * self.config.group
        )
        narrow = self.model.narrow
        return F.linear(rows, narrow.weight[:, :, 0], narrow.bias) if self.config.condition else rows

    def _rows(self, mel: Tensor, z: Tensor, limits: Tensor) -> Tensor:
        config = self.config
        condition = self.condition(mel)
        early = (config.flows - 1) // config.early_every
        parts = list(z.transpose(1, 2).split([config.early_size] * early + [config.widths[-1]], 2))
        x = parts.pop()
        for number in reversed(range(config.flows)):
            flow = self.model.flows[number]
            kept, changed = x.chunk(2, 2)
            shift, log_scale = self._coupling(flow.wn, self.couplings[number], kept, condition, limits)
            x = torch.cat((kept, (changed - shift) * torch.exp(-log_scale)), 2) @ flow.mixing.inverse_weight.T
            if number and number % config.early_every == 0:
                x = torch.cat((parts.pop(), x), 2)
        positions = torch.arange(x.shape[1], device=x.device)
        outside = positions >= limits[:, None] * config.positions_per_frame
        return x.masked_fill(outside[:, :, None], 0).flatten(1)

    def _coupling(
        self, wn: WN, tensors: Coupling, kept: Tensor, condition: Tensor, limits: Tensor
    ) -> tuple[Tensor, Tensor]:
        from dlx.speech.conv_kernels import convolve

        from .waveglow_kernels import gated

        rate, width = self.config.positions_per_frame, wn.width
        weight, bias = tensors.condition
        conditions = torch.addmm(bias, condition.flatten(0, 1), weight).view(*condition.shape[:2], -1)
        x = F.linear(kept.to(condition.dtype), wn.start.weight[:, :, 0], wn.start.bias)
        collected: Tensor | None = None
        for layer, (filters, skip) in enumerate(zip(tensors.filters, tensors.skips, strict=True)):
            given = conditions[:, :, 2 * width * layer : 2 * width * (layer + 1)]
            acts = gated(x, filters, given, limits, rate, 2**layer, self.single)
            if layer < wn.count - 1:
                convolve(acts, tensors.residuals[layer], limits, rate, add=(x,), raw=x)
            if collected is None:
                collected, _ = convolve(acts, skip, limits, rate)
            else:
                convolve(acts, skip, limits, rate, add=(collected,), raw=collected)
        both = F.linear(collected, wn.end.weight[:, :, 0], wn.end.bias).float()
        shift, log_scale = both.chunk(2, 2)
        return shift, log_scale
