"""The activations that fused operators know, by name: their numbers in the kernels and their plain forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KINDS", "activate_plain", "kind_of"]

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "sigmoid": 4, "none": 5}


def kind_of(name: str) -> int:
    """The number of an activation. ValueError for a name that is not one."""
    if name not in KINDS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(KINDS)}")
    return KINDS[name]


def activate_plain(x: Tensor, kind: int) -> Tensor:
    """The activation of a float32 or float64 tensor."""
    name = next(name for name, number in KINDS.items() if number == kind)
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    functions = {"silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid, "none": lambda x: x}
    return functions[name](x)
