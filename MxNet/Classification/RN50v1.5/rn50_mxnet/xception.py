"""Xception (Chollet 2017, https://arxiv.org/abs/1610.02357, figure 5) as a hybrid Gluon block.

Without the optional fully connected layers and without dropout. The stem's two convolutions have no padding, as in the
author's implementation, so 299 pixels become 149 and 147. Every convolution, separable ones included, is followed by a
batch norm; there is nothing between the two halves of a separable convolution.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

from .blocks import Norm, conv

ENTRY = ((64, 128), (128, 256), (256, 728))
MIDDLE_BLOCKS, MIDDLE_CHANNELS = 8, 728


class SeparableConv(HybridBlock):
    """3x3 per channel, then 1x1 over the channels."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.depthwise = conv(in_channels, in_channels, 3, groups=in_channels)
        self.pointwise = conv(in_channels, channels, 1)

    def hybrid_forward(self, F, x):
        return self.pointwise(self.depthwise(x))


class XceptionBlock(HybridBlock):
    """(ReLU, separable convolution, norm) for each of ``widths``, halved in size if ``pool``, plus the shortcut.

    ``starts_with_relu`` is false where the block's input has just been rectified.
    """

    def __init__(self, in_channels: int, widths: tuple[int, ...], pool: bool, starts_with_relu: bool = True) -> None:
        super().__init__()
        self.starts_with_relu = starts_with_relu
        self.body = nn.HybridSequential()
        channels = in_channels
        for position, width in enumerate(widths):
            # The ReLU before the next convolution is that of this norm.
            self.body.add(SeparableConv(channels, width), Norm(width, relu=position + 1 < len(widths)))
            channels = width
        self.pool = nn.MaxPool2D(3, 2, 1) if pool else None
        self.shortcut = None
        if pool:
            self.shortcut = nn.HybridSequential()
            self.shortcut.add(conv(in_channels, channels, 1, 2), Norm(channels, relu=False))

    def hybrid_forward(self, F, x):
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = F.Activation(x, act_type="relu") if self.starts_with_relu else x
        x = self.body(x)
        return (x if self.pool is None else self.pool(x)) + shortcut


class Xception(HybridBlock):
    """Images N C H W -> logits N num_classes."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, fused: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(in_channels, 32, 3, 2, padding=0), Norm(32, fused=fused)
        self.conv2, self.bn2 = conv(32, 64, 3, padding=0), Norm(64, fused=fused)
        self.blocks = nn.HybridSequential()
        for position, (first, second) in enumerate(ENTRY):
            self.blocks.add(XceptionBlock(first, (second, second), True, position > 0))
        for _ in range(MIDDLE_BLOCKS):
            self.blocks.add(XceptionBlock(MIDDLE_CHANNELS, (MIDDLE_CHANNELS,) * 3, False))
        self.blocks.add(XceptionBlock(MIDDLE_CHANNELS, (MIDDLE_CHANNELS, 1024), True))
        self.conv3, self.bn3 = SeparableConv(1024, 1536), Norm(1536, fused=fused)
        self.conv4, self.bn4 = SeparableConv(1536, 2048), Norm(2048, fused=fused)
        self.fc = nn.Dense(num_classes, in_units=2048, weight_initializer=mx.init.Normal(0.01))

    def hybrid_forward(self, F, x):
        x = self.bn2(self.conv2(self.bn1(self.conv1(x))))
        x = self.blocks(x)
        x = self.bn4(self.conv4(self.bn3(self.conv3(x))))
        return self.fc(F.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)))
