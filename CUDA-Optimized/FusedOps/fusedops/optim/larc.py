"""LARC (You, Gitman and Ginsburg, 2017): a learning rate for each tensor, around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedops.dispatch import backend_for, device_guard
from fusedops.ops.multi_tensor import by_dtypes, multi_tensor_l2norm
from fusedops.ops.multi_tensor_table import TensorTable, is_dense, same_layout

__all__ = ["LARC"]


class LARC(Optimizer):
    """Scale each gradient before the step of ``optimizer`` so that its tensor moves in proportion to its weights' norm.

    local = trust_coefficient ||p|| / (||g|| + weight_decay ||p|| + eps); with ``clip`` it becomes min(local / lr, 1),
    so that the optimizer's rate is an upper limit; g = (g + weight_decay p) local. The decay is done here, and the
    inner optimizer sees none. Tensors whose weights or gradients are all zero are left alone. What is not defined
    here is the inner optimizer's: state, groups, zero_grad, checkpoints.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps
        self._tables: dict[tuple[Any, ...], TensorTable] = {}

    # It scales gradients before the inner optimizer sees them, so a gradient scaler must unscale them before that, and
    # leave the step out where one is infinite.
    _step_supports_amp_scaling = False
    finds_inf_itself = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet, while an object is being copied
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, then take the inner optimizer's step; -> what that gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = []
        for number, group in enumerate(self.optim.param_groups):
            decays.append(group.get("weight_decay", 0.0))
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for (device, _, _), chosen in _sorted_out(parameters).items():
                self._scale(number, group, device, chosen)
            group["weight_decay"] = 0.0
        try:
            result = self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return result if loss is None else loss

    def _scale(self, number: int, group: dict[str, Any], device: torch.device, parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        _, weight_norms = multi_tensor_l2norm(parameters, True, table="LARC weights")
        _, gradient_norms = multi_tensor_l2norm(gradients, True, table="LARC gradients")
        decay = float(group.get("weight_decay", 0.0))
        fits = all(is_dense(p) and same_layout(p, g) for p, g in zip(parameters, gradients, strict=True))
        if not fits or backend_for(parameters[0], gradients[0], op="LARC") != "triton":
            self._scale_plain(group["lr"], decay, parameters, weight_norms, gradient_norms)
            return
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import layerwise_kernels as kernels

        lr = group["lr"]
        loaded = isinstance(lr, Tensor) and lr.device == device
        dtypes = gradients[0].dtype, parameters[0].dtype
        table = self._tables.setdefault((number, device, *dtypes), TensorTable()).bind([gradients, parameters])
        with device_guard(parameters[0]):
            kernels.larc_kernel[(table.programs,)](
                table.addresses, table.items, table.num_items, table.num_tensors, gradient_norms, weight_norms,
                lr if loaded else float(lr), decay, float(self.trust_coefficient), float(self.eps),
                G=TYPES[dtypes[0]], P=TYPES[dtypes[1]], LR_LOADED=loaded, CLIP=bool(self.clip), SIZE=kernels.BLOCK,
                num_warps=kernels.NUM_WARPS,
            )  # fmt: skip

    def _scale_plain(
        self, lr: float | Tensor, decay: float, parameters: list[Tensor], weight_norms: Tensor, gradient_norms: Tensor
    ) -> None:
        for parameter, weight_norm, gradient_norm in zip(parameters, weight_norms, gradient_norms, strict=True):
            g, p = parameter.grad.to(weight_norm.dtype), parameter.to(weight_norm.dtype)
            local = self.trust_coefficient * weight_norm / (gradient_norm + weight_norm * decay + self.eps)
            if self.clip:
                local = torch.clamp(local / lr, max=1.0)
            moved = (weight_norm != 0) & (gradient_norm != 0)
            parameter.grad.copy_(torch.where(moved, (g + decay * p) * local, g))


def _sorted_out(parameters: list[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
    """Parameters by device and dtypes of gradient and parameter."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for dtypes, indexes in by_dtypes([parameter.grad for parameter in parameters], parameters).items():
        for index in indexes:
            groups.setdefault((parameters[index].device, *dtypes), []).append(parameters[index])
    return groups
