"""Linear layer with cross entropy: time and peak memory against torch and Liger-Kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.ops import linear_cross_entropy

from .harness import Case, compiled, has_liger

SIZES = [(8192, 4096, 131072), (8192, 2048, 32768)]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for rows, features, classes in [(16, 8, 64)] if quick else SIZES:
        yield Case(
            "linear_cross_entropy", "both", f"{rows} x {features} x {classes}", "bf16", 0,
            lambda rows=rows, features=features, classes=classes: _programs(device, rows, features, classes),
            memory=True,
        )  # fmt: skip


def _programs(device: torch.device, rows: int, features: int, classes: int) -> dict[str, Callable[[], Any]]:
    options = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(rows, features, **options).requires_grad_()
    weight = (torch.randn(classes, features, **options) / features**0.5).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=device)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(x, weight), (x, weight))

    def upcast(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    fused = compiled(upcast, device)
    programs = {
        "fusedops": step(lambda x, weight: linear_cross_entropy(x, weight, target)),
        "fusedops, own type": step(lambda x, weight: linear_cross_entropy(x, weight, target, accumulate=None)),
        "torch, upcast": step(upcast),
        "torch": step(lambda x, weight: F.cross_entropy(F.linear(x, weight), target)),
        "torch.compile": None if fused is None else step(fused),
    }
    if has_liger() and device.type == "cuda":
        from liger_kernel.transformers import functional

        programs["liger"] = step(lambda x, weight: functional.liger_fused_linear_cross_entropy(x, weight, target))
    return programs
