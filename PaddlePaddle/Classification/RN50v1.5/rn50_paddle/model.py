"""ResNet-18/50/101 v1.5 for 224-pixel photographs, and a small ResNet for pictures of 28 to 32 pixels.

Paper: He et al. 2016 (https://arxiv.org/abs/1512.03385). Differences from it: "v1.5" puts the stride of a bottleneck in
its 3x3 convolution instead of the first 1x1; the gain of each block's last norm may start at zero (Goyal et al. 2017,
https://arxiv.org/abs/1706.02677, section 5.1). Parameter names are those of `paddle.vision.models.resnet50`.

N batch, C channels, H height, W width. Pictures come as N C H W with either `data_format`: "NHWC" is how the model
keeps its activations inside, which tensor cores prefer.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """`stem`: imagenet is 7x7 stride 2 and pooling, half is 3x3 stride 2. `parameters` counts 1000 classes."""

    block: str
    depths: tuple[int, ...]
    parameters: int
    width: int = 64
    stem: str = "imagenet"
    stem_width: int = 64
    image_size: int = 224


ARCHITECTURES = {
    "resnet18": Architecture("basic", (2, 2, 2, 2), 11_689_512),
    "resnet50": Architecture("bottleneck", (3, 4, 6, 3), 25_557_032),
    "resnet101": Architecture("bottleneck", (3, 4, 23, 3), 44_549_160),
    "resnet8_small": Architecture("basic", (1, 1, 1), 436_360, 32, "half", 32, 28),
}


def architecture(name: str) -> Architecture:
    """The entry of a name; ValueError with the nearest names when there is none."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    near = difflib.get_close_matches(name, ARCHITECTURES, 1, 0.4)
    raise ValueError(
        f"unknown architecture {name!r}; " + (f"did you mean {near[0]}?" if near else f"known: {[*ARCHITECTURES]}")
    )


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int, data_format: str) -> nn.Conv2D:
    return nn.Conv2D(
        in_channels,
        out_channels,
        kernel_size,
        stride,
        kernel_size // 2,
        weight_attr=nn.initializer.KaimingNormal(fan_in=out_channels * kernel_size**2),
        bias_attr=False,
        data_format=data_format,
    )


class Block(nn.Layer):
    """What both kinds of residual block share: the projection shortcut and the sum."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, data_format: str):
        super().__init__()
        self.out_channels = width * self.expansion
        self.downsample = None
        if stride != 1 or in_channels != self.out_channels:
            self.downsample = nn.Sequential(
                conv(in_channels, self.out_channels, 1, stride, data_format),
                nn.BatchNorm2D(self.out_channels, data_format=data_format),
            )

    def residual(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.residual(x) + shortcut)


class BasicBlock(Block):
    """Two 3x3 convolutions."""

    def __init__(self, in_channels: int, width: int, stride: int, data_format: str):
        super().__init__(in_channels, width, stride, data_format)
        self.conv1 = conv(in_channels, width, 3, stride, data_format)
        self.bn1 = nn.BatchNorm2D(width, data_format=data_format)
        self.conv2 = conv(width, width, 3, 1, data_format)
        self.bn2 = nn.BatchNorm2D(width, data_format=data_format)

    def residual(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


class Bottleneck(Block):
    """1x1 reduce, 3x3 (with the stride), 1x1 expand."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, data_format: str):
        super().__init__(in_channels, width, stride, data_format)
        self.conv1 = conv(in_channels, width, 1, 1, data_format)
        self.bn1 = nn.BatchNorm2D(width, data_format=data_format)
        self.conv2 = conv(width, width, 3, stride, data_format)
        self.bn2 = nn.BatchNorm2D(width, data_format=data_format)
        self.conv3 = conv(width, self.out_channels, 1, 1, data_format)
        self.bn3 = nn.BatchNorm2D(self.out_channels, data_format=data_format)

    def residual(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.bn3(self.conv3(F.relu(self.bn2(self.conv2(x)))))


class ResNet(nn.Layer):
    """float32 pictures N C H W -> logits N num_classes."""

    def __init__(
        self,
        arch: Architecture,
        num_classes: int = 1000,
        in_channels: int = 3,
        zero_init_residual: bool = False,
        data_format: str = "NCHW",
    ):
        super().__init__()
        if data_format not in ("NCHW", "NHWC"):
            raise ValueError(f"data_format must be NCHW or NHWC, got {data_format!r}")
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        self.data_format, self.in_channels, self.num_classes = data_format, in_channels, num_classes
        whole = arch.stem == "imagenet"
        self.conv1 = conv(in_channels, arch.stem_width, 7 if whole else 3, 2, data_format)
        self.bn1 = nn.BatchNorm2D(arch.stem_width, data_format=data_format)
        self.maxpool = nn.MaxPool2D(3, 2, 1, data_format=data_format) if whole else nn.Identity()
        block = {"basic": BasicBlock, "bottleneck": Bottleneck}[arch.block]
        channels = arch.stem_width
        self.stages = [f"layer{number + 1}" for number in range(len(arch.depths))]
        for number, (name, depth) in enumerate(zip(self.stages, arch.depths, strict=True)):
            blocks = []
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(block(channels, arch.width * 2**number, stride, data_format))
                channels = blocks[-1].out_channels
            setattr(self, name, nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.fc = nn.Linear(channels, num_classes)
        if zero_init_residual:
            self.zero_last_norms()

    def zero_last_norms(self) -> None:
        """Every block starts as its shortcut."""
        for layer in self.sublayers():
            if isinstance(layer, Block):
                last = layer.bn3 if isinstance(layer, Bottleneck) else layer.bn2
                last.weight.set_value(paddle.zeros_like(last.weight))

    def forward(self, images: Tensor) -> Tensor:
        x = images.transpose([0, 2, 3, 1]) if self.data_format == "NHWC" else images
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(paddle.flatten(self.avgpool(x), 1))


def build(name: str, num_classes: int = 1000, **options) -> ResNet:
    """A model with fresh weights. `options`: in_channels, zero_init_residual, data_format."""
    return ResNet(architecture(name), num_classes, **options)


def count_parameters(model: nn.Layer) -> int:
    """Trainable values; the running statistics of the norms are none."""
    return sum(int(value.size) for value in model.parameters() if not value.stop_gradient)
