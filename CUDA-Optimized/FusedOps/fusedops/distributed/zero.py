"""AdamW whose gradients and state are divided among processes (ZeRO stage 2; Rajbhandari et al., 2020).

Parameters of a group and dtype become views of one flat tensor, cut into as many equal shards as there are processes.
A step reduces and scatters the flat gradients (each process gets the sum of its own shard), updates the own shard
with `fusedops.optim` in one launch, and gathers the shards of all. So a process keeps 1 / world size of moments and
masters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fusedops.ops.multi_tensor import multi_tensor_l2norm
from fusedops.optim import rounding
from fusedops.optim.adam import AdamW
from fusedops.optim.base import check_betas, check_hyperparameters

__all__ = ["ZeroAdamW"]

ALIGNMENT = 64  # elements to which a shard's length is rounded up: every shard starts at a multiple of 128 bytes
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Flat:
    """Parameters of one group and dtype in one tensor. ``places``: first element of each."""

    parameters: list[Tensor]
    places: list[int]
    weights: Tensor
    gradients: Tensor
    shard: torch.nn.Parameter
    received: Tensor

    def view(self, whole: Tensor, index: int) -> Tensor:
        """The part of a flat tensor that belongs to a parameter, in its shape."""
        parameter = self.parameters[index]
        return whole[self.places[index] : self.places[index] + parameter.numel()].view(parameter.shape)


class ZeroAdamW(Optimizer):
    """`fusedops.optim.AdamW` over the processes of ``process_group`` (None: all).

    Every process gives the same parameters in the same order; those of the first process are sent to the others.
    Gradients are averaged over the processes (summed with ``average_gradients=False``), so the model needs no
    DistributedDataParallel around it. They are kept as views of the flat tensor, in ``gradient_dtype`` where that is
    given and else in the parameters' dtype; use `zero_grad` of this class. All parameters take part in each step: one
    without a gradient has a gradient of zero. ``options`` are the keyword arguments of `fusedops.optim.Options`; the
    norm that ``max_grad_norm`` limits is the global one.

    `state_dict` and `load_state_dict` are collective. The state is that of an unsharded AdamW in torch's layout, the
    same on every process, on the CPU: it can be loaded by any number of processes, or by `fusedops.optim.AdamW`.
    """

    _step_supports_amp_scaling = True
    finds_inf_itself = True  # for fusedops.amp.GradScaler

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        process_group: dist.ProcessGroup | None = None,
        average_gradients: bool = True,
        gradient_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False, "maximize": False,
            "bias_correction": True, "decoupled_weight_decay": True,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.average_gradients = average_gradients
        self.gradient_dtype = gradient_dtype
        self._flats = [self._flatten(group) for group in self.param_groups]
        groups = [{"params": [flat.shard for flat in flats]} for flats in self._flats]
        self.inner = AdamW(groups, **{**options, "zero_grads": False})

    # -- layout

    def _flatten(self, group: dict[str, Any]) -> list[Flat]:
        by_traits: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"ZeroAdamW needs real floating parameters, not {parameter.dtype}")
            by_traits.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return [self._flat(chosen, device, dtype) for (device, dtype), chosen in by_traits.items()]

    @torch.no_grad()
    def _flat(self, parameters: list[Tensor], device: torch.device, dtype: torch.dtype) -> Flat:
        places, total = [], 0
        for parameter in parameters:
            places.append(total)
            total += -(-parameter.numel() // 16) * 16
        length = -(-total // (self.world_size * ALIGNMENT)) * ALIGNMENT
        weights = torch.zeros(length * self.world_size, dtype=dtype, device=device)
        gradients = torch.zeros_like(weights, dtype=self.gradient_dtype or dtype)
        shard = torch.nn.Parameter(weights[self.rank * length : (self.rank + 1) * length])
        received = torch.zeros(length, dtype=gradients.dtype, device=device)
        flat = Flat(parameters, places, weights, gradients, shard, received)
        for index, parameter in enumerate(parameters):
            flat.view(weights, index).copy_(parameter)
            parameter.data = flat.view(weights, index)
            if gradients.dtype != dtype:
                parameter.grad_dtype = gradients.dtype
            parameter.grad = flat.view(gradients, index)
        if gradients.dtype != dtype:
            shard.grad_dtype = gradients.dtype
        first = 0 if self.process_group is None else dist.get_global_rank(self.process_group, 0)
        dist.broadcast(weights, first, group=self.process_group)
        return flat

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            raise ValueError("ZeroAdamW divides its parameters once and takes no further groups")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to zero; they stay views of the flat tensors whatever ``set_to_none`` says."""
        for flats in self._flats:
            for flat in flats:
                flat.gradients.zero_()
                for index, parameter in enumerate(flat.parameters):
                    parameter.grad = flat.view(flat.gradients, index)

    # -- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step by all processes together; -> what ``closure`` gave, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self.inner
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
        flats = [flat for flats in self._flats for flat in flats]
        for flat in flats:
            self._reduce(flat)
        self._steer(flats)
        inner.take_step()  # not step, around which global hooks would run a second time
        for flat in flats:
            dist.all_gather_into_tensor(flat.weights, flat.shard.detach(), group=self.process_group)
        self.grad_norm, self.skipped = getattr(inner, "grad_norm", None), inner.skipped
        return loss

    def _reduce(self, flat: Flat) -> None:
        for index, parameter in enumerate(flat.parameters):
            place = flat.view(flat.gradients, index)
            if parameter.grad is None:
                place.zero_()
            elif parameter.grad.data_ptr() != place.data_ptr():
                place.copy_(parameter.grad)
                parameter.grad = place
        dist.reduce_scatter_tensor(flat.received, flat.gradients, group=self.process_group)
        flat.shard.grad = flat.received

    def _steer(self, flats: list[Flat]) -> None:
        """Hand the scaler's wishes and the global norm to the optimizer of the shards, the same on every process."""
        inner = self.inner
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.average_gradients:
            scale = torch.full((1,), float(self.world_size), device=flats[0].weights.device) * (
                1.0 if scale is None else scale
            )
        inner.grad_scale = scale
        inner.found_inf = None
        if found is not None:
            inner.found_inf = found.clone()
            dist.all_reduce(inner.found_inf, dist.ReduceOp.MAX, group=self.process_group)
        inner.finds_inf = getattr(self, "finds_inf", False)
        options = inner.options
        inner.given_squares = None
        if options.max_grad_norm is not None or options.skip_nonfinite or inner.finds_inf:
            norm, _ = multi_tensor_l2norm([flat.received for flat in flats])
            inner.given_squares = norm.square()
            dist.all_reduce(inner.given_squares, group=self.process_group)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's layout, on the CPU; collective."""
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        state: dict[int, dict[str, Any]] = {}
        for flats in self._flats:
            for flat in flats:
                own = self.inner.state.get(flat.shard, {})
                whole = {name: self._gathered(value) for name, value in own.items() if value.dim()}
                for index, parameter in enumerate(flat.parameters):
                    if own:
                        entries = {name: flat.view(value, index).clone() for name, value in whole.items()}
                        state[numbers[id(parameter)]] = {"step": own["step"].detach().cpu().clone(), **entries}
        groups = []
        for group in self.param_groups:
            values = {name: value for name, value in group.items() if name != "params"}
            groups.append({**values, "params": [numbers[id(p)] for p in group["params"]]})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _gathered(self, shard: Tensor) -> Tensor:
        # int16 is no dtype that communication libraries add or send everywhere; bytes are.
        own = shard.detach().contiguous().view(torch.uint8)
        whole = torch.empty(own.numel() * self.world_size, dtype=torch.uint8, device=own.device)
        dist.all_gather_into_tensor(whole, own, group=self.process_group)
        return whole.cpu().view(shard.dtype)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the own shards of a whole state, whatever number of processes it came from.

        Where it has master weights or remainders the parameters must hold the weights that were saved with it.
        """
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(f"{len(state_dict['param_groups'])} groups in the state, {len(self.param_groups)} here")
        self.inner.state.clear()
        self.inner._buckets = {}
        for group, saved, flats in zip(self.param_groups, state_dict["param_groups"], self._flats, strict=True):
            if len(saved["params"]) != len(group["params"]):
                raise ValueError(
                    f"a group of {len(saved['params'])} parameters in the state, of {len(group['params'])} here"
                )
            group.update({name: value for name, value in saved.items() if name in self.defaults})
            numbers = {id(p): number for p, number in zip(group["params"], saved["params"], strict=True)}
            for flat in flats:
                entries = [state_dict["state"].get(numbers[id(p)], {}) for p in flat.parameters]
                if all(entries):
                    self.inner.state[flat.shard] = self._own_state(flat, entries)
                elif any(entries):
                    raise ValueError("a state for some of the parameters that are updated together, and not for others")

    def _own_state(self, flat: Flat, entries: list[dict[str, Any]]) -> dict[str, Any]:
        length = flat.shard.numel()
        own: dict[str, Any] = {"step": torch.as_tensor(entries[0]["step"], dtype=torch.float32).reshape(())}
        for name in (*MOMENTS, "master", "remainder"):
            values = [entry.get(name) for entry in entries]
            if values[0] is None:
                continue
            if name in ("master", "remainder"):
                whole = self._padding(flat, name)
            else:
                whole = torch.zeros(flat.weights.numel(), dtype=values[0].dtype, device=flat.weights.device)
            for index, value in enumerate(values):
                if value is None or value.shape != flat.parameters[index].shape:
                    raise ValueError(
                        f"{name} of a parameter of shape {tuple(flat.parameters[index].shape)} does not fit"
                    )
                flat.view(whole, index).copy_(value)
            own[name] = whole[self.rank * length : (self.rank + 1) * length].clone()
        return own

    def _padding(self, flat: Flat, name: str) -> Tensor:
        """A flat tensor of masters or remainders that agree with the weights, also between the parameters."""
        if name == "master":
            return flat.weights.float()
        return rounding.split(flat.weights.float())[1]
