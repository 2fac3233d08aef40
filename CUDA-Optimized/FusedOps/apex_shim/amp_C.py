"""Apex's multi-tensor operations, for `apex.multi_tensor_apply`.

Each takes a chunk size, which is ignored here, the flag of an overflow (int32 [1], set to 1 and never cleared), and
lists of tensors. Dtypes may be mixed inside a list. RuntimeError for lists that do not match, as in Apex.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.ops.multi_tensor import multi_tensor_axpby as _axpby
from fusedops.ops.multi_tensor import multi_tensor_l2norm as _l2norm
from fusedops.ops.multi_tensor import multi_tensor_scale as _scale

__all__ = [
    "multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_l2norm_mp", "multi_tensor_l2norm_scale",
    "multi_tensor_scale", "multi_tensor_unscale_l2norm", "update_scale_hysteresis",
]  # fmt: skip

Lists = Sequence[Sequence[Tensor]]


def _errors_as_in_apex(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    return wrapper


def _raise_flag(noop_flag: Tensor, found: Tensor) -> None:
    noop_flag.copy_(torch.maximum(noop_flag, found.to(noop_flag.dtype).reshape(noop_flag.shape)))


@_errors_as_in_apex
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """lists[1] = lists[0] * scale."""
    _raise_flag(noop_flag, _scale(*tensor_lists, scale))


@_errors_as_in_apex
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """lists[2] = a * lists[0] + b * lists[1]; ``arg_to_check``: -1 both, 0 the first, 1 the second."""
    _raise_flag(noop_flag, _axpby(*tensor_lists, a, b, arg_to_check))


@_errors_as_in_apex
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """-> norm of all [1], norms of each [N] or [0]."""
    norm, norms = _l2norm(tensor_lists[0], bool(per_tensor))
    _raise_flag(noop_flag, ~torch.isfinite(norm))
    return norm, norms


multi_tensor_l2norm_mp = multi_tensor_l2norm


@_errors_as_in_apex
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Norms of lists[0] * inv_scale; the tensors stay as they are."""
    norm, norms = _l2norm(tensor_lists[0], bool(per_tensor), inv_scale)
    _raise_flag(noop_flag, ~torch.isfinite(norm))
    return norm, norms


@_errors_as_in_apex
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """lists[1] = lists[0] * scale; -> the norms of that."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)
    return _l2norm(tensor_lists[0], bool(per_tensor), scale)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Change scale and trackers in place, without waiting for the device; -> the scale.

    An overflow takes one from the hysteresis tracker: while that stays above 0 only the count of clean steps begins
    anew, then the scale is multiplied by ``backoff_factor``. A clean step restores the hysteresis; after
    ``growth_interval`` of them the scale is multiplied by ``growth_factor``, unless that is infinite.
    """
    overflow = found_inf.reshape(growth_tracker.shape) > 0
    left = torch.where(overflow, hysteresis_tracker - 1, hysteresis_tracker)
    back_off = overflow & (left <= 0)
    clean = growth_tracker + 1
    grow = ~overflow & (clean == growth_interval)
    grown = current_scale * growth_factor
    scale = torch.where(back_off, current_scale * backoff_factor, current_scale)
    current_scale.copy_(torch.where(grow & torch.isfinite(grown), grown, scale))
    growth_tracker.copy_(torch.where(overflow | grow, torch.zeros_like(clean), clean))
    hysteresis_tracker.copy_(torch.where(overflow, left, torch.full_like(left, hysteresis)))
    return current_scale
