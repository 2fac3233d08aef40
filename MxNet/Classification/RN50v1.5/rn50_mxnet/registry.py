"""Every architecture by name: one line each, with the resolution it is meant for and how to build it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mxnet as mx
from mxnet.gluon import HybridBlock

from dlx.names import lookup

from .resnet import ResNet, ResNetConfig
from .xception import Xception

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclass(frozen=True)
class Architecture:
    """``config`` None is Xception. ``image_size`` in pixels; ``parameters`` counts a model of 1000 classes."""

    config: ResNetConfig | None
    image_size: int
    parameters: int


def _resnet(layers: int, parameters: int, version: str) -> Architecture:
    block = "basic" if layers < 50 else "bottleneck"
    return Architecture(ResNetConfig(DEPTHS[layers], block, version), 224, parameters)


COUNTS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
RESNEXT = ResNetConfig(DEPTHS[101], width=128, expansion=2, groups=32)
ARCHITECTURES: dict[str, Architecture] = {
    **{f"resnet{layers}_v1": _resnet(layers, count, "1") for layers, count in COUNTS.items()},
    **{f"resnet{layers}": _resnet(layers, count, "1.5") for layers, count in COUNTS.items()},
    "resnext101_32x4d": Architecture(RESNEXT, 224, 44_177_704),
    "xception": Architecture(None, 299, 22_855_952),
    "resnet8_small": Architecture(ResNetConfig((1, 1, 1), "basic", width=32, stem="half", stem_width=32), 28, 436_360),
}


def architecture(name: str) -> Architecture:
    """The entry of a name. ValueError with the nearest names when there is none."""
    return lookup(ARCHITECTURES, name, "architecture")


def build(
    name: str,
    num_classes: int = 1000,
    in_channels: int = 3,
    *,
    seed: int = 0,
    fused: bool = False,
    ctx: mx.Context | None = None,
    depths: tuple[int, ...] | None = None,
) -> HybridBlock:
    """A network with weights drawn from ``seed``.

    ``fused``: batch norms and their ReLUs as one operator, on CPUs; the parameters are the same. ``depths`` builds a
    ResNet with other numbers of blocks per stage, for tests.
    """
    found = architecture(name)
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    if found.config is None:
        network: HybridBlock = Xception(num_classes, in_channels, fused)
    else:
        config = replace(found.config, depths=depths or found.config.depths)
        network = ResNet(config, num_classes, in_channels, fused)
    mx.random.seed(seed)
    network.initialize(mx.init.Zero(), ctx=ctx or mx.cpu())  # layers have initialisers of their own
    return network
