"""Architectures: parameter counts, shapes, identities between equal computations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from convnets import registry
from dlx import inference
from dlx.inputs import Stem
from dlx.norm import BatchNormAct

SMALL = ["resnet18", "resnet50", "se_resnext101_32x4d", "efficientnet_b0", "efficientnet_widese_b0"]
SMALL += ["efficientnet_lite0", "mobilenet_v2", "resnet8_small", "resnet14_small"]


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Non-trivial norms, so that a missing gain, bias or statistic shows."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, BatchNormAct):
            module.weight.data = 1 + 0.2 * torch.randn(module.weight.shape, generator=generator)
            module.bias.data = 0.2 * torch.randn(module.bias.shape, generator=generator)
            module.running_mean = 0.2 * torch.randn(module.bias.shape, generator=generator)
            module.running_var = 0.5 + torch.rand(module.bias.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", registry.ARCHITECTURES)
def test_parameter_count(name):
    """The published count with 1000 classes (timm's for ResNeXt-101 32x4d, torchvision's for the others)."""
    with torch.device("meta"):
        model = registry.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == registry.architecture(name).parameters


@pytest.mark.parametrize("name", registry.ARCHITECTURES)
def test_output_and_stage_shapes(name):
    """At full resolution, without memory: logits of every class, feature maps that halve."""
    size = registry.architecture(name).image_size
    with torch.device("meta"):
        model = registry.build(name, num_classes=7)
        images = torch.empty(2, 3, size, size)
        assert model(images).shape == (2, 7)
        sizes = [output.shape[-1] for output in model.stages(images)]
    assert sizes == sorted(sizes, reverse=True)
    smallest = size / sizes[-1]
    assert smallest == pytest.approx(8 if name == "resnet8_small" else 4 if name == "resnet14_small" else 32, rel=0.2)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="resnext101_32x4d"):
        registry.build("resnext101_32x4")


@pytest.mark.parametrize("name", SMALL)
def test_batch_of_n_equals_n_batches_of_one(name):
    torch.manual_seed(0)
    model = randomise(registry.build(name, num_classes=5)).eval()
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        together, apart = model(images), torch.cat([model(image[None]) for image in images])
    assert torch.allclose(together, apart, rtol=1e-4, atol=1e-5 * together.abs().max())


def test_folded_stem_equals_the_seven_by_seven_convolution():
    x, weight = torch.randn(2, 3, 32, 24, dtype=torch.float64), torch.randn(8, 3, 7, 7, dtype=torch.float64)
    expected = F.conv2d(x, weight, stride=2, padding=3)
    assert torch.allclose(Stem.convolve(x, weight), expected, atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_folding_norms_changes_nothing(name):
    torch.manual_seed(0)
    model = randomise(registry.build(name, num_classes=5)).eval().double()
    folded = inference.optimize(model, torch.float64)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.inference_mode():
        expected, actual = model(images), folded(images)
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-9 * expected.abs().max())


@pytest.mark.parametrize("name", ["resnet8_small", "mobilenet_v2", "efficientnet_b0"])
def test_one_step_lowers_the_loss(name):
    """A few plain gradient steps on one batch: the last tier of model tests."""
    torch.manual_seed(0)
    model = registry.build(name, num_classes=4).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "survival"):
            module.survival = 1.0
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_same_padding_is_tensorflows():
    """Even input, stride 2, kernel 3: TensorFlow pads only bottom and right."""
    from convnets.efficientnet import Conv2dSame

    layer = Conv2dSame(1, 1, 3, 2, bias=False)
    x = torch.randn(1, 1, 6, 8)
    assert torch.equal(layer(x), F.conv2d(F.pad(x, (0, 1, 0, 1)), layer.weight, stride=2))
    assert layer(torch.randn(1, 1, 7, 5)).shape == (1, 1, 4, 3)


def test_stochastic_depth_keeps_the_expectation():
    torch.manual_seed(0)
    model = registry.build("efficientnet_b0", num_classes=3)
    block = model.layers[2].block1.train()
    block.survival = 0.5
    for module in block.modules():
        if isinstance(module, BatchNormAct):
            module.eval()  # fixed statistics: the only randomness left is the depth
    x = torch.randn(1, 40, 8, 8)
    block.survival = 1.0
    full = block(x)
    block.survival = 0.5
    mean = torch.stack([block(x) for _ in range(400)]).mean(0)
    assert torch.allclose(mean, full, atol=0.25 * (full - x).abs().max().item())
