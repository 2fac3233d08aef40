"""Optimizers whose state is divided among processes."""

from __future__ import annotations

from typing import Any

__all__ = ["ZeroAdamW"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fusedops.distributed import zero

        return getattr(zero, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
