"""The network: default boxes, sizes, initialisation, parity with the published layout, batches, learning."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import nn

from dlx import weights
from dlx.inference import fold
from dlx.weights import strip_prefixes
from ssd import anchors, backbone, convert, pretrained, registry
from ssd.backbone import Backbone
from ssd.loss import MultiboxLoss


@pytest.fixture(autouse=True, scope="module")
def small_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------- default boxes


def published_default_boxes() -> torch.Tensor:
    """NVIDIA's order and formula for 300 pixels, written out: map, shape, row, column; centres, float64."""
    sizes, steps = (38, 19, 10, 5, 3, 1), (8, 16, 32, 64, 100, 300)
    scales = (21, 45, 99, 153, 207, 261, 315)
    ratios = ([2], [2, 3], [2, 3], [2, 3], [2], [2])
    rows = []
    for level in range(6):
        first, second = scales[level] / 300, scales[level + 1] / 300
        shapes = [(first, first), (math.sqrt(first * second), math.sqrt(first * second))]
        for ratio in ratios[level]:
            shapes.append((first * math.sqrt(ratio), first / math.sqrt(ratio)))
            shapes.append((first / math.sqrt(ratio), first * math.sqrt(ratio)))
        per_picture = 300 / steps[level]
        for width, height in shapes:
            for row, column in itertools.product(range(sizes[level]), repeat=2):
                rows.append(((column + 0.5) / per_picture, (row + 0.5) / per_picture, width, height))
    return torch.tensor(rows, dtype=torch.float64).clamp(0, 1)


def our_order() -> torch.Tensor:
    """For each of our default boxes its place in the published list."""
    places, start = [], 0
    for side, count in zip((38, 19, 10, 5, 3, 1), (4, 6, 6, 6, 4, 4), strict=True):
        grid = torch.arange(start, start + count * side * side).view(count, side, side)
        places.append(grid.permute(1, 2, 0).flatten())
        start += count * side * side
    return torch.cat(places)


def test_default_boxes_of_300_pixels():
    boxes = anchors.default_boxes(300)
    assert boxes.shape == (8732, 4) and boxes.dtype == torch.float32
    torch.testing.assert_close(boxes.double(), published_default_boxes()[our_order()], atol=1e-7, rtol=0)


@pytest.mark.parametrize("size", [257, 300, 384, 417, 512])
def test_default_boxes_fit_the_maps_of_any_size(size):
    with torch.device("meta"):
        model = registry.build("ssd300_compact", 3).eval()
        maps = model.features(torch.zeros(1, 3, size, size))
        locations, logits = model(torch.zeros(1, 3, size, size))
    assert tuple(x.shape[-1] for x in maps) == anchors.feature_sizes(size)
    boxes = anchors.default_boxes(size)
    assert locations.shape == (1, len(boxes), 4) and logits.shape == (1, len(boxes), 4)
    assert boxes.min() > 0 and boxes.max() <= 1


def test_too_small_pictures_are_refused():
    with pytest.raises(ValueError, match="at least 257.*got 256"):
        anchors.default_boxes(256)


# ------------------------------------------------------------------------------------------- parameters


def counted(kind: str, depths: tuple[int, ...], classes: int, squeezed, extra, stem: int = 64) -> int:
    """Parameters by arithmetic alone: k*k*in*out per convolution, two per channel of a norm, biases of heads."""
    total = 7 * 7 * 3 * stem + 2 * stem
    channels = stem
    for stage, depth in enumerate(depths):
        width = stem * 2**stage
        out = width if kind == "basic" else 4 * width
        for block in range(depth):
            if kind == "basic":
                total += 9 * channels * width + 9 * width * width + 2 * 2 * width
            else:
                total += channels * width + 9 * width * width + width * out + 2 * (2 * width + out)
            if block == 0 and (stage == 1 or channels != out):
                total += channels * out + 2 * out
            channels = out
    maps = [channels, *extra]
    for before, middle, after in zip(maps, squeezed, extra, strict=False):
        total += before * middle + 2 * middle + 9 * middle * after + 2 * after
    for width, boxes in zip(maps, (4, 6, 6, 6, 4, 4), strict=True):
        total += (9 * width + 1) * boxes * (4 + classes + 1)
    return total


WIDE = ((256, 256, 128, 128, 128), (512, 512, 256, 256, 256))
HALF = ((128, 128, 64, 64, 64), (256, 256, 128, 128, 128))
NARROW = ((64,) * 5, (128,) * 5, 32)


@pytest.mark.parametrize(
    ("name", "kind", "depths", "channels"),
    [
        ("ssd300_resnet18", "basic", (2, 2, 2), WIDE),
        ("ssd300_resnet34", "basic", (3, 4, 6), WIDE),
        ("ssd300_resnet50", "bottleneck", (3, 4, 6), WIDE),
        ("ssd300_resnet101", "bottleneck", (3, 4, 23), WIDE),
        ("ssd300_resnet152", "bottleneck", (3, 8, 36), WIDE),
        ("ssd300_compact", "basic", (2, 2, 2), HALF),
        ("ssd300_small", "basic", (2, 2, 2), NARROW),
    ],
)
def test_parameter_counts(name, kind, depths, channels):
    with torch.device("meta"):
        model, few = registry.build(name), registry.build(name, 7)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == registry.ARCHITECTURES[name].parameters == counted(kind, depths, 80, *channels)
    assert sum(parameter.numel() for parameter in few.parameters()) == counted(kind, depths, 7, *channels)


def test_stated_counts():
    assert registry.ARCHITECTURES["ssd300_resnet50"].parameters == 22_894_902
    with torch.device("meta"):
        compact = registry.build("ssd300_compact", 20)
    assert 2 * sum(tensor.numel() for tensor in compact.state_dict().values()) <= 12_000_000


def test_unknown_names_and_classes():
    with pytest.raises(ValueError, match="unknown architecture 'ssd_resnet50'; did you mean ssd300_resnet50"):
        registry.build("ssd_resnet50")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        registry.build("ssd300_compact", 0)


def test_initialisation():
    """Xavier per convolution of offsets and of scores, as if they were apart; zero biases."""
    torch.manual_seed(0)
    model = registry.build("ssd300_compact", 20)
    for head, channels in zip(model.heads, (256, 256, 256, 128, 128, 128), strict=True):
        assert not head.bias.any()
        for part, values in zip(head.parts(head.weight.detach()), (4, 21), strict=True):
            limit = math.sqrt(6 / (9 * (channels + head.boxes * values)))
            assert 0.97 * limit < part.abs().max() <= limit
            assert part.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.05)
    for block in model.extra:
        out, inside = block.conv2.weight.shape[:2]
        assert block.conv2.weight.abs().max() <= math.sqrt(6 / (9 * (out + inside)))
    strides = [module.stride for module in model.backbone.layer3.modules() if isinstance(module, nn.Conv2d)]
    assert set(strides) == {(1, 1)}


# ------------------------------------------------------------------------------------------- published layout


class PublishedBlock(nn.Module):
    """Bottleneck of ResNet v1.5 with the key names of torchvision."""

    def __init__(self, inside: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn3(self.conv3(self.bn2(self.conv2(y)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class PublishedExtractor(nn.Module):
    def __init__(self):
        super().__init__()

        def stage(inside, width, depth, stride):
            blocks = [PublishedBlock(inside if i == 0 else 4 * width, width, stride if i == 0 else 1) for i in depth]
            return nn.Sequential(*blocks)

        self.feature_extractor = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            stage(64, 64, range(3), 1),
            stage(256, 128, range(4), 2),
            stage(512, 256, range(6), 1),
        )

    def forward(self, x):
        return self.feature_extractor(x)


class Published(nn.Module):
    """SSD300 in NVIDIA's key layout, of plain modules: (N, 4, 8732) and (N, classes, 8732) in its order of boxes."""

    def __init__(self, classes: int):
        super().__init__()
        self.feature_extractor = PublishedExtractor()
        blocks, channels = [], [1024, 512, 512, 256, 256, 256]
        for index, middle in enumerate((256, 256, 128, 128, 128)):
            last = {"stride": 2, "padding": 1} if index < 3 else {}
            blocks.append(
                nn.Sequential(
                    nn.Conv2d(channels[index], middle, 1, bias=False),
                    nn.BatchNorm2d(middle),
                    nn.ReLU(),
                    nn.Conv2d(middle, channels[index + 1], 3, bias=False, **last),
                    nn.BatchNorm2d(channels[index + 1]),
                    nn.ReLU(),
                )
            )
        self.additional_blocks = nn.ModuleList(blocks)
        pairs = list(zip(channels, (4, 6, 6, 6, 4, 4), strict=True))
        self.loc = nn.ModuleList(nn.Conv2d(width, 4 * boxes, 3, padding=1) for width, boxes in pairs)
        self.conf = nn.ModuleList(nn.Conv2d(width, classes * boxes, 3, padding=1) for width, boxes in pairs)
        self.classes = classes

    def forward(self, x):
        maps = [self.feature_extractor(x)]
        for block in self.additional_blocks:
            maps.append(block(maps[-1]))
        offsets = [head(y).view(len(x), 4, -1) for head, y in zip(self.loc, maps, strict=True)]
        scores = [head(y).view(len(x), self.classes, -1) for head, y in zip(self.conf, maps, strict=True)]
        return torch.cat(offsets, 2), torch.cat(scores, 2)


@pytest.fixture(scope="module")
def published() -> Published:
    torch.manual_seed(3)
    model = Published(classes=81)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("prefix", ["", "module.", "module.1."])
def test_the_published_checkpoint_loads_strictly(published, prefix, tmp_path):
    content = {
        "epoch": 64,
        "iteration": 120000,
        "optimizer": {"state": {}, "param_groups": []},
        "scheduler": {"milestones": [43, 54]},
        "label_map": {1: "person", 2: "bicycle"},
        "model": {prefix + key: value for key, value in published.state_dict().items()},
    }
    torch.save(content, tmp_path / "nvidia.pt")
    found = pretrained.load(tmp_path / "nvidia.pt", arch="ssd300_resnet50")
    assert found.classes[0] == "person" and found.category_ids[11] == 13 and len(found.classes) == 80
    assert torch.equal(found.model.extra[2].conv2.weight, published.additional_blocks[2][3].weight)
    if prefix == "module.1.":
        images = torch.randn(2, 3, 300, 300, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            offsets, scores = published(images)
            found_offsets, found_scores = found.model(images)
        order = our_order()
        for ours, theirs in ((found_offsets, offsets), (found_scores, scores)):
            theirs = theirs[:, :, order].transpose(1, 2)
            assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_prefixes_are_stripped_at_the_front_only():
    assert list(strip_prefixes({"module.1.module.weight": 0}, convert.PREFIXES)) == ["weight"]
    assert list(strip_prefixes({"module.a": 0, "b.module.c": 0}, convert.PREFIXES)) == ["module.a", "b.module.c"]
    assert list(strip_prefixes({"extra.1.conv": 0}, convert.PREFIXES)) == ["extra.1.conv"]
    assert strip_prefixes({}, convert.PREFIXES) == {}


def test_a_mismatch_names_every_key(published):
    state_dict = published.state_dict()
    state_dict["loc.7.weight"] = torch.zeros(1)
    del state_dict["additional_blocks.0.0.weight"]
    with pytest.raises(ValueError) as caught:
        weights.load_into(registry.build("ssd300_resnet50", 80), convert.to_canonical(state_dict))
    assert "loc.7.weight: not in the model" in str(caught.value)
    assert "extra.0.conv1.weight: missing" in str(caught.value)
    with pytest.raises(ValueError, match=r"heads.0.weight: \[340, 1024, 3, 3\] in the file, \[100, 1024, 3, 3\]"):
        weights.load_into(registry.build("ssd300_resnet50", 20), convert.to_canonical(published.state_dict()))


def test_a_classifier_becomes_the_backbone(published, tmp_path):
    """torchvision's and NVIDIA's key layouts of ResNet-50, with the parts that a detector has not."""
    parts = dict(zip(("conv1", "bn1", "layer1", "layer2", "layer3"), (0, 1, 4, 5, 6), strict=True))
    sequence = published.feature_extractor.feature_extractor
    torchvision = {f"{name}.{key}": v for name, i in parts.items() for key, v in sequence[i].state_dict().items()}
    torchvision |= {"layer4.0.conv1.weight": torch.zeros(3), "fc.weight": torch.zeros(5), "fc.bias": torch.zeros(5)}
    nvidia = {
        re.sub(r"^layer(\d)", lambda match: f"layers.{int(match[1]) - 1}", key): value
        for key, value in torchvision.items()
    }
    nvidia = {f"module.{key}": value for key, value in nvidia.items()}
    images = torch.randn(1, 3, 96, 96)
    for name, state_dict in (("torchvision", torchvision), ("nvidia", nvidia)):
        torch.save(state_dict, tmp_path / f"{name}.pt")
        model = registry.build("ssd300_resnet50", 3).eval()
        assert pretrained.load_backbone(model, tmp_path / f"{name}.pt").complete
        with torch.no_grad():
            torch.testing.assert_close(model.backbone(images)[0], published.feature_extractor(images))


# ------------------------------------------------------------------------------------------- properties


def test_batch_of_three_is_three_batches_of_one():
    torch.manual_seed(0)
    model = registry.build("ssd300_compact", 5).eval()
    images = torch.randn(3, 3, 257, 257)
    with torch.no_grad():
        together = model(images)
        for index in range(3):
            for whole, part in zip(together, model(images[index : index + 1]), strict=True):
                torch.testing.assert_close(whole[index : index + 1], part, atol=1e-4, rtol=1e-4)


def test_folding_changes_nothing():
    torch.manual_seed(0)
    model = registry.build("ssd300_compact", 5).train()
    images = torch.randn(4, 3, 257, 257)
    with torch.no_grad():
        model(images)
        model.eval()
        for ours, folded in zip(model(images), fold(model)(images), strict=True):
            assert (ours - folded).abs().max() <= 1e-4 * ours.abs().max()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fold(model).modules())


def test_transfer_keeps_all_but_the_class_scores():
    torch.manual_seed(0)
    old, new = registry.build("ssd300_compact", 9), registry.build("ssd300_compact", 4)
    scores = new.heads[1].parts(new.heads[1].weight.detach())[1].clone()
    convert.transfer(new, old.state_dict())
    assert torch.equal(new.backbone.layer2[0].conv1.weight, old.backbone.layer2[0].conv1.weight)
    for ours, theirs in zip(new.heads, old.heads, strict=True):
        assert torch.equal(ours.parts(ours.weight)[0], theirs.parts(theirs.weight)[0])
    assert torch.equal(new.heads[1].parts(new.heads[1].weight)[1], scores)
    images = torch.randn(1, 3, 257, 257)
    with torch.no_grad():
        torch.testing.assert_close(new.eval()(images)[0], old.eval()(images)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="another architecture"):
        convert.transfer(registry.build("ssd300_resnet18", 4), old.state_dict())


def test_steps_lower_the_loss():
    torch.manual_seed(0)
    model = registry.build("ssd300_compact", 2)
    loss_of = MultiboxLoss(anchors.default_boxes(257))
    optimizer = torch.optim.SGD(model.parameters(), 2e-3, momentum=0.9)
    images = torch.randn(2, 3, 257, 257)
    boxes = torch.tensor([[[0.1, 0.1, 0.5, 0.6]], [[0.3, 0.4, 0.9, 0.8]]])
    labels = torch.tensor([[1], [2]])
    losses = []
    for _ in range(6):
        loss = loss_of(model(images), boxes, labels).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_channels_last_heads_need_no_copy_of_their_own():
    """In channels_last memory the output of a head already is the list of boxes."""
    head = registry.build("ssd300_compact", 3).heads[0]
    x = torch.randn(2, 256, 5, 5).contiguous(memory_format=torch.channels_last)
    head.to(memory_format=torch.channels_last)
    raw = nn.functional.conv2d(x, head.weight, head.bias, padding=1)
    assert raw.permute(0, 2, 3, 1).is_contiguous()
    torch.testing.assert_close(head(x), raw.permute(0, 2, 3, 1).reshape(2, -1, 8))


def test_backbone_of_an_unknown_depth_is_an_error():
    with pytest.raises(ValueError):
        Backbone("basic", (2, 2))


def test_residual_branches_can_start_at_zero():
    model = registry.build("ssd300_resnet50", 2).eval()
    backbone.zero_residuals(model)
    blocks = [module for module in model.backbone.modules() if isinstance(module, backbone.Block)]
    assert len(blocks) == 3 + 4 + 6
    x = torch.rand(1, 1024, 6, 6)
    torch.testing.assert_close(model.backbone.layer3[-1]((x, x))[0], x)  # it is positive, so ReLU leaves it
