"""MobileNetV2 as a backbone that gives three maps: images N 3 S S -> S/8, S/16 and S/32 wide.

Paper: Sandler et al. 2018 (https://arxiv.org/abs/1801.04381). As in its section 6.2, the maps are the expanded
activations inside the first blocks of the stages that halve the resolution, where the channels are most, and the last
layer's. `convert.backbone_tensors` reads torchvision's published ImageNet weights.
"""

from __future__ import annotations

from torch import Tensor, nn

from dlx.norm import BatchNormAct

# expansion, output channels, blocks, stride of the first (table 2 of the paper)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
LAST = 1280


class InvertedBlock(nn.Module):
    """Widen, filter each channel, narrow without activation; ``expanded`` is the wide map before a stride."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int):
        super().__init__()
        self.width = in_channels * expansion
        if expansion > 1:
            self.widen, self.bn1 = nn.Conv2d(in_channels, self.width, 1, bias=False), BatchNormAct(self.width, "relu6")
        self.widens, self.adds = expansion > 1, stride == 1 and in_channels == out_channels
        self.filter = nn.Conv2d(self.width, self.width, 3, stride, 1, groups=self.width, bias=False)
        self.bn2 = BatchNormAct(self.width, "relu6")
        self.narrow = nn.Conv2d(self.width, out_channels, 1, bias=False)
        self.bn3 = BatchNormAct(out_channels, "none")

    def expanded(self, x: Tensor) -> Tensor:
        return self.bn1(self.widen(x)) if self.widens else x

    def finish(self, expanded: Tensor, x: Tensor) -> Tensor:
        return self.bn3(self.narrow(self.bn2(self.filter(expanded))), x if self.adds else None)


class MobileNetBackbone(nn.Module):
    """All of MobileNetV2 but its classifier."""

    def __init__(self) -> None:
        super().__init__()
        channels = 32
        self.stem, self.bn0 = nn.Conv2d(3, channels, 3, 2, 1, bias=False), BatchNormAct(channels, "relu6")
        self.blocks = nn.ModuleList()
        tapped, stride = [], 2
        for expansion, width, count, first_stride in STAGES:
            for index in range(count):
                step = first_stride if index == 0 else 1
                if step == 2 and stride in (8, 16):  # the last chance to see this resolution
                    tapped.append(len(self.blocks))
                self.blocks.append(InvertedBlock(channels, width, step, expansion))
                channels, stride = width, stride * step
        self.tapped = tuple(tapped)
        self.last, self.bn_last = nn.Conv2d(channels, LAST, 1, bias=False), BatchNormAct(LAST, "relu6")
        self.out_channels = (*(self.blocks[index].width for index in tapped), LAST)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.bn0(self.stem(x))
        maps = []
        for index, block in enumerate(self.blocks):
            expanded = block.expanded(x)
            if index in self.tapped:
                maps.append(expanded)
            x = block.finish(expanded, x)
        return [*maps, self.bn_last(self.last(x))]
