"""One operator, two ways to call it: as a torch custom operator, or directly.

`torch.library.custom_op` is what torch.compile, export, FakeTensor and other tensor subclasses need. In eager mode it
costs more host time than a small kernel runs. An `Operator` therefore calls its launcher directly for plain tensors and
goes through the registered operator for all else; both share launcher, shapes and derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Operator", "is_direct", "once"]

_PLAIN = (Tensor, torch.nn.Parameter)


def is_direct(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors of an eager program, so that kernels can be launched on them at once."""
    if torch.compiler.is_compiling():
        return False
    return all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)


class _Last(torch.autograd.Function):
    """Gradients as they are; a derivative of them is an error. torch's once_differentiable raises it only where the
    gradient from above can be differentiated, and forgets what the gradients owe to the inputs.
    """

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            f"fusedops.{ctx.name}: this derivative cannot be differentiated again; those of the plain forms can "
            "(fusedops.use('plain'))"
        )


def once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass made of kernels, whose gradients refuse to be differentiated."""

    def wrapper(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        results = list(results) if isinstance(results, tuple) else [results]
        places = [place for place, value in enumerate(results) if isinstance(value, Tensor)]
        ended = _Last.apply(name, *(results[place].detach().requires_grad_() for place in places))
        for place, value in zip(places, ended, strict=True):
            results[place] = value
        return tuple(results)

    return wrapper


class Operator:
    """`fusedops::name`. `launch` computes (annotated as custom_op asks), `fake` gives empty outputs of right shape."""

    def __init__(self, name: str, launch: Callable[..., Any], fake: Callable[..., Any], mutates: tuple = ()) -> None:
        self.name = name
        self.launch = launch
        self.operator = torch.library.custom_op(f"fusedops::{name}", launch, mutates_args=mutates)
        self.operator.register_fake(fake)
        self.function: type[torch.autograd.Function] | None = None

    def differentiable(
        self, setup: Callable[..., None], backward: Callable[..., Any], *, again: bool = False
    ) -> Operator:
        """Register the derivative: `setup(ctx, inputs, output)` saves, `backward(ctx, *grads)` gives one per input.

        `again`: the backward pass is made of differentiable operators, so it can be differentiated itself.
        """
        self.operator.register_autograd(backward, setup_context=setup)
        launch = self.launch

        def forward(ctx: Any, *arguments: Any) -> Any:  # a setup_context would cost 30 us of inspection at each call
            output = launch(*arguments)
            setup(ctx, arguments, output)
            return output

        members = {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward if again else once(self.name, backward)),
        }
        self.function = type(f"fusedops_{self.name}", (torch.autograd.Function,), members)
        return self

    def __call__(self, *arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not is_direct(*tensors):
            return self.operator(*arguments)
        if self.function is None or not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return self.launch(*arguments)
        return self.function.apply(*arguments)
