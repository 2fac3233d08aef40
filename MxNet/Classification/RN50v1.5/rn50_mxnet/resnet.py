"""ResNet v1, ResNet v1.5 and ResNeXt as hybrid Gluon blocks.

Papers: He et al. 2016 (https://arxiv.org/abs/1512.03385), Xie et al. 2017 (https://arxiv.org/abs/1611.05431). In "v1"
the stride of a bottleneck lies in its first 1x1 convolution, as in the paper; in "v1.5" in its 3x3 convolution, which
is half a per cent more accurate on ImageNet and a little slower. Basic blocks (18, 34 layers) are the same in both.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

from .blocks import Norm, conv


@dataclass(frozen=True)
class ResNetConfig:
    """``width`` is the bottleneck width of the first stage (64 in ResNet, 4 x 32 = 128 in ResNeXt-32x4d)."""

    depths: tuple[int, ...]
    block: str = "bottleneck"
    version: str = "1.5"
    width: int = 64
    expansion: int = 4
    groups: int = 1
    stem: str = "imagenet"  # imagenet: 7x7 stride 2 + pooling; half: 3x3 stride 2
    stem_width: int = 64


class Residual(HybridBlock):
    """relu(main branch + shortcut); the shortcut is a projection where size or channels change."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.out_channels = channels
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.HybridSequential()
            self.downsample.add(conv(in_channels, channels, 1, stride), Norm(channels, relu=False))

    def main(self, x):
        """The branch whose output is added to the shortcut."""
        raise NotImplementedError

    def hybrid_forward(self, F, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.Activation(self.main(x) + shortcut, act_type="relu")


class BasicBlock(Residual):
    """Two 3x3 convolutions."""

    def __init__(self, in_channels: int, width: int, stride: int, config: ResNetConfig, fused: bool) -> None:
        super().__init__(in_channels, width, stride)
        self.conv1, self.bn1 = conv(in_channels, width, 3, stride), Norm(width, fused=fused)
        self.conv2, self.bn2 = conv(width, width, 3), Norm(width, relu=False)

    def main(self, x):
        return self.bn2(self.conv2(self.bn1(self.conv1(x))))


class Bottleneck(Residual):
    """1x1 reduce, 3x3 (grouped in ResNeXt), 1x1 expand."""

    def __init__(self, in_channels: int, width: int, stride: int, config: ResNetConfig, fused: bool) -> None:
        super().__init__(in_channels, width * config.expansion, stride)
        first, second = (stride, 1) if config.version == "1" else (1, stride)
        self.conv1, self.bn1 = conv(in_channels, width, 1, first), Norm(width, fused=fused)
        self.conv2, self.bn2 = conv(width, width, 3, second, config.groups), Norm(width, fused=fused)
        self.conv3, self.bn3 = conv(width, self.out_channels, 1), Norm(self.out_channels, relu=False)

    def main(self, x):
        x = self.bn1(self.conv1(x))
        return self.bn3(self.conv3(self.bn2(self.conv2(x))))


class ResNet(HybridBlock):
    """Images N C H W -> logits N num_classes."""

    def __init__(
        self, config: ResNetConfig, num_classes: int = 1000, in_channels: int = 3, fused: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        imagenet = config.stem == "imagenet"
        self.conv1 = conv(in_channels, config.stem_width, 7 if imagenet else 3, 2)
        self.bn1 = Norm(config.stem_width, fused=fused)
        self.pool = nn.MaxPool2D(3, 2, 1) if imagenet else None
        block = {"basic": BasicBlock, "bottleneck": Bottleneck}[config.block]
        channels, self.stages = config.stem_width, len(config.depths)
        for index, depth in enumerate(config.depths):
            stage = nn.HybridSequential()
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                stage.add(block(channels, config.width * 2**index, stride, config, fused))
                channels = stage[-1].out_channels
            setattr(self, f"layer{index + 1}", stage)
        self.fc = nn.Dense(num_classes, in_units=channels, weight_initializer=mx.init.Normal(0.01))

    def hybrid_forward(self, F, x):
        x = self.bn1(self.conv1(x))
        x = x if self.pool is None else self.pool(x)
        for index in range(self.stages):
            x = getattr(self, f"layer{index + 1}")(x)
        return self.fc(F.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)))
