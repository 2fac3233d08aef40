"""Group norm (Wu & He 2018, https://arxiv.org/abs/1803.08494) with an activation after it, for channels-last tensors.

Statistics and arithmetic are float32 whatever the types of input and weights. The kernels want the channels last in
memory (torch.channels_last for pictures); an input in another order takes the plain form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend_for
from .activations import activate_plain, kind_of
from .registration import Operator

__all__ = ["group_norm", "group_norm_plain"]


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "none",
) -> Tensor:
    """activation(group_norm(x)) of x (N, C, ...), any number of channels in `num_groups` groups of one size; weight and
    bias (C,). `activation` is "none", "silu" or another of `activations.KINDS`. The output has x's type and order in
    memory. ValueError for groups or weights that do not fit.
    """
    kind = kind_of(activation)
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups or not x.shape[1]:
        raise ValueError(f"{num_groups} groups do not divide the channels of an input {tuple(x.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[1:2]:
            raise ValueError(f"{name} must be ({x.shape[1]},), not {tuple(tensor.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"the input must be of a floating-point type, not {x.dtype}")
    last = x.movedim(1, -1)
    plain = backend_for(x, weight, bias, op="group_norm") == "plain"
    if plain or not x.numel() or not last.is_contiguous():
        return group_norm_plain(x, num_groups, weight, bias, eps, kind)
    flat = last.view(x.shape[0], -1, x.shape[1])
    y, _, _ = group_norm_forward(flat, weight, bias, num_groups, float(eps), kind)
    return y.view(last.shape).movedim(-1, 1)


def group_norm_plain(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int
) -> Tensor:
    """The plain form."""
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias = (None if t is None else t.to(precise) for t in (weight, bias))
    if not x.numel():
        return activate_plain(x * 1, kind)
    y = activate_plain(torch.group_norm(x.to(precise), num_groups, weight, bias, eps), kind).to(x.dtype)
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)  # CUDA's forgets the order of volumes


def _outputs(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, kind: int
) -> tuple[Tensor, Tensor, Tensor]:
    from . import group_norm_kernels

    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    y, mean, rstd = _outputs(x, groups)
    group_norm_kernels.forward(x, weight, bias, groups, eps, kind, y, mean, rstd)
    return y, mean, rstd


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, kind: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, groups)


def _launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, kind: int
) -> tuple[Tensor, Tensor]:
    from . import group_norm_kernels

    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    dx, sums = x.new_empty(x.shape), x.new_empty((x.shape[0], 2, x.shape[2]), dtype=torch.float32)
    group_norm_kernels.backward(dy.contiguous(), x, weight, bias, mean, rstd, mean.shape[1], kind, dx, sums)
    return dx, sums


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, kind: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.shape[0], 2, x.shape[2]), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, bias, _, _, ctx.kind = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple:
    if dy is None:
        return (None,) * 6
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dx, sums = group_norm_backward(dy, x, weight, bias, mean, rstd, ctx.kind)
    total = sums.sum(0) if any(ctx.needs_input_grad[1:3]) else None
    dweight = total[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
    dbias = total[0].to(bias.dtype) if ctx.needs_input_grad[2] else None
    return dx, dweight, dbias, None, None, None


group_norm_backward = Operator("group_norm_backward", _launch_backward, _fake_backward)
group_norm_forward = Operator("group_norm", _launch, _fake).differentiable(_setup, _backward)
