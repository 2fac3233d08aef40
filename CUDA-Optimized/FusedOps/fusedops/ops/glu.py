"""Gated linear units (Shazeer 2020, https://arxiv.org/abs/2002.05202): act(gate) * value, without the matrix products.

Arithmetic is float32, rounded once. The gate and the value are two tensors, or the halves of one (gate first), whose
gradient is then written as one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend_for
from .activations import activate_plain, kind_of
from .autocast import promoted
from .registration import Operator

__all__ = ["gated", "geglu", "glu_plain", "swiglu"]


def swiglu(gate: Tensor, value: Tensor | None = None) -> Tensor:
    """silu(gate) * value; with one argument (..., 2 N), its last dimension's first half is the gate."""
    return gated(gate, value, "silu")


def geglu(gate: Tensor, value: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * value; with one argument (..., 2 N), its first half is the gate. `approximate` "tanh" or "none"."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate must be 'tanh' or 'none', got {approximate!r}")
    return gated(gate, value, "gelu_tanh" if approximate == "tanh" else "gelu")


def gated(gate: Tensor, value: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * value by the activation's name; ValueError for shapes that differ or an odd last dimension."""
    kind = kind_of(activation)
    if value is None and (gate.dim() < 1 or gate.shape[-1] % 2):
        raise ValueError(f"one tensor for gate and value needs an even last dimension, not {tuple(gate.shape)}")
    if value is not None:
        gate, value = promoted(gate, value)
    if value is not None and (value.shape != gate.shape or value.dtype != gate.dtype):
        mine, its = f"{gate.dtype} {tuple(gate.shape)}", f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(f"gate and value must be alike, not {mine} and {its}")
    if backend_for(gate, value, op="gated") == "plain" or not gate.numel():
        return glu_plain(gate, value, kind)
    if value is None:
        width = gate.shape[-1]
        return packed_forward(_matrix(gate, width), kind).view(*gate.shape[:-1], width // 2)
    width = gate.shape[-1] if gate.dim() else 1
    return glu_forward(_matrix(gate, width), _matrix(value, width), kind).view(gate.shape)


def glu_plain(gate: Tensor, value: Tensor | None, kind: int) -> Tensor:
    """The plain form."""
    gate, value = gate.chunk(2, -1) if value is None else (gate, value)
    precise = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (activate_plain(gate.to(precise), kind) * value.to(precise)).to(gate.dtype)


def _matrix(x: Tensor, width: int) -> Tensor:
    flat = x.reshape(-1, width)
    return flat if width == 1 or flat.stride(1) == 1 else flat.contiguous()


def _launch(gate: Tensor, value: Tensor, kind: int) -> Tensor:
    from . import glu_kernels

    y = gate.new_empty(gate.shape)
    glu_kernels.forward(gate, value, y, kind)
    return y


def _launch_backward(dy: Tensor, gate: Tensor, value: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    from . import glu_kernels

    dgate, dvalue = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    glu_kernels.backward(_matrix(dy, dy.shape[1]), gate, value, dgate, dvalue, kind)
    return dgate, dvalue


def _launch_packed(x: Tensor, kind: int) -> Tensor:
    from . import glu_kernels

    half = x.shape[1] // 2
    y = x.new_empty((x.shape[0], half))
    glu_kernels.forward(x[:, :half], x[:, half:], y, kind)
    return y


def _launch_packed_backward(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    from . import glu_kernels

    half = x.shape[1] // 2
    dx = x.new_empty(x.shape)
    glu_kernels.backward(_matrix(dy, half), x[:, :half], x[:, half:], dx[:, :half], dx[:, half:], kind)
    return dx


def _fake(gate: Tensor, value: Tensor, kind: int) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_backward(dy: Tensor, gate: Tensor, value: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _fake_packed(x: Tensor, kind: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _fake_packed_backward(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple:
    return *glu_backward(dy, *ctx.saved_tensors, ctx.kind), None


def _backward_packed(ctx: Any, dy: Tensor) -> tuple:
    return packed_backward(dy, *ctx.saved_tensors, ctx.kind), None


glu_backward = Operator("glu_backward", _launch_backward, _fake_backward)
glu_forward = Operator("glu", _launch, _fake).differentiable(_setup, _backward)
packed_backward = Operator("glu_packed_backward", _launch_packed_backward, _fake_packed_backward)
packed_forward = Operator("glu_packed", _launch_packed, _fake_packed).differentiable(_setup, _backward_packed)
