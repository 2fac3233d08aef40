"""Apex's flattening of lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """-> one tensor [sum of the numbers of elements] of their values, one after the other. They are of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """-> views of ``flat`` in the shapes of ``tensors``."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
