"""Every architecture by name: one line each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

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

ARCHITECTURES: dict[str, Architecture] = {
    # fmt: off
    "ssd300_resnet18": Architecture(SSDConfig("basic", (2, 2, 2)), 0),
    "ssd300_resnet34": Architecture(SSDConfig("basic", (3, 4, 6)), 0),
    "ssd300_resnet50": Architecture(SSDConfig("bottleneck", (3, 4, 6)), 0),
    "ssd300_resnet101": Architecture(SSDConfig("bottleneck", (3, 4, 23)), 0),
    "ssd300_resnet152": Architecture(SSDConfig("bottleneck", (3, 8, 36)), 0),
    "ssd300_compact": Architecture(SSDConfig("basic", (2, 2, 2), **COMPACT), 0),
    # fmt: on
}


def architecture(name: str) -> Architecture:
    """The entry of a name. Raises ValueError with the nearest names when there is none."""
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(ARCHITECTURES)}"
        raise ValueError(f"unknown architecture {name!r}; {hint}")
    return ARCHITECTURES[name]


def build(name: str, num_classes: int = COCO_CLASSES) -> SSD:
    """A model with freshly initialised weights; ``num_classes`` without the background."""
    entry = architecture(name)
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    return SSD(entry.config, num_classes)
