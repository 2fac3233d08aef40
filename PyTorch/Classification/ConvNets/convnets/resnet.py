"""ResNet v1.5, ResNeXt and SE-ResNeXt for 224-pixel photographs, and a small ResNet for 28-32 pixel pictures.

Papers: He et al. 2016 (https://arxiv.org/abs/1512.03385), Xie et al. 2017 (https://arxiv.org/abs/1611.05431),
Hu et al. 2018 (https://arxiv.org/abs/1709.01507). Differences from the papers: "v1.5" puts the stride of a
bottleneck in its 3x3 convolution instead of the first 1x1. Parameter names follow torchvision's layout
(``layer1.0.conv1.weight``), the most widely published one; ``convert`` reads NVIDIA's.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlx.inputs import Stem
from dlx.norm import BatchNormAct, Pending


@dataclass(frozen=True)
class ResNetConfig:
    """``width`` is the bottleneck width of the first stage (64 in ResNet, 4 x 32 = 128 in ResNeXt-32x4d)."""

    depths: tuple[int, ...]
    block: str = "bottleneck"
    width: int = 64
    expansion: int = 4
    groups: int = 1
    se_ratio: int = 0
    stem: str = "imagenet"  # imagenet: 7x7 stride 2 + pooling; small: 3x3 stride 1; half: 3x3 stride 2
    stem_width: int = 64


class SqueezeExcitation(nn.Module):
    """Channel attention ``x * sigmoid(W2 relu(W1 mean(x)))`` (Hu et al. 2018, section 3)."""

    def __init__(self, num_channels: int, num_squeezed: int):
        super().__init__()
        self.squeeze = nn.Linear(num_channels, num_squeezed)
        self.expand = nn.Linear(num_squeezed, num_channels)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.expand(F.relu(self.squeeze(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)


class Downsample(nn.Sequential):
    """Projection shortcut. It hands its batch norm on, to be applied in the same pass as the residual sum."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__(conv(in_channels, out_channels, 1, stride), BatchNormAct(out_channels, act="none"))

    def forward(self, x: Tensor) -> Pending:
        return Pending(self[0](x), self[1])


class BasicBlock(nn.Module):
    """Two 3x3 convolutions. Takes and returns the pair (main, shortcut) of equal tensors; see BatchNormAct.fork."""

    def __init__(self, in_channels: int, width: int, stride: int, config: ResNetConfig):
        super().__init__()
        self.out_channels = width
        self.conv1, self.bn1 = conv(in_channels, width, 3, stride), BatchNormAct(width)
        self.conv2, self.bn2 = conv(width, width, 3), BatchNormAct(width)
        self.downsample = None
        if stride != 1 or in_channels != width:
            self.downsample = Downsample(in_channels, width, stride)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        main, shortcut = pair
        residual = shortcut if self.downsample is None else self.downsample(shortcut)
        out = self.bn1(self.conv1(main))
        return self.bn2.fork(self.conv2(out), residual)


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, optional squeeze-and-excitation before the residual sum. Pairs as BasicBlock."""

    def __init__(self, in_channels: int, width: int, stride: int, config: ResNetConfig):
        super().__init__()
        self.out_channels = width * config.expansion
        self.conv1, self.bn1 = conv(in_channels, width, 1), BatchNormAct(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, config.groups), BatchNormAct(width)
        self.conv3 = conv(width, self.out_channels, 1)
        self.bn3 = BatchNormAct(self.out_channels, act="none" if config.se_ratio else "relu")
        self.se = None
        if config.se_ratio:
            self.se = SqueezeExcitation(self.out_channels, self.out_channels // config.se_ratio)
        self.downsample = None
        if stride != 1 or in_channels != self.out_channels:
            self.downsample = Downsample(in_channels, self.out_channels, stride)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        main, shortcut = pair
        residual = shortcut if self.downsample is None else self.downsample(shortcut)
        out = self.bn2(self.conv2(self.bn1(self.conv1(main))))
        if self.se is None:
            return self.bn3.fork(self.conv3(out), residual)
        if isinstance(residual, Pending):
            residual = residual.finish()
        out = F.relu(self.se(self.bn3(self.conv3(out))) + residual)
        return out, out


class ResNet(nn.Module):
    """Images N 3 H W -> logits N num_classes. ``features(x)`` gives the last activation map, ``stages(x)`` all four."""

    def __init__(
        self, config: ResNetConfig, num_classes: int = 1000, in_channels: int = 3, zero_init_residual: bool = False
    ):
        super().__init__()
        self.config, self.num_classes = config, num_classes
        if config.stem == "imagenet":
            self.conv1 = nn.Conv2d(in_channels, config.stem_width, 7, 2, 3, bias=False)
        else:
            self.conv1 = conv(in_channels, config.stem_width, 3, 2 if config.stem == "half" else 1)
        self.bn1 = BatchNormAct(config.stem_width)
        block = {"basic": BasicBlock, "bottleneck": Bottleneck}[config.block]
        channels = config.stem_width
        self.num_stages = len(config.depths)
        for index, depth in enumerate(config.depths):
            blocks = []
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(block(channels, config.width * 2**index, stride, config))
                channels = blocks[-1].out_channels
            setattr(self, f"layer{index + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)
        self.num_features = channels
        self.reset_parameters(zero_init_residual)

    def reset_parameters(self, zero_init_residual: bool) -> None:
        """He initialisation; optionally a zero gain on the last norm of each block (Goyal et al. 2017)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_((module.bn2 if isinstance(module, BasicBlock) else module.bn3).weight)

    def stem(self, x: Tensor) -> Tensor:
        if self.config.stem != "imagenet":
            return self.bn1(self.conv1(x))
        if isinstance(self.conv1, nn.Conv2d) and Stem.applies(x):
            return self.bn1.pooled(Stem.convolve(x, self.conv1.weight))
        return self.bn1.pooled(self.conv1(x))

    def stages(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        pair, outputs = (x, x), []
        for index in range(self.num_stages):
            pair = getattr(self, f"layer{index + 1}")(pair)
            outputs.append(pair[0])
        return outputs

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pair = (x, x)
        for index in range(self.num_stages):
            pair = getattr(self, f"layer{index + 1}")(pair)
        return pair[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))
