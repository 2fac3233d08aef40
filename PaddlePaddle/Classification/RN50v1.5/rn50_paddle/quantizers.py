"""Simulated int8: observers, rounding with a straight-through gradient, and layers that use them.

Papers: Jacob et al. 2018 (https://arxiv.org/abs/1712.05877), Krishnamoorthi 2018 (https://arxiv.org/abs/1806.08342).
Activations have one scale per tensor: unsigned from zero where none was negative, signed and symmetric otherwise.
Weights are symmetric with a scale per output channel. What enters a block is rounded once, for its convolutions and its
shortcut, and both summands of a block are rounded, so that a runtime needs no float kernel between. The arithmetic is
that of ONNX's QuantizeLinear and DequantizeLinear, so that an exported graph computes what these layers do.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from .model import BasicBlock, Block

SMALLEST = 1e-8
MODES = ("float", "observe", "quantise")


def round_to(x: Tensor, scale: Tensor, lowest: int, highest: int) -> Tensor:
    """Nearest of the representable values; the gradient passes where x lies between the ends (Bengio et al. 2013)."""
    inside = paddle.clip(x / scale, lowest, highest)
    return (inside + (paddle.round(inside) - inside).detach()) * scale


class Observer(nn.Layer):
    """Watches a tensor: its smallest value, and the mean over the batches of a high percentile of its size."""

    def __init__(self, percentile: float = 99.99):
        super().__init__()
        if not 50 < percentile <= 100:
            raise ValueError(f"percentile must be above 50 and at most 100, got {percentile}")
        self.percentile, self.count, self.total, self.lowest = percentile, 0, 0.0, 0.0

    def watch(self, x: Tensor) -> None:
        values = x.numpy()
        self.lowest = min(self.lowest, float(values.min()))
        self.total += float(np.percentile(np.abs(values), self.percentile))
        self.count += 1

    @property
    def signed(self) -> bool:
        return self.lowest < 0

    @property
    def limits(self) -> tuple[int, int]:
        return (-128, 127) if self.signed else (0, 255)

    @property
    def scale(self) -> float:
        if not self.count:
            raise ValueError("nothing was observed: calibrate on some pictures first")
        return max(self.total / self.count / self.limits[1], SMALLEST)

    def round(self, x: Tensor) -> Tensor:
        return round_to(x, paddle.to_tensor(self.scale, "float32"), *self.limits)


class Quantised(nn.Layer):
    """A convolution or linear layer whose input and weight are rounded; `mode` is one of MODES."""

    def __init__(self, inner: nn.Conv2D | nn.Linear, percentile: float, rounds_output: bool = False):
        super().__init__()
        self.inner = inner
        self.observer = Observer(percentile)
        self.output = Observer(percentile) if rounds_output else None
        self.mode = "float"

    def weight_scale(self) -> Tensor:
        """(output channels, 1, 1, 1) for a convolution, (1, outputs) for a linear layer."""
        weight = self.inner.weight.detach().abs()
        axes = [1, 2, 3] if weight.ndim == 4 else [0]
        return paddle.clip(weight.max(axis=axes, keepdim=True) / 127, min=SMALLEST)

    def rounded(self, x: Tensor) -> Tensor:
        """The input as the layer takes it."""
        return self.observer.round(x) if self.mode == "quantise" else x

    def forward(self, x: Tensor) -> Tensor:
        layer = self.inner
        if self.mode == "observe":
            self.observer.watch(x)
        if self.mode != "quantise":
            y = layer(x)
            if self.mode == "observe" and self.output is not None:
                self.output.watch(y)
            return y
        x = self.rounded(x)
        weight = round_to(layer.weight, self.weight_scale(), -127, 127)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, layer.bias)
        y = F.conv2d(
            x, weight, layer.bias, layer._stride, layer._updated_padding, layer._dilation, layer._groups,
            layer._data_format,
        )  # fmt: skip
        return y if self.output is None else self.output.round(y)


def _round_block_input(block: Block, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Before a block runs: the identity shortcut gets the rounded input, too."""
    return (block.conv1.rounded(inputs[0]),)


def wrap(model: nn.Layer, percentile: float = 99.99) -> dict[str, Quantised]:
    """Put every convolution and linear layer of a folded model into a `Quantised`, in place; them by name."""
    found = {}
    summands = set()
    for name, layer in model.named_sublayers():
        if isinstance(layer, Block):
            summands |= {f"{name}.{'conv2' if isinstance(layer, BasicBlock) else 'conv3'}", f"{name}.downsample.0"}
            layer.register_forward_pre_hook(_round_block_input)
    for name, layer in list(model.named_sublayers()):
        if isinstance(layer, nn.Conv2D | nn.Linear):
            parent: nn.Layer = model
            *path, leaf = name.split(".")
            for part in path:
                parent = getattr(parent, part)
            found[name] = Quantised(layer, percentile, name in summands)
            setattr(parent, leaf, found[name])
    return found


def set_mode(layers: dict[str, Quantised], mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    for layer in layers.values():
        layer.mode = mode
