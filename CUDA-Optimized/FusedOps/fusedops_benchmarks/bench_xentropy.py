"""Cross entropy against torch (eager and compiled) and Liger-Kernel, forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.ops import cross_entropy

from .harness import Case, compiled, has_liger

SIZES = [(8192, 32768), (8192, 131072), (16384, 50304)]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for rows, classes in [(8, 100)] if quick else SIZES:
        for smoothing in (0.0, 0.1):
            # The floor of forward and backward: one read, one write.
            yield Case(
                "cross_entropy", "both", f"{rows} x {classes} smoothing {smoothing}", "bf16", 4 * rows * classes,
                lambda rows=rows, classes=classes, smoothing=smoothing: _programs(device, rows, classes, smoothing),
            )  # fmt: skip


def _programs(device: torch.device, rows: int, classes: int, smoothing: float) -> dict[str, Callable[[], Any]]:
    logits = torch.randn(rows, classes, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, classes, (rows,), device=device)

    def step(loss: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(logits), logits)

    def upcast(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), target, label_smoothing=smoothing)

    fused = compiled(upcast, device)
    programs = {
        # In place, the logits are the gradient after the first call: the same work on other numbers.
        "fusedops": step(lambda x: cross_entropy(x.view_as(x), target, label_smoothing=smoothing, inplace=True)),
        "fusedops, two passes": step(lambda x: cross_entropy(x, target, label_smoothing=smoothing)),
        "torch, upcast": step(upcast),
        "torch": step(lambda x: F.cross_entropy(x, target, label_smoothing=smoothing)),
        "torch.compile": None if fused is None else step(fused),
    }
    if has_liger() and device.type == "cuda":
        from liger_kernel.transformers import functional

        programs["liger"] = step(
            lambda x: functional.liger_cross_entropy(
                x * 1, target, label_smoothing=smoothing
            )  # it overwrites its input
        )
    return programs
