"""SSD300 v1.1: Single Shot MultiBox Detector (Liu et al. 2016, https://arxiv.org/abs/1512.02325) on other backbones.

Differences from the paper, as in NVIDIA's version: ResNet instead of VGG-16 (Huang et al. 2017), batch norm in the
extra layers, and no rescaling of the first map. One convolution per map gives the four offsets and the class scores of
each of its default boxes; in channels_last memory its output already is the list of boxes.

N batch, A default boxes, C classes without the background, S side of the square input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlx.norm import BatchNormAct

from .anchors import HALVED, PER_CELL
from .backbone import Backbone
from .mobilenet import MobileNetBackbone


@dataclass(frozen=True)
class SSDConfig:
    """``squeezed`` and ``extra``: channels of the extra blocks' 1x1 and 3x3 convolutions; ``width``: of the stem."""

    kind: str  # basic or bottleneck: a ResNet; mobilenet
    depths: tuple[int, ...] = ()
    squeezed: tuple[int, ...] = (256, 256, 128, 128, 128)
    extra: tuple[int, ...] = (512, 512, 256, 256, 256)
    width: int = 64


class ExtraBlock(nn.Module):
    """1x1 and 3x3 convolution with batch norm and ReLU: halves the map, or (unpadded) takes a border of one off."""

    def __init__(self, in_channels: int, squeezed: int, out_channels: int, halves: bool):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(in_channels, squeezed, 1, bias=False), BatchNormAct(squeezed)
        stride, padding = (2, 1) if halves else (1, 0)
        self.conv2 = nn.Conv2d(squeezed, out_channels, 3, stride, padding, bias=False)
        self.bn2 = BatchNormAct(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x))))


# A GPU's matrix units take 16-bit channels in eights; cuDNN pads others in passes of its own over the whole map.
MATRIX_CHANNELS = 8


class Head(nn.Conv2d):
    """Offsets and class scores of every default box of a map: N C H W -> N (H W boxes) (4 + classes).

    Channel ``box * (4 + classes) + i``: the offsets are i = 0..3, then the background, then the classes.
    """

    def __init__(self, in_channels: int, boxes: int, num_outputs: int):
        super().__init__(in_channels, boxes * num_outputs, 3, padding=1)
        self.boxes, self.num_outputs = boxes, num_outputs
        # One initialisation for offsets and one for scores, as if they were convolutions of their own.
        for part in self.parts(self.weight.detach()):
            flat = torch.empty(part.shape[0] * part.shape[1], *part.shape[2:])
            part.copy_(nn.init.xavier_uniform_(flat).view_as(part))
        nn.init.zeros_(self.bias)

    def parts(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Views (boxes, 4, ...) and (boxes, 1 + classes, ...) of weight or bias."""
        per_box = tensor.unflatten(0, (self.boxes, self.num_outputs))
        return per_box[:, :4], per_box[:, 4:]

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.out_channels % MATRIX_CHANNELS
        if missing and x.is_cuda and not torch.compiler.is_exporting():
            weight, bias = F.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, missing)), F.pad(self.bias, (0, missing))
            found = F.conv2d(x, weight, bias, padding=1)[:, : self.out_channels]
        else:
            found = super().forward(x)
        return found.permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.num_outputs)


class SSD(nn.Module):
    """Normalised images N 3 S S -> offsets N A 4 and class scores (logits, background first) N A C+1.

    The boxes are in the order of ``anchors.default_boxes(S)``; any S from ``anchors.MINIMUM`` on.
    """

    def __init__(self, config: SSDConfig, num_classes: int = 80):
        super().__init__()
        self.config, self.num_classes = config, num_classes
        self.backbone: Backbone | MobileNetBackbone
        if config.kind == "mobilenet":
            self.backbone = MobileNetBackbone()
        else:
            self.backbone = Backbone(config.kind, config.depths, config.width)
        given = len(self.backbone.out_channels)
        channels = [*self.backbone.out_channels, *config.extra]
        self.extra = nn.ModuleList(
            ExtraBlock(channels[level - 1], config.squeezed[level - given], channels[level], halves=level < HALVED)
            for level in range(given, len(PER_CELL))
        )
        for module in self.extra.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
        self.heads = nn.ModuleList(
            Head(width, boxes, 5 + num_classes) for width, boxes in zip(channels, PER_CELL, strict=True)
        )

    def features(self, images: Tensor) -> Sequence[Tensor]:
        """The six maps, largest first."""
        maps = list(self.backbone(images))
        for block in self.extra:
            maps.append(block(maps[-1]))
        return maps

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.cat([head(x) for head, x in zip(self.heads, self.features(images), strict=True)], dim=1)
        return found[..., :4], found[..., 4:]
