"""Optimizers whose step is one launch per group and combination of dtypes, or two where the gradients' norm is
wanted.
"""

from __future__ import annotations

import importlib
from typing import Any

# The names of each module, which is imported when one of them is asked for.
_MODULES = {
    "adagrad": ("Adagrad",),
    "adam": ("Adam", "AdamW"),
    "apex_state": ("from_apex_state_dict",),
    "base": ("FusedOptimizer", "Options"),
    "lamb": ("LAMB",),
    "larc": ("LARC",),
    "novograd": ("NovoGrad",),
    "sgd": ("SGD",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
