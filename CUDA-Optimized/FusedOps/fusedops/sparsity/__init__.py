"""2:4 structured sparsity: masks, permutations that keep more of the weights, training with masks, and torch's sparse
product.

The API of ``apex.contrib.sparsity`` (`ASP`), plus what Apex leaves out: `to_sparse_semi_structured`, which gives the
speed.
"""

from __future__ import annotations

import importlib
from typing import Any

# The names of each module, which is imported when one of them is asked for.
_MODULES = {
    "asp": ("ASP",),
    "masks": ("PATTERNS", "create_mask", "is_2to4"),
    "network": ("permute_model",),
    "permutation": ("kept_magnitude", "search_for_good_permutation"),
    "semi_structured": ("to_sparse_semi_structured",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
