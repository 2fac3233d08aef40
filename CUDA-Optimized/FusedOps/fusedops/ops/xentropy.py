"""Softmax cross entropy with class indices as targets, in one pass over the logits; and a linear layer in front of it
whose logits are never all in memory.

For a row x with target t, smoothing s (Szegedy et al. 2016) and z-loss weight z (Chowdhery et al. 2022, section 5):

    loss = lse(x) - (1 - s) x_t - s mean(x) + z lse(x)^2

Arithmetic and results are float32 whatever the logits' type. `softcap` c replaces x by c tanh(x / c) first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import backend_for
from .ranges import check_range
from .registration import Operator, is_direct, once

__all__ = ["cross_entropy", "cross_entropy_plain"]

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace: bool = False,
) -> Tensor:
    """Cross entropy of logits (..., classes) against class indices (...) in float32: a scalar, or (...) for "none".

    Rows whose target is `ignore_index` count for nothing; "mean" divides by the number of the others. With `inplace`
    the gradient overwrites the logits during the forward pass, which saves a read and the memory of a copy: the logits
    must not be used afterwards (autograd refuses where what made them needs them), and backward can run once. It has no
    effect without a gradient, on leaves, and under torch.compile.
    A target outside the classes gives NaN, or, in the plain form on a CPU, a ValueError, as do shapes and options that
    make no sense.
    """
    _check(logits, target, reduction, label_smoothing, softcap)
    backend = backend_for(logits, op="cross_entropy")
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    flat = logits.reshape(-1, logits.shape[-1])
    targets = target.reshape(-1)
    if backend == "plain":
        losses = cross_entropy_plain(flat, targets, *options)
    elif inplace and _can_overwrite(logits):
        result = _InPlace.apply(flat, targets, reduction, *options)
        return result.view(target.shape) if reduction == "none" else result
    else:
        flat = flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()
        losses, _ = loss_forward(flat, targets.contiguous(), *options)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


def _can_overwrite(logits: Tensor) -> bool:
    wanted = logits.requires_grad and torch.is_grad_enabled() and not logits.is_leaf  # a leaf is a weight or an input
    return wanted and is_direct(logits) and logits.is_contiguous()


def cross_entropy_plain(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float, softcap: float
) -> Tensor:
    """The plain form: losses (rows,) of logits (rows, classes)."""
    ignored = target == ignore_index
    target = torch.where(ignored, 0, target).long()
    check_range("target", target, 0, logits.shape[1] - 1)
    known = (target >= 0) & (target < logits.shape[1])
    x = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    losses = F.cross_entropy(x, torch.where(known, target, 0), label_smoothing=smoothing, reduction="none")
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(x, 1).square()
    return torch.where(ignored, 0.0, torch.where(known, losses, float("nan")))


def _check(logits: Tensor, target: Tensor, reduction: str, smoothing: float, softcap: float | None) -> None:
    if logits.dim() < 1 or logits.shape[:-1] != target.shape or not logits.shape[-1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} need targets {tuple(logits.shape[:-1])}, not {(*target.shape,)}"
        )
    if not logits.is_floating_point() or target.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"logits must be floating-point and targets int64 or int32, not {logits.dtype}, {target.dtype}"
        )
    check_options(reduction, smoothing, softcap)


def check_options(reduction: str, smoothing: float, softcap: float | None, allowed: tuple = REDUCTIONS) -> None:
    """ValueError for an option out of its range."""
    if reduction not in allowed:
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(allowed)}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing must be within 0 and 1, got {smoothing}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0 or None, got {softcap}")


def _rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))


def _launch_forward(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    from . import xentropy_kernels

    losses, lse = _rows(logits)
    if logits.shape[0]:
        options = (ignore_index, smoothing, z_loss, softcap)
        xentropy_kernels.loss(logits, target, losses, lse, None, None, *options)
    return losses, lse


def _fake_forward(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    return _rows(logits)


def _launch_backward(
    upstream: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    from . import xentropy_kernels

    out = logits.new_empty(logits.shape)
    if logits.shape[0]:
        options = (ignore_index, smoothing, z_loss, softcap)
        xentropy_kernels.gradient(upstream, logits, target, lse, out, *options)
    return out


def _fake_backward(
    upstream: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, smoothing: float, z_loss: float,
    softcap: float,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple:
    nothing = (None,) * 5
    if upstream is None:
        return None, *nothing
    return loss_backward(upstream, *ctx.saved_tensors, *ctx.options), *nothing


class _InPlace(torch.autograd.Function):
    """Loss and gradient in one kernel; the gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str, ignore_index: int, *options: float) -> Tensor:
        from . import xentropy_kernels

        losses, lse = _rows(logits)
        storage = logits.detach()
        count = (target != ignore_index).sum() if reduction == "mean" else None
        if logits.shape[0]:
            arguments = (storage, target.contiguous(), losses, lse, storage, count, ignore_index)
            xentropy_kernels.loss(*arguments, *options)
        torch.autograd.graph.increment_version(logits)  # so that an operator that saved the logits notices
        ctx.gradient = storage
        # The sum over no rows that count is 0 / 0, as torch has it.
        return losses if reduction == "none" else losses.sum() / (count != 0) if count is not None else losses.sum()

    @staticmethod
    @functools.partial(once, "cross_entropy")
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        from . import xentropy_kernels

        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("cross_entropy(inplace=True): the gradient was used up by an earlier backward pass")
        if gradient.numel():
            xentropy_kernels.scale_(gradient, upstream)
        return gradient, *(None,) * 6


loss_backward = Operator("cross_entropy_backward", _launch_backward, _fake_backward)
loss_forward = Operator("cross_entropy", _launch_forward, _fake_forward).differentiable(_setup, _backward)
