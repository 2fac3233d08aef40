from __future__ import annotations

import torch

from apex.submodules import give_submodules
from fusedops import nn

__all__ = ["GroupNorm"]

ACTIVATIONS = {None: "none", "": "none", "silu": "silu", "swish": "silu"}


class GroupNorm(nn.GroupNorm):
    """``act``: None, "", "silu" or "swish". Any channels, groups, dtypes and memory orders."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> None:
        name = act.lower() if act else act
        if name not in ACTIVATIONS:
            raise ValueError(f"act is None, '', 'silu' or 'swish', not {act!r}")
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, activation=ACTIVATIONS[name])
        self.act = name or ""


give_submodules(__name__)
