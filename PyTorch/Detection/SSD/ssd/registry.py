"""Every architecture by name: one line each."""

from __future__ import annotations

from dataclasses import dataclass

from dlx.names import lookup

from .anchors import REFERENCE
from .model import SSD, SSDConfig

COCO_CLASSES = 80


@dataclass(frozen=True)
class Architecture:
    """``parameters`` counts a model of COCO's 80 classes, ``image_size`` is the side it is meant for."""

    config: SSDConfig
    parameters: int
    image_size: int = REFERENCE


COMPACT = {"squeezed": (128, 128, 64, 64, 64), "extra": (256, 256, 128, 128, 128)}
MOBILE = {"squeezed": (128, 64, 64), "extra": (256, 128, 128)}
SMALL = {"squeezed": (64, 64, 64, 64, 64), "extra": (128, 128, 128, 128, 128), "width": 32}

ARCHITECTURES: dict[str, Architecture] = {
    # fmt: off
    "ssd300_resnet18": Architecture(SSDConfig("basic", (2, 2, 2)), 14_587_702),
    "ssd300_resnet34": Architecture(SSDConfig("basic", (3, 4, 6)), 19_975_222),
    "ssd300_resnet50": Architecture(SSDConfig("bottleneck", (3, 4, 6)), 22_894_902),
    "ssd300_resnet101": Architecture(SSDConfig("bottleneck", (3, 4, 23)), 41_887_030),
    "ssd300_resnet152": Architecture(SSDConfig("bottleneck", (3, 8, 36)), 57_530_678),
    "ssd300_compact": Architecture(SSDConfig("basic", (2, 2, 2), **COMPACT), 8_201_654),
    "ssd300_small": Architecture(SSDConfig("basic", (2, 2, 2), **SMALL), 4_050_838),
    "ssd300_mobilenet_v2": Architecture(SSDConfig("mobilenet", **MOBILE), 13_923_702),
    # fmt: on
}


def build(name: str, num_classes: int = COCO_CLASSES) -> SSD:
    """A model with freshly initialised weights; ``num_classes`` without the background.

    Raises ValueError for an unknown name, suggesting the nearest, and for fewer than one class.
    """
    entry = lookup(ARCHITECTURES, name, "architecture")
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    return SSD(entry.config, num_classes)
