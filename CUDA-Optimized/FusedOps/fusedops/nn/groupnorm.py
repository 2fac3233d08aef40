"""GroupNorm as torch.nn has it, with an activation after it; weights load both ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.activations import kind_of
from ..ops.groupnorm import group_norm

__all__ = ["GroupNorm"]


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm with `activation` ("none", "silu", ...); fast for channels-last inputs."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "none",
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        kind_of(activation)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
