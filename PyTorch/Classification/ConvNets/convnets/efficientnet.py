"""EfficientNet b0-b7 and Lite0, and "WideSE" variants with a wider squeeze-and-excitation.

Paper: Tan and Le 2019 (https://arxiv.org/abs/1905.11946), table 1 and compound scaling of section 3.3. Differences:
WideSE (NVIDIA) squeezes to a quarter of the *expanded* width instead of the block's input width; Lite0 (Google's
TPU release) has no squeeze-and-excitation and uses ReLU6. Parameter names are those of NVIDIA's published files
(``layers.0.block0.depsep.conv.weight``); ``convert`` reads torchvision's and efficientnet-pytorch's.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlx.norm import ACTIVATIONS, BatchNormAct

# kernel size, stride, repeats, expansion, output channels (table 1 of the paper)
STAGES = (
    (3, 1, 1, 1, 16),
    (3, 2, 2, 6, 24),
    (5, 2, 2, 6, 40),
    (3, 2, 3, 6, 80),
    (5, 1, 3, 6, 112),
    (5, 2, 4, 6, 192),
    (3, 1, 1, 6, 320),
)


@dataclass(frozen=True)
class EfficientNetConfig:
    """``se`` is the squeeze width as a fraction of the block's input ("input"), of its expansion ("expanded") or none.

    ``survival`` is the probability that the last block's residual branch is kept in training (stochastic depth, which
    falls linearly from 1). ``padding`` "same" pads as TensorFlow does, which weights trained there expect.
    """

    width: float = 1.0
    depth: float = 1.0
    dropout: float = 0.2
    survival: float = 0.8
    se: str = "input"
    act: str = "silu"
    padding: str = "symmetric"
    scales_stem_and_head: bool = True


def round_channels(channels: float, divisor: int = 8) -> int:
    """Nearest multiple of ``divisor`` that is at least 90 % of ``channels``."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class Conv2dSame(nn.Conv2d):
    """Convolution padded as TensorFlow's SAME: output ceil(H / stride), an odd pixel of padding goes bottom right."""

    def forward(self, x: Tensor) -> Tensor:
        padding = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return self._conv_forward(F.pad(x, padding), self.weight, self.bias)


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, activation."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        config: EfficientNetConfig,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        act: str | None = None,
    ):
        super().__init__()
        if config.padding == "same" and stride > 1:
            self.conv: nn.Conv2d = Conv2dSame(in_channels, out_channels, kernel, stride, groups=groups, bias=False)
        else:
            self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = BatchNormAct(out_channels, act=config.act if act is None else act, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.bn(self.conv(x), residual)


class SqueezeExcitation(nn.Module):
    """``x * sigmoid(W2 act(W1 mean(x)))`` (Hu et al. 2018)."""

    def __init__(self, num_channels: int, num_squeezed: int, act: str):
        super().__init__()
        self.squeeze = nn.Linear(num_channels, num_squeezed)
        self.expand = nn.Linear(num_squeezed, num_channels)
        self.act = ACTIVATIONS[act]

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.expand(self.act(self.squeeze(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


class MBConv(nn.Module):
    """Expand 1x1, depthwise, squeeze-and-excitation, project 1x1, with stochastic depth on the residual branch."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int,
        expansion: int,
        survival: float,
        config: EfficientNetConfig,
    ):
        super().__init__()
        hidden = in_channels * expansion
        self.expand = ConvNorm(in_channels, hidden, config) if expansion != 1 else None
        self.depsep = ConvNorm(hidden, hidden, config, kernel, stride, groups=hidden)
        self.se = None
        if config.se != "none":
            squeezed = max(1, int((hidden if config.se == "expanded" else in_channels) * 0.25))
            self.se = SqueezeExcitation(hidden, squeezed, config.act)
        self.proj = ConvNorm(hidden, out_channels, config, act="none")
        self.has_residual = stride == 1 and in_channels == out_channels
        self.survival = survival

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand is None else self.expand(x)
        out = self.depsep(out)
        if self.se is not None:
            out = self.se(out)
        if not self.has_residual:
            return self.proj(out)
        if not self.training or self.survival == 1.0:
            return self.proj(out, x)
        kept = torch.rand(x.shape[0], 1, 1, 1, device=x.device) < self.survival
        return self.proj(out) * (kept.to(x.dtype) / self.survival) + x


class Stage(nn.Module):
    """Blocks ``block0``, ``block1``, ... in sequence."""

    def __init__(self, blocks: list[MBConv]):
        super().__init__()
        for index, block in enumerate(blocks):
            self.add_module(f"block{index}", block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class Classifier(nn.Module):
    """Average pooling, dropout, linear layer."""

    def __init__(self, in_features: int, num_classes: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(x.mean((2, 3))))


class EfficientNet(nn.Module):
    """Images N 3 H W -> logits N num_classes. ``stages(x)`` gives the map after each of the seven stages."""

    def __init__(
        self,
        config: EfficientNetConfig,
        num_classes: int = 1000,
        in_channels: int = 3,
        zero_init_residual: bool = False,
    ):
        super().__init__()
        self.config, self.num_classes = config, num_classes
        outer = config.width if config.scales_stem_and_head else 1.0
        channels = round_channels(32 * outer)
        self.stem = ConvNorm(in_channels, channels, config, 3, 2)
        repeats = [math.ceil(stage[2] * config.depth) for stage in STAGES]
        total, position, stages = sum(repeats), 0, []
        for (kernel, first_stride, _, expansion, width), count in zip(STAGES, repeats, strict=True):
            out_channels, blocks = round_channels(width * config.width), []
            for index in range(count):
                survival = 1.0 - (1.0 - config.survival) * position / total
                stride = first_stride if index == 0 else 1
                blocks.append(MBConv(channels, out_channels, kernel, stride, expansion, survival, config))
                channels, position = out_channels, position + 1
            stages.append(Stage(blocks))
        self.layers = nn.Sequential(*stages)
        self.num_features = round_channels(1280 * outer)
        self.features = ConvNorm(channels, self.num_features, config)
        self.classifier = Classifier(self.num_features, num_classes, config.dropout)
        self.reset_parameters(zero_init_residual)

    def reset_parameters(self, zero_init_residual: bool) -> None:
        """Normal of variance 2 / fan_out (per group) for convolutions, uniform +-1/sqrt(classes) for the head."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
            elif isinstance(module, MBConv) and zero_init_residual and module.has_residual:
                nn.init.zeros_(module.proj.bn.weight)
        bound = 1.0 / math.sqrt(self.classifier.fc.out_features)
        nn.init.uniform_(self.classifier.fc.weight, -bound, bound)
        nn.init.zeros_(self.classifier.fc.bias)

    def stages(self, x: Tensor) -> list[Tensor]:
        x, outputs = self.stem(x), []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(self.layers(self.stem(x))))
