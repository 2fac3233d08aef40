"""What amp keeps for an optimizer: pairs of 16-bit parameters and masters, gradients set aside, steps to be skipped."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops.ops.multi_tensor import multi_tensor_axpby, multi_tensor_scale

__all__ = ["Stash", "patch_optimizer"]


MASTERS = "amp_masters"  # their key in an optimizer's state dictionary


class Stash:
    """``pairs``: (parameter of the model, float32 master in the optimizer). ``skip``: message of a step to be left
    out.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.skip: str | None = None
        self.pending = False  # gradients are still scaled, as delay_unscale=True left them
        self.aside: dict[Tensor, Tensor] = {}

    def others(self) -> list[Tensor]:
        """Parameters of the optimizer that are no masters."""
        masters = {id(master) for _, master in self.pairs}
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in masters]

    def put_aside(self) -> None:
        """Before a backward pass: gradients that are unscaled already must not mix with scaled ones.

        Where there are processes they are copied: DistributedDataParallel may have the pass write into their memory.
        """
        if self.pending:
            return
        shared = dist.is_available() and dist.is_initialized()
        for parameter in (*self.others(), *(model_parameter for model_parameter, _ in self.pairs)):
            if parameter.grad is not None:
                self.aside[parameter] = parameter.grad.clone() if shared else parameter.grad
                parameter.grad = None

    def put_back(self) -> None:
        """After a backward pass that failed: what it left is dropped, the gradients set aside are there again.

        Those that ``delay_unscale=True`` left scaled were not set aside: they may hold a part of the failed pass.
        """
        if self.pending:
            return
        for parameter in (*self.others(), *(model_parameter for model_parameter, _ in self.pairs)):
            parameter.grad = self.aside.get(parameter)
        self.aside = {}

    def unscale(self, scale: float) -> Tensor | None:
        """After it: gradients / scale, added to those set aside, into masters where there are any. -> flag of an
        overflow.
        """
        flags = []
        own = [p for p in self.others() if p.grad is not None]
        flags += self._combine(
            [p.grad for p in own], [p.grad for p in own], [self.aside.pop(p, None) for p in own], scale
        )
        pairs = [(p, master) for p, master in self.pairs if p.grad is not None]
        fresh = [master.grad is None for _, master in pairs]
        for (_, master), new in zip(pairs, fresh, strict=True):
            if new:
                master.grad = torch.empty_like(master)
        before = [None if new else master.grad for (_, master), new in zip(pairs, fresh, strict=True)]
        flags += self._combine([p.grad for p, _ in pairs], [master.grad for _, master in pairs], before, scale)
        for parameter, _ in pairs:
            parameter.grad = None
            self.aside.pop(parameter, None)
        for parameter, gradient in self.aside.items():  # those that this loss does not reach
            parameter.grad = gradient
        self.aside = {}
        self.pending = False
        return torch.stack([flag.reshape(()) for flag in flags]).max() if flags else None

    @staticmethod
    def _combine(
        gradients: list[Tensor], outputs: list[Tensor], before: list[Tensor | None], scale: float
    ) -> list[Tensor]:
        flags = []
        new = [i for i, old in enumerate(before) if old is None]
        added = [i for i, old in enumerate(before) if old is not None]
        if new:
            flags.append(multi_tensor_scale([gradients[i] for i in new], [outputs[i] for i in new], 1.0 / scale))
        if added:
            lists = [gradients[i] for i in added], [before[i] for i in added], [outputs[i] for i in added]
            flags.append(multi_tensor_axpby(*lists, 1.0 / scale, 1.0, check=0))
        return flags

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Into the model's parameters."""
        if self.pairs:
            multi_tensor_scale([master for _, master in self.pairs], [parameter for parameter, _ in self.pairs], 1.0)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """After the model's weights were set from outside: masters that do not round to them become them."""
        for parameter, master in self.pairs:
            if not torch.equal(master.to(parameter.dtype), parameter):
                master.copy_(parameter)

    @torch.no_grad()
    def load_masters(self, saved: list[Tensor]) -> None:
        """Masters of a checkpoint, into the masters and the model's parameters. ValueError where they do not fit."""
        shapes, own = [tuple(value.shape) for value in saved], [tuple(master.shape) for _, master in self.pairs]
        if shapes != own:
            raise ValueError(f"{len(shapes)} masters in the state do not fit this optimizer's {len(own)}")
        for value, (_, master) in zip(saved, self.pairs, strict=True):
            master.copy_(value)
        self.copy_masters()

    def make_masters(self, group: dict[str, Any]) -> None:
        """Replace the 16-bit parameters of a group by float32 masters."""
        state = self.optimizer.state
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                master = torch.nn.Parameter(parameter.detach().float())
                self.pairs.append((parameter, master))
                group["params"][index] = master
                if parameter in state:
                    state[master] = state.pop(parameter)


def patch_optimizer(optimizer: Any, masters: bool) -> None:
    """Attach a stash, and make step, zero_grad, add_param_group and the state dictionary of this optimizer heed it."""
    stash = optimizer._amp_stash = Stash(optimizer)
    if masters:
        for group in optimizer.param_groups:
            stash.make_masters(group)

    def step(original: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        if stash.skip is not None:
            print(stash.skip)
            stash.skip = None
            for _, master in stash.pairs:
                master.grad = None
            return None
        result = original()
        stash.copy_masters()
        return result

    def zero_grad(original: Callable[..., Any], set_to_none: bool = True) -> None:
        original(set_to_none=set_to_none)
        for parameter, master in stash.pairs:
            parameter.grad = master.grad = None
        stash.aside, stash.pending = {}, False

    def add_param_group(original: Callable[..., Any], group: dict[str, Any]) -> None:
        group = {**group, "params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])}
        if masters:
            stash.make_masters(group)
        original(group)

    def state_dict(original: Callable[..., Any]) -> dict[str, Any]:
        saved = original()
        return {**saved, MASTERS: [master.detach().clone() for _, master in stash.pairs]} if stash.pairs else saved

    def load_state_dict(original: Callable[..., Any], state: dict[str, Any]) -> None:
        original({name: value for name, value in state.items() if name != MASTERS})
        if MASTERS in state:
            stash.load_masters(state[MASTERS])
        else:
            stash.follow_parameters()

    for replacement in (step, zero_grad, add_param_group, state_dict, load_state_dict):
        original = getattr(optimizer, replacement.__name__)
        setattr(optimizer, replacement.__name__, _method(optimizer, original, replacement))


def _method(optimizer: Any, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return replacement(original, *arguments, **named)

    return types.MethodType(method, optimizer)
