"""Linear layers with what follows them: bias and activation in one kernel after the matrix product.

The products are torch's (cuBLASLt on a GPU, with the bias in its epilogue where no activation follows). With an
activation the product is kept without the bias, one kernel makes act(product + bias), and its derivative gives the
product's gradient and the bias's sums in one pass over the data, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import backend_for
from .activations import activate_plain, kind_of
from .registration import Operator

__all__ = ["bias_activation", "bias_activation_plain", "dense", "dense_gelu_dense", "mlp"]


def bias_activation(x: Tensor, bias: Tensor | None, activation: str = "gelu_tanh") -> Tensor:
    """activation(x + bias) of x (..., N) and bias (N,), in float32, rounded once. ValueError for another shape."""
    kind = kind_of(activation)
    if bias is not None and (x.dim() < 1 or bias.shape != x.shape[-1:]):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit an input {tuple(x.shape)}")
    if backend_for(x, bias, op="bias_activation") == "plain" or not x.numel() or x.dim() < 1:
        return bias_activation_plain(x, bias, kind)
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()
    return activation_forward(flat, bias, kind).view(x.shape)


def bias_activation_plain(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """The plain form."""
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.to(precise) if bias is None else x.to(precise) + bias.to(precise)
    return activate_plain(total, kind).to(x.dtype)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ weight.T + bias) of x (..., in) and weight (out, in)."""
    if activation == "none":
        return F.linear(x, weight, bias)
    return bias_activation(F.linear(x, weight), bias, activation)


def dense_gelu_dense(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str = "tanh"
) -> Tensor:
    """Two linear layers with a GELU between them."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate must be 'tanh' or 'none', got {approximate!r}")
    hidden = dense(x, weight1, bias1, "gelu_tanh" if approximate == "tanh" else "gelu")
    return F.linear(hidden, weight2, bias2)


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "relu") -> Tensor:
    """Linear layers, each followed by the activation, the last one, too. ValueError if the numbers differ."""
    if len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights, but {len(biases)} biases")
    for weight, bias in zip(weights, biases, strict=True):
        x = dense(x, weight, bias, activation)
    return x


def _launch(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    from . import feedforward_kernels

    y = x.new_empty(x.shape)
    feedforward_kernels.forward(x, None if bias is None else bias.contiguous(), y, kind)
    return y


def _fake(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    return x.new_empty(x.shape)


def _launch_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int, sums: bool) -> tuple[Tensor, Tensor]:
    from . import feedforward_kernels

    dx = x.new_empty(x.shape)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    shares = feedforward_kernels.backward(dy, x, None if bias is None else bias.contiguous(), dx, kind)
    return dx, shares.sum(0).to(bias.dtype) if sums else x.new_empty(0)


def _fake_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int, sums: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=bias.dtype) if sums else x.new_empty(0)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple:
    x, bias = ctx.saved_tensors
    sums = bias is not None and ctx.needs_input_grad[1]
    dx, dbias = activation_backward(dy, x, bias, ctx.kind, sums)
    return dx, dbias if sums else None, None


activation_backward = Operator("bias_activation_backward", _launch_backward, _fake_backward)
activation_forward = Operator("bias_activation", _launch, _fake).differentiable(_setup, _backward)
