"""ResNet v1.5 up to its third stage, which keeps the resolution of the second: images N 3 S S -> N C S/8 S/8.

Paper: He et al. 2016 (https://arxiv.org/abs/1512.03385). SSD wants a fine last map, so the strides of the third stage
(of its first block's convolution and of the shortcut beside it) are 1. Parameter names are torchvision's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dlx.inputs import Stem
from dlx.norm import BatchNormAct, Pending

Pair = tuple[Tensor, Tensor]  # one tensor for the main branch and for the shortcut; see BatchNormAct.fork


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)


class Shortcut(nn.Sequential):
    """Projection whose norm is left to be applied in the same pass as the residual sum."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__(conv(in_channels, out_channels, 1, stride), BatchNormAct(out_channels, act="none"))

    def forward(self, x: Tensor) -> Pending:
        return Pending(self[0](x), self[1])


class Block(nn.Module):
    """A residual block: convolutions of (kernel, channels, stride), each with its norm; the last one adds the input."""

    def __init__(self, in_channels: int, layers: Sequence[tuple[int, int, int]]):
        super().__init__()
        self.out_channels, self.depth = layers[-1][1], len(layers)
        channels, stride = in_channels, 1
        for index, (kernel_size, width, step) in enumerate(layers, start=1):
            setattr(self, f"conv{index}", conv(channels, width, kernel_size, step))
            setattr(self, f"bn{index}", BatchNormAct(width))
            channels, stride = width, stride * step
        self.downsample = None
        if stride != 1 or in_channels != self.out_channels:
            self.downsample = Shortcut(in_channels, self.out_channels, stride)

    def forward(self, pair: Pair) -> Pair:
        x, shortcut = pair
        residual = shortcut if self.downsample is None else self.downsample(shortcut)
        for index in range(1, self.depth):
            x = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(x))
        return getattr(self, f"bn{self.depth}").fork(getattr(self, f"conv{self.depth}")(x), residual)


def zero_residuals(model: nn.Module) -> None:
    """Start every residual block as the identity (Goyal et al. 2017, section 5.1): good where nothing is pretrained."""
    for module in model.modules():
        if isinstance(module, Block):
            nn.init.zeros_(getattr(module, f"bn{module.depth}").weight)


def _layers(kind: str, width: int, stride: int) -> list[tuple[int, int, int]]:
    if kind == "basic":
        return [(3, width, stride), (3, width, 1)]
    return [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]


class Backbone(nn.Module):
    """``kind`` is basic or bottleneck, ``depths`` the numbers of blocks of the three stages, ``width`` the stem's."""

    def __init__(self, kind: str, depths: Sequence[int], width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = BatchNormAct(width)
        channels = width
        for stage, (depth, first_stride) in enumerate(zip(depths, (1, 2, 1), strict=True)):
            blocks = []
            for position in range(depth):
                stride = first_stride if position == 0 else 1
                blocks.append(Block(channels, _layers(kind, width * 2**stage, stride)))
                channels = blocks[-1].out_channels
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.out_channels = (channels,)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        # A folded model has an Identity here: its norm holds the convolution and folds the channels itself.
        plain = not (isinstance(self.conv1, nn.Conv2d) and Stem.applies(x))
        x = self.bn1.pooled(self.conv1(x) if plain else Stem.convolve(x, self.conv1.weight))
        pair = (x, x)
        for stage in (self.layer1, self.layer2, self.layer3):
            pair = stage(pair)
        return [pair[0]]
