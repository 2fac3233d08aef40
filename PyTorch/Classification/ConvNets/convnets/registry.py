"""Every architecture by name: one line each, with the resolution it is meant for and how to build it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torch import nn

from .efficientnet import EfficientNet, EfficientNetConfig
from .mobilenet import MobileNetV2, MobileNetV2Config
from .resnet import ResNet, ResNetConfig


@dataclass(frozen=True)
class Architecture:
    """``image_size`` is the side in pixels of the evaluation crop; ``parameters`` counts a model of 1000 classes."""

    family: type[nn.Module]
    config: Any
    image_size: int
    parameters: int


def _efficientnet(size: int, parameters: int, *scale: float, **options: Any) -> Architecture:
    return Architecture(EfficientNet, EfficientNetConfig(*scale, **options), size, parameters)


def _small(parameters: int, depths: tuple[int, ...], width: int, stem: str = "small") -> Architecture:
    config = ResNetConfig(depths, "basic", width=width, stem=stem, stem_width=width)
    return Architecture(ResNet, config, 28, parameters)


LITE = {"se": "none", "act": "relu6", "padding": "same", "scales_stem_and_head": False}

ARCHITECTURES: dict[str, Architecture] = {
    # fmt: off
    "resnet18": Architecture(ResNet, ResNetConfig((2, 2, 2, 2), "basic"), 224, 11_689_512),
    "resnet34": Architecture(ResNet, ResNetConfig((3, 4, 6, 3), "basic"), 224, 21_797_672),
    "resnet50": Architecture(ResNet, ResNetConfig((3, 4, 6, 3)), 224, 25_557_032),
    "resnet101": Architecture(ResNet, ResNetConfig((3, 4, 23, 3)), 224, 44_549_160),
    "resnet152": Architecture(ResNet, ResNetConfig((3, 8, 36, 3)), 224, 60_192_808),
    "resnext101_32x4d": Architecture(
        ResNet, ResNetConfig((3, 4, 23, 3), width=128, expansion=2, groups=32), 224, 44_177_704
    ),
    "se_resnext101_32x4d": Architecture(
        ResNet, ResNetConfig((3, 4, 23, 3), width=128, expansion=2, groups=32, se_ratio=16), 224, 48_955_416
    ),
    "efficientnet_b0": _efficientnet(224, 5_288_548, 1.0, 1.0, 0.2),
    "efficientnet_b1": _efficientnet(240, 7_794_184, 1.0, 1.1, 0.2),
    "efficientnet_b2": _efficientnet(260, 9_109_994, 1.1, 1.2, 0.3),
    "efficientnet_b3": _efficientnet(300, 12_233_232, 1.2, 1.4, 0.3),
    "efficientnet_b4": _efficientnet(380, 19_341_616, 1.4, 1.8, 0.4),
    "efficientnet_b5": _efficientnet(456, 30_389_784, 1.6, 2.2, 0.4),
    "efficientnet_b6": _efficientnet(528, 43_040_704, 1.8, 2.6, 0.5),
    "efficientnet_b7": _efficientnet(600, 66_347_960, 2.0, 3.1, 0.5),
    "efficientnet_widese_b0": _efficientnet(224, 8_423_848, 1.0, 1.0, 0.2, se="expanded"),
    "efficientnet_widese_b4": _efficientnet(380, 34_927_246, 1.4, 1.8, 0.4, se="expanded"),
    "efficientnet_lite0": _efficientnet(224, 4_652_008, 1.0, 1.0, 0.2, **LITE),
    "mobilenet_v2": Architecture(MobileNetV2, MobileNetV2Config(), 224, 3_504_872),
    "resnet8_small": _small(436_360, (1, 1, 1), 32, "half"),
    "resnet14_small": _small(3_032_104, (2, 2, 2), 64),
    # fmt: on
}


def architecture(name: str) -> Architecture:
    """The entry of a name. Raises ValueError with the nearest names when there is none."""
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(ARCHITECTURES)}"
        raise ValueError(f"unknown architecture {name!r}; {hint}")
    return ARCHITECTURES[name]


def build(name: str, num_classes: int = 1000, **options: Any) -> nn.Module:
    """A model with freshly initialised weights. ``options``: in_channels, zero_init_residual."""
    entry = architecture(name)
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    return entry.family(entry.config, num_classes=num_classes, **options)
