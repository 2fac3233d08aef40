"""Convolutions, batch norms and storage by one naming scheme, for all networks of this package.

Parameters of a network are known by PyTorch's names (``layer1.0.conv1.weight``, ``layer1.0.bn1.running_mean``), which
is the layout of PyTorch/Classification/ConvNets and torchvision; so weights need no table of names to go from one to
the other. Gluon's own names for a batch norm's scale and shift are ``gamma`` and ``beta``.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, Parameter, nn

NORM_EPSILON = 1e-5
NORM_MOMENTUM = 0.9  # of the running statistics' old value; PyTorch calls the same thing 0.1
TO_TORCH = {"gamma": "weight", "beta": "bias"}


def conv(in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1, padding: int | None = None):
    """A convolution without bias that keeps the size at stride 1 (unless ``padding`` says otherwise)."""
    padding = kernel // 2 if padding is None else padding
    return nn.Conv2D(
        channels, kernel, stride, padding, groups=groups, use_bias=False, in_channels=in_channels,
        weight_initializer=mx.init.MSRAPrelu("out", 0.0),
    )  # fmt: skip


class Norm(HybridBlock):
    """Batch norm, with a ReLU after it if ``relu``; with ``fused`` both are one operator (of oneDNN, so for CPUs).

    Its parameters are those of the norm in either form.
    """

    def __init__(self, channels: int, relu: bool = True, fused: bool = False) -> None:
        super().__init__()
        kind = nn.BatchNormReLU if relu and fused else nn.BatchNorm
        self.norm = kind(momentum=NORM_MOMENTUM, epsilon=NORM_EPSILON, in_channels=channels)
        self.relu = relu and not fused

    def hybrid_forward(self, F, x):
        x = self.norm(x)
        return F.Activation(x, act_type="relu") if self.relu else x


def named_parameters(network: HybridBlock) -> dict[str, Parameter]:
    """Every parameter and statistic by PyTorch's name."""
    found: dict[str, Parameter] = {}
    for name, parameter in network._collect_params_with_prefix().items():
        parts = [part for part in name.split(".") if part != "norm"]
        parts[-1] = TO_TORCH.get(parts[-1], parts[-1])
        found[".".join(parts)] = parameter
    return found


def count_parameters(network: HybridBlock) -> int:
    """Trained numbers, without the running statistics."""
    return sum(int(np.prod(p.shape)) for p in named_parameters(network).values() if p.grad_req != "null")


def get_weights(network: HybridBlock) -> dict[str, np.ndarray]:
    """float32 arrays by PyTorch's names."""
    return {name: p.data().astype("float32").asnumpy() for name, p in named_parameters(network).items()}


def set_weights(network: HybridBlock, weights: Mapping[str, np.ndarray], source: str = "weights") -> None:
    """Strictly: ValueError names what is missing, what is too much and what has another shape.

    PyTorch's counters (``num_batches_tracked``) are passed over.
    """
    own = named_parameters(network)
    given = {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
    faults = [f"{name} is missing" for name in own if name not in given]
    faults += [f"{name} is not part of the network" for name in given if name not in own]
    faults += [
        f"{name} has shape {tuple(given[name].shape)}, the network {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if name in given and tuple(given[name].shape) != tuple(parameter.shape)
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"{source}: {'; '.join(faults[:5])}{more}")
    for name, parameter in own.items():
        parameter.set_data(mx.nd.array(given[name], dtype="float32"))
