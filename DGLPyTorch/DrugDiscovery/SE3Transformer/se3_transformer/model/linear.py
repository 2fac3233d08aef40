"""Linear maps between fibers: they mix channels of one degree, never components."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fiber import Fiber


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
        # The components as rows: one large product per degree instead of one small one per node.
        return {degree: F.linear(features[degree].mT, weight).mT for degree, weight in self.weights.items()}
