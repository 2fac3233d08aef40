"""Indices and lengths in tensors: looked at where that is free, and harmless where they are out of range.

On a CPU the plain forms check them (ValueError with the value and its place). On a GPU a look would wait for the
device, so kernels and plain forms read nothing outside of their tensors, and give NaN for what cannot be known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registration import is_direct

__all__ = ["can_look", "check_range"]


def can_look(*tensors: Tensor | None) -> bool:
    """Whether the values can be read at once: of plain CPU tensors outside of torch.compile and torch.func."""
    given = [tensor for tensor in tensors if tensor is not None]
    at_once = is_direct(*given) and all(tensor.device.type == "cpu" for tensor in given)
    return at_once and not torch._C._are_functorch_transforms_active()


def check_range(name: str, values: Tensor, low: int, high: int) -> None:
    """ValueError for the first of ``values`` (integers) that is not in [low, high], where `can_look`."""
    if not can_look(values):
        return
    outside = (values < low) | (values > high)
    if outside.any():
        place = outside.nonzero()[0].tolist()
        raise ValueError(f"{name}{place or ''} is {values[tuple(place)].item()}, not within {low} and {high}")
