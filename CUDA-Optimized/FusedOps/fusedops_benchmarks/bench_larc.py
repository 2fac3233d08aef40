"""Steps of SGD within LARC on the tensors of BERT-large, against the same in torch's foreach functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops import optim

from .bench_optimizers import bert_large, parameters
from .harness import Case

BYTES = 28  # a parameter: weight and gradient for the norms; then they and the buffer are read, two are written
SGD = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    shapes = bert_large(quick)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    shape = f"BERT-large: {count / 1e6:.0f} M in {len(shapes)}"
    yield Case("larc + sgd", "step", shape, "fp32", BYTES * count, lambda: _programs(shapes, device))


def _programs(shapes: list[tuple[int, ...]], device: torch.device) -> dict[str, Callable[[], Any]]:
    return {
        "fusedops": optim.LARC(optim.SGD(parameters(shapes, device), **SGD)).step,
        "torch foreach functions": foreach_larc(parameters(shapes, device)),
    }


def foreach_larc(parameters: list[Tensor], trust: float = 0.02, eps: float = 1e-8) -> Callable[[], None]:
    """A step of torch's fused SGD on gradients that foreach functions have scaled."""
    decay = SGD["weight_decay"]
    optimizer = torch.optim.SGD(parameters, **{**SGD, "weight_decay": 0.0}, fused=True)

    @torch.no_grad()
    def step() -> None:
        gradients = [p.grad for p in parameters]
        weights, norms = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
        limits = torch._foreach_add(torch._foreach_add(norms, weights, alpha=decay), eps)
        rates = torch._foreach_div(torch._foreach_mul(weights, trust / SGD["lr"]), limits)
        torch._foreach_clamp_max_(rates, 1.0)
        torch._foreach_add_(gradients, parameters, alpha=decay)
        torch._foreach_mul_(gradients, rates)
        optimizer.step()

    return step
