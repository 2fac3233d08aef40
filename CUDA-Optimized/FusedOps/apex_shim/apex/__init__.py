"""The names of NVIDIA Apex on `fusedops`, with Apex's signatures, for code that imports ``apex``.

This is not Apex: see docs/apex.md for what is mapped, what is left out, and where behaviour differs on purpose.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from . import normalization, optimizers

__version__ = "0.1+fusedops"
__all__ = ["amp", "contrib", "fused_dense", "mlp", "multi_tensor_apply", "normalization", "optimizers", "parallel"]


def __getattr__(name: str) -> ModuleType:
    """``import apex; apex.parallel...``, as old scripts write it."""
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'apex' has no attribute {name!r}; docs/apex.md of fusedops lists what the shim maps")
