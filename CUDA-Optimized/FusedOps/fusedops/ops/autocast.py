"""What `torch.autocast` means for the operators.

Matrix products (`dense`, `dense_gelu_dense`, `mlp`, `linear_accumulating`, `linear_cross_entropy`) run in the autocast
type, as torch's linear does. All others compute in float32 by themselves, so they take their inputs' types and keep
them, and nothing is cast; those of two equal tensors (`gated`, `index_mul_2d`, `transducer_joint`) take the wider type
where the two differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cast_for_product", "promoted", "without_autocast"]


def cast_for_product(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in the type of the autocast that is on for the first one's device; float64 stays, as in torch."""
    device = tensors[0].device.type
    if not _is_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def promoted(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast the two in the wider of their types; else as they are."""
    if first.dtype == second.dtype or not _is_on(first.device.type):
        return first, second
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which products run in the types that they are given."""
    return torch.autocast(device.type, enabled=False)


def _is_on(device_type: str) -> bool:
    return device_type in ("cuda", "cpu") and torch.is_autocast_enabled(device_type)
