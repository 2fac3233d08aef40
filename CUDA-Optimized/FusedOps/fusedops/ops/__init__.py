"""Operators as functions. Each module holds one family: its plain form, its kernels' launchers, its derivative."""

from __future__ import annotations

import importlib
from typing import Any

# The functions of each module, which is imported when one of them is asked for. No module has a function's name.
_MODULES = {
    "feedforward": ("bias_activation", "dense", "dense_gelu_dense", "mlp"),
    "focal": ("focal_loss",),
    "glu": ("gated", "geglu", "swiglu"),
    "groupnorm": ("group_norm",),
    "indexing": ("index_mul_2d",),
    "linear_xentropy": ("linear_cross_entropy",),
    "masked_softmax": ("scaled_softmax",),
    "multi_tensor": (
        "clip_grad_norm_", "multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_unscale_",
    ),
    "norm": ("add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"),
    "rotary": ("rope", "rope_2d", "rotary_table"),
    "transducer": ("transducer_joint", "transducer_loss"),
    "weight_gradient": ("accumulate_weight_gradient", "linear_accumulating"),
    "xentropy": ("cross_entropy",),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
