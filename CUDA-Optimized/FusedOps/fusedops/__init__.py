"""Fused operators and optimizers for PyTorch, written in Triton, each with a plain form that runs anywhere.

    import fusedops

    y = fusedops.ops.rms_norm(x, weight)            # functions, one module each in fusedops.ops
    norm = fusedops.nn.LayerNorm(4096)              # modules with torch's names of parameters
    optimizer = fusedops.optim.AdamW(parameters)    # optimizers with torch's layout of state

    with fusedops.use("plain"):                     # the plain forms, to compare
        y = fusedops.ops.rms_norm(x, weight)

Importing this package imports neither torch nor triton and needs no GPU; what is used is imported then.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["amp", "backend_for", "distributed", "nn", "ops", "optim", "sparsity", "use"]

_FUNCTIONS = ("backend_for", "use")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(".dispatch", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
