"""Mixed precision for scripts written for ``apex.amp``, as a thin layer over `torch.amp`; and a GradScaler for fused
optimizers.

New code needs only `torch.autocast` and a GradScaler; docs/amp.md shows what each line of an old script becomes.
"""

from __future__ import annotations

import importlib
from typing import Any

# The names of each module, which is imported when one of them is asked for.
_MODULES = {
    "functions": (
        "disable_casts", "float_function", "half_function", "promote_function", "register_float_function",
        "register_half_function", "register_promote_function",
    ),
    "grad_scaler": ("GradScaler",),
    "loss_scaler": ("LossScaler",),
    "opt_levels": ("OPT_LEVELS", "Properties"),
    "scaling": ("scale_loss",),
    "setup": ("initialize", "load_state_dict", "master_params", "state_dict"),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
