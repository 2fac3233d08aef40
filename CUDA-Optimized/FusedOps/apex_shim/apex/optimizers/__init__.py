"""Apex's optimizers. Their state is that of `fusedops.optim`, in torch's layout; they load Apex's own as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex.submodules import give_submodules
from fusedops import optim

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]


class _Apex:
    """What Apex's optimizers have in common beside their formulas."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As the constructor's ``set_grad_none`` says, unless told otherwise here."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **legacy: Any) -> Any:
        """``grad_scaler`` is used; the arguments of Apex's older form (grads, output_params, scale, grad_norms) are
        errors.
        """
        scaler = legacy.pop("grad_scaler", None)
        given = [name for name, value in legacy.items() if value is not None]
        if given:
            raise RuntimeError(
                f"{type(self).__name__} has been updated; {', '.join(given)} can no longer be given to step"
            )
        if scaler is not None:
            self.grad_scale, self.finds_inf = scaler._get_scale_async(), True
        try:
            return self.take_step(closure)
        finally:
            if scaler is not None:
                self.grad_scale, self.finds_inf = None, False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any("step" in group or isinstance(group.get("exp_avg_sq"), list) for group in state_dict["param_groups"]):
            state_dict = optim.from_apex_state_dict(state_dict, self)
        super().load_state_dict(state_dict)


class FusedAdam(_Apex, optim.Adam):
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction, decoupled_weight_decay=adam_w_mode,
            master_weights="fp32" if master_weights else "none",
        )  # fmt: skip
        self.set_grad_none, self.capturable, self.adam_w_mode = set_grad_none, capturable, int(adam_w_mode)


class FusedSGD(_Apex, optim.SGD):
    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum=wd_after_momentum)
        self.set_grad_none, self.materialize_master_grads = set_grad_none, materialize_master_grads


class FusedLAMB(_Apex, optim.LAMB):
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, False, adam_w_mode, grad_averaging, max_grad_norm,
            use_nvlamb,
        )  # fmt: skip
        self.set_grad_none = set_grad_none


class FusedMixedPrecisionLamb(_Apex, optim.LAMB):
    """With float32 masters; ``step`` is the number of steps already taken."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, False, adam_w_mode, grad_averaging, max_grad_norm,
            use_nvlamb, master_weights="fp32",
        )  # fmt: skip
        self.set_grad_none = True
        for group in self.param_groups if step else ():
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)


class FusedNovoGrad(_Apex, optim.NovoGrad):
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant.")
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, False, reg_inside_moment, grad_averaging, norm_type,
            init_zero,
        )  # fmt: skip
        self.set_grad_none = set_grad_none


class FusedAdagrad(_Apex, optim.Adagrad):
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps, decoupled_weight_decay=adagrad_w_mode)
        self.set_grad_none = set_grad_none


give_submodules(__name__)
