"""Sigmoid focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002) of anchors with class indices as targets.

For an element with logit x, p = sigmoid(x), p_t = p where it is the target's class and 1 - p elsewhere, alpha_t
likewise, and the smoothed label y = (1 - s) [target's class] + s / 2:

    loss = alpha_t (1 - p_t)^gamma (-y log p - (1 - y) log(1 - p))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import backend_for
from .ranges import check_range
from .registration import Operator

__all__ = ["focal_loss", "focal_loss_plain"]


def focal_loss(
    logits: Tensor,
    target: Tensor,
    num_positives: Tensor | float = 1.0,
    *,
    num_classes: int | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sum over all elements of logits (..., C), divided by `num_positives` (a number, or one element on the
    device), as a float32 scalar. Targets (...), integers: a class, -1 for background, -2 for anchors that do not count.
    Columns from `num_classes` on are padding. The gradient goes to the logits only. ValueError for shapes that differ,
    and in the plain form on a CPU for a target that is none of these; else such a one counts as background.
    """
    classes = logits.shape[-1] if num_classes is None else num_classes
    if logits.dim() < 1 or logits.shape[:-1] != target.shape or not 0 < classes <= logits.shape[-1]:
        shapes = f"logits {tuple(logits.shape)}, target {tuple(target.shape)}, num_classes {classes}"
        raise ValueError(f"need logits (..., C), target (...) and 1 to C classes, not {shapes}")
    if target.is_floating_point() or not logits.is_floating_point() or not 0 <= label_smoothing <= 1 or gamma < 0:
        raise ValueError(f"bad types or values: {logits.dtype}, {target.dtype}, {label_smoothing=}, {gamma=}")
    flat, targets = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    options = (classes, float(alpha), float(gamma), float(label_smoothing))
    if backend_for(logits, op="focal_loss") == "plain" or not logits.numel():
        check_range("target", targets, -2, classes - 1)
        total = focal_loss_plain(flat, targets, *options)
    else:
        flat = flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()
        total = focal_forward(flat, targets.contiguous(), *options)
    return (
        total / num_positives if not isinstance(num_positives, Tensor) else total / num_positives.detach().reshape(())
    )


def focal_loss_plain(
    logits: Tensor, target: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    """The plain form: the sum of all losses."""
    x = logits[:, :classes]
    x = x if x.dtype == torch.float64 else x.float()
    positive = torch.arange(classes, device=x.device)[None] == target[:, None]
    label = positive * (1 - smoothing) + smoothing / 2
    cross = F.binary_cross_entropy_with_logits(x, label.to(x.dtype), reduction="none")
    log_miss = torch.where(positive, F.logsigmoid(-x), F.logsigmoid(x))
    losses = torch.where(positive, alpha, 1 - alpha) * torch.exp(gamma * log_miss) * cross
    return torch.where((target != -2)[:, None], losses, 0.0).sum()


def _launch(logits: Tensor, target: Tensor, classes: int, alpha: float, gamma: float, smoothing: float) -> Tensor:
    from . import focal_kernels

    return focal_kernels.loss(logits, target, classes, alpha, gamma, smoothing).sum()


def _fake(logits: Tensor, target: Tensor, classes: int, alpha: float, gamma: float, smoothing: float) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _launch_backward(
    factor: Tensor, logits: Tensor, target: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    from . import focal_kernels

    dx = logits.new_empty(logits.shape)
    focal_kernels.gradient(factor, logits, target, dx, classes, alpha, gamma, smoothing)
    return dx


def _fake_backward(
    factor: Tensor, logits: Tensor, target: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target)


def _backward(ctx: Any, factor: Tensor) -> tuple:
    return focal_backward(factor, *ctx.saved_tensors, *ctx.options), *(None,) * 5


focal_backward = Operator("focal_loss_backward", _launch_backward, _fake_backward)
focal_forward = Operator("focal_loss", _launch, _fake).differentiable(_setup, _backward)
