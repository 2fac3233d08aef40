from apex.submodules import give_submodules
from fusedops.amp import (
    disable_casts,
    float_function,
    half_function,
    initialize,
    load_state_dict,
    master_params,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    state_dict,
)

__all__ = [
    "disable_casts", "float_function", "half_function", "initialize", "load_state_dict", "master_params",
    "promote_function", "register_float_function", "register_half_function", "register_promote_function", "scale_loss",
    "state_dict",
]  # fmt: skip

give_submodules(__name__)
