"""The MobileNetV2 backbone against a plain module in the published layout, and its parameters by arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlx import weights
from ssd import convert, pretrained, registry
from ssd.anchors import PER_CELL, feature_sizes
from ssd.mobilenet import MobileNetBackbone

TABLE = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Published(nn.Module):
    """Names as in torchvision's file: features.N.conv.M."""

    def __init__(self) -> None:
        super().__init__()

        def unit(before: int, after: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(after), nn.ReLU6())

        layers: list[nn.Module] = [unit(3, 32, 3, 2)]
        self.adds, before = [False], 32
        for expansion, after, count, first in TABLE:
            for index in range(count):
                stride, wide = (first if index == 0 else 1), before * expansion
                parts = [unit(before, wide, 1)] if expansion > 1 else []
                parts += [unit(wide, wide, 3, stride, wide), nn.Conv2d(wide, after, 1, bias=False)]
                block = nn.Module()
                block.conv = nn.Sequential(*parts, nn.BatchNorm2d(after))
                layers.append(block)
                self.adds.append(stride == 1 and before == after)
                before = after
        layers.append(unit(before, 1280, 1))
        self.adds.append(False)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(1280, 10))

    def maps(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for number, layer in enumerate(self.features):
            run = getattr(layer, "conv", layer)
            if number in (7, 14):  # the blocks whose filter halves a map of stride 8 or 16
                found.append(run[0](x))
            x = run(x) + x if self.adds[number] else run(x)
        return [*found, x]


def test_it_is_the_published_network():
    torch.manual_seed(0)
    plain = Published().eval()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    ours = MobileNetBackbone().eval()
    report = weights.load_into(ours, convert.backbone_tensors(plain.state_dict()))
    assert report.complete
    x = torch.randn(1, 3, 300, 300)
    with torch.no_grad():
        pairs = list(zip(ours.double()(x.double()), plain.double().maps(x.double()), strict=True))
    assert [tuple(found.shape[1:]) for found, _ in pairs] == [(192, 38, 38), (576, 19, 19), (1280, 10, 10)]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_parameter_count():
    total = 27 * 32 + 2 * 32
    before = 32
    for expansion, after, count, _ in TABLE:
        for _ in range(count):
            wide = before * expansion
            total += (before * wide + 2 * wide) * (expansion > 1) + 9 * wide + 2 * wide + wide * after + 2 * after
            before = after
    total += before * 1280 + 2 * 1280
    assert total == 2_223_872  # the published classifier's 3,504,872 less its last layer's 1,281,000
    channels = [192, 576, 1280, 256, 128, 128]
    for middle, (inside, outside) in zip((128, 64, 64), ((1280, 256), (256, 128), (128, 128)), strict=True):
        total += inside * middle + 2 * middle + 9 * middle * outside + 2 * outside
    total += sum((9 * width + 1) * boxes * 85 for width, boxes in zip(channels, PER_CELL, strict=True))
    with torch.device("meta"):
        model = registry.build("ssd300_mobilenet_v2")
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == total == registry.ARCHITECTURES["ssd300_mobilenet_v2"].parameters


def test_maps_fit_the_default_boxes_at_any_size():
    model = registry.build("ssd300_mobilenet_v2", 2).eval()
    for size in (257, 300, 321):
        with torch.no_grad():
            maps = model.features(torch.zeros(1, 3, size, size))
        assert tuple(x.shape[-1] for x in maps) == feature_sizes(size)


@pytest.mark.slow
def test_published_weights_fit():
    """Downloads 13 MB once."""
    model = registry.build("ssd300_mobilenet_v2", 2)
    report = pretrained.load_backbone(model, "mobilenet_v2_backbone.imagenet")
    assert report.complete
