"""Triton device functions: activations and their derivatives, in float32. The numbers are those of `activations`."""

from __future__ import annotations

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
RELU = tl.constexpr(3)
SIGMOID = tl.constexpr(4)
NONE = tl.constexpr(5)


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == SILU:
        y = x * tl.sigmoid(x)
    elif KIND == GELU_TANH:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # x (1 + tanh(u)) / 2 = x sigmoid(2 u)
    elif KIND == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == RELU:
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays
    elif KIND == SIGMOID:
        y = tl.sigmoid(x)
    else:
        y = x
    return y


@triton.jit
def activate_and_derive(x, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == SILU:
        gate = tl.sigmoid(x)
        y = x * gate
        slope = gate * (1.0 + x * (1.0 - gate))
    elif KIND == GELU_TANH:
        gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = x * gate
        slope = gate + y * (1.0 - gate) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    elif KIND == GELU:
        gate = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * gate
        slope = gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == RELU:
        y = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == SIGMOID:
        y = tl.sigmoid(x)
        slope = y * (1.0 - y)
    else:
        y = x
        slope = x * 0.0 + 1.0
    return y, slope
