"""Modules around the operators, with the parameter names of torch.nn where it has the module."""

from __future__ import annotations

import importlib
from typing import Any

# The classes of each file, which is imported when one of them is asked for.
_MODULES = {
    "feedforward": ("MLP", "DenseGeluDense"),
    "groupnorm": ("GroupNorm",),
    "norm": ("LayerNorm", "RMSNorm"),
    "sync_batchnorm": ("SyncBatchNorm", "convert_sync_batchnorm"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
