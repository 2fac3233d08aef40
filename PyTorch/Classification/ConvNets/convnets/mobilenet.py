"""MobileNetV2: inverted residuals with linear bottlenecks.

Paper: Sandler et al. 2018 (https://arxiv.org/abs/1801.04381), table 2. Parameter names follow torchvision's
(``features.2.conv.0.0.weight``), so that its published weights load unchanged.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from dlx.norm import BatchNormAct

from .efficientnet import round_channels

# expansion, output channels, repeats, stride of the first block (table 2 of the paper)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@dataclass(frozen=True)
class MobileNetV2Config:
    width: float = 1.0
    dropout: float = 0.2


def conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, BatchNormAct(out_channels, act="relu6"))


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1 without activation."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int):
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = [conv_norm(in_channels, hidden, 1)] if expansion != 1 else []
        layers += [
            conv_norm(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            BatchNormAct(out_channels, act="none"),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in self.conv[:-1]:
            out = layer(out)
        return self.conv[-1](out, x if self.has_residual else None)


class MobileNetV2(nn.Module):
    """Images N 3 H W -> logits N num_classes. ``stages(x)`` gives the last map at each resolution."""

    def __init__(
        self,
        config: MobileNetV2Config,
        num_classes: int = 1000,
        in_channels: int = 3,
        zero_init_residual: bool = False,
    ):
        super().__init__()
        self.config, self.num_classes = config, num_classes
        channels = round_channels(32 * config.width)
        layers: list[nn.Module] = [conv_norm(in_channels, channels, 3, 2)]
        for expansion, width, repeats, first_stride in STAGES:
            out_channels = round_channels(width * config.width)
            for index in range(repeats):
                layers.append(InvertedResidual(channels, out_channels, first_stride if index == 0 else 1, expansion))
                channels = out_channels
        self.num_features = round_channels(1280 * max(1.0, config.width))
        layers.append(conv_norm(channels, self.num_features, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(config.dropout), nn.Linear(self.num_features, num_classes))
        self.reset_parameters(zero_init_residual)

    def reset_parameters(self, zero_init_residual: bool) -> None:
        """He initialisation (fan out) of convolutions, normal of deviation 0.01 for the classifier."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)
            elif isinstance(module, InvertedResidual) and zero_init_residual and module.has_residual:
                nn.init.zeros_(module.conv[-1].weight)

    def stages(self, x: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        for layer in self.features[:-1]:
            x = layer(x)
            if outputs and outputs[-1].shape[2:] == x.shape[2:]:
                outputs.pop()
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))
