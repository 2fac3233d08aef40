"""Normalisation of equivariant features: their lengths are normalised, their directions kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import convert
from . import ops
from .fiber import Fiber

NORM_CLAMP = 2**-24  # the smallest positive fp16 number


class Affine(nn.Module):
    """Gain and offset of every channel, in the order of degrees."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))


class NormSE3(nn.Module):
    """``features / |features| * relu(layer_norm(|features|))``, the norm over the channels of each degree.

    One set of parameters ``group_norm.{weight,bias}`` (all channels, in order of degrees) for any fiber. ``fused`` is
    True, False or None: None takes the kernel where it applies.
    """

    def __init__(self, fiber: Fiber, nonlinearity: nn.Module | None = None, eps: float = 1e-5):
        super().__init__()
        self.fiber, self.eps = fiber, eps
        self.nonlinearity = nn.ReLU() if nonlinearity is None else nonlinearity
        self.group_norm = Affine(sum(fiber.channels))
        self.fused: bool | None = None

    def convert_state_dict(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Bring this layer's entries of a reference layout into ours, in place."""
        convert.convert_norm(self.fiber.degrees, state_dict, prefix)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self.convert_state_dict(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, features: Mapping[str, Tensor], *args, **kwargs) -> dict[str, Tensor]:
        output = {}
        weights = self.group_norm.weight.split(self.fiber.channels)
        biases = self.group_norm.bias.split(self.fiber.channels)
        for degree, weight, bias in zip(self.fiber.degrees, weights, biases, strict=True):
            value = features[str(degree)]
            if self.fused is not False and isinstance(self.nonlinearity, nn.ReLU) and ops.kernels_apply(value):
                output[str(degree)] = ops.norm(value, weight, bias, self.eps, NORM_CLAMP)
            else:
                output[str(degree)] = self._normalize(value, weight, bias)
        return output

    def _normalize(self, value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # The gradient of a length at the zero vector is undefined; clamping the square first makes it zero.
        length = (
            value.float().square().sum(-1) if value.dtype in (torch.half, torch.bfloat16) else value.square().sum(-1)
        )
        length = length.clamp(min=NORM_CLAMP**2).sqrt()
        new = self.nonlinearity(
            F.layer_norm(length, weight.shape, weight.to(length.dtype), bias.to(length.dtype), self.eps)
        )
        return value * (new / length).to(value.dtype)[..., None]
