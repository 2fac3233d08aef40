"""The levels O0 to O3 and what can be chosen beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["OPT_LEVELS", "Properties", "properties_for"]


@dataclass(frozen=True)
class Properties:
    """What `initialize` does with models and optimizers.

    cast_model_type        dtype that the model is cast to; None: it is left
    patch_torch_functions  run the model under autocast
    keep_batchnorm_fp32    leave batch norms in float32 in a model that is cast
    master_weights         the optimizer works on float32 copies of 16-bit parameters
    loss_scale             a number or "dynamic"
    """

    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str


OPT_LEVELS = {
    "O0": Properties("O0", torch.float32, False, None, False, 1.0),
    "O1": Properties("O1", None, True, None, None, "dynamic"),
    "O2": Properties("O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties("O3", torch.float16, False, False, False, 1.0),
}


def properties_for(
    opt_level: str,
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
) -> Properties:
    """The properties of a level with what is given (not None) in place of its own. RuntimeError where that
    contradicts.
    """
    if opt_level not in OPT_LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3'. "
            "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    changes: dict[str, Any] = {}
    if cast_model_type is not None:
        if opt_level == "O1" and cast_model_type not in (False, torch.float32):
            raise RuntimeError(f"O1 inserts casts around functions, not the model: cast_model_type={cast_model_type}")
        changes["cast_model_type"] = None if cast_model_type is False else cast_model_type
    if patch_torch_functions is not None:
        if patch_torch_functions and opt_level != "O1":
            raise RuntimeError(f"patch_torch_functions=True is for opt_level='O1', not {opt_level!r}")
        changes["patch_torch_functions"] = bool(patch_torch_functions)
    if keep_batchnorm_fp32 is not None:
        if opt_level == "O1":
            raise RuntimeError(
                "keep_batchnorm_fp32 has no meaning with O1, where batch norms stay float32 by themselves"
            )
        changes["keep_batchnorm_fp32"] = _flag("keep_batchnorm_fp32", keep_batchnorm_fp32)
    if master_weights is not None:
        if opt_level == "O1":
            raise RuntimeError("master_weights has no meaning with O1, where the model stays float32")
        changes["master_weights"] = bool(master_weights)
    if loss_scale is not None:
        changes["loss_scale"] = loss_scale if loss_scale == "dynamic" else float(loss_scale)
    return replace(OPT_LEVELS[opt_level], **changes)


def _flag(name: str, value: bool | str) -> bool:
    if value in (True, False):
        return bool(value)
    if value in ("True", "False"):
        return value == "True"
    raise RuntimeError(f"{name} must be a boolean, the string 'True' or 'False', or None, not {value!r}")
