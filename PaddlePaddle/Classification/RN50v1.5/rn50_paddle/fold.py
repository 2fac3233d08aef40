"""A ResNet whose batch norms are part of its convolutions: what is quantised and exported.

In evaluation a norm is y = (x - mean) * gain / sqrt(variance + epsilon) + bias, so it scales the rows of the weight in
front of it and gives it a bias (Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 3.2).
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from .model import Block, ResNet, architecture, build


def _folded(conv: nn.Conv2D, norm: nn.BatchNorm2D) -> nn.Conv2D:
    weight = conv.weight.numpy().astype(np.float64)
    scale = norm.weight.numpy() / np.sqrt(norm._variance.numpy().astype(np.float64) + norm._epsilon)
    made = nn.Conv2D(
        conv._in_channels, conv._out_channels, conv._kernel_size, conv._stride, conv._padding,
        data_format=conv._data_format,
    )  # fmt: skip
    made.weight.set_value((weight * scale[:, None, None, None]).astype(np.float32))
    made.bias.set_value((norm.bias.numpy() - norm._mean.numpy() * scale).astype(np.float32))
    return made


def fold(model: ResNet, arch: str, data_format: str = "NCHW") -> ResNet:
    """A copy in evaluation mode without norms (they are `Identity`), for pictures of the same kind. Neither oneDNN nor
    paddle2onnx take a model that is NHWC inside; weights are the same in either layout."""
    copy = build(arch, model.num_classes, in_channels=model.in_channels, data_format=data_format)
    for key, value in copy.state_dict().items():
        value.set_value(model.state_dict()[key].numpy())
    pairs = [(copy, "conv1", "bn1")]
    for layer in copy.sublayers():
        if isinstance(layer, Block):
            count = 3 if architecture(arch).block == "bottleneck" else 2
            pairs += [(layer, f"conv{n}", f"bn{n}") for n in range(1, count + 1)]
            if layer.downsample is not None:
                pairs.append((layer.downsample, "0", "1"))
    for parent, conv, norm in pairs:
        folded = _folded(getattr(parent, conv), getattr(parent, norm))
        setattr(parent, conv, folded)
        setattr(parent, norm, nn.Identity())
    copy.eval()
    return copy


def largest_difference(first: nn.Layer, second: nn.Layer, images: np.ndarray) -> float:
    """Between the logits of two models on float32 pictures (N, C, H, W)."""
    with paddle.no_grad():
        x = paddle.to_tensor(images)
        return float((first(x) - second(x)).abs().max())
