"""Linear maps between fibers: they mix channels of one degree, never components."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fiber import Fiber


def mix_channels(features: Tensor, weight: Tensor) -> Tensor:
    """(rows, channels in, 2 d + 1) by a matrix (channels out, channels in)."""
    # The components as rows of one large product, instead of one small product per row.
    return F.linear(features.mT, weight).mT


class LinearSE3(nn.Module):
    """One matrix per degree that both fibers have: (rows, channels in, 2 d + 1) -> (rows, channels out, 2 d + 1)."""

    def __init__(self, fiber_in: Fiber, fiber_out: Fiber):
        super().__init__()
        self.fiber_in, self.fiber_out = fiber_in, fiber_out
        self.weights = nn.ParameterDict(
            {
                str(degree): nn.Parameter(torch.randn(channels, fiber_in[degree]) / fiber_in[degree] ** 0.5)
                for degree, channels in fiber_out
                if degree in fiber_in
            }
        )

    def forward(self, features: Mapping[str, Tensor], *args, **kwargs) -> dict[str, Tensor]:
        return {degree: mix_channels(features[degree], weight) for degree, weight in self.weights.items()}
