"""SyncBatchNorm in one process, so without what collectives cost, against torch's batch norm, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedops.nn import SyncBatchNorm

from .harness import Case, backward_of, compiled

SIZES = [(64, 64, 112, 112), (64, 256, 56, 56), (64, 2048, 7, 7)]
# Passes over the activations, at least: statistics and result; sums and gradient.
PASSES = {"forward": 3, "backward": 5}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for shape in [(4, 8, 6, 6)] if quick else SIZES:
        for order in (torch.contiguous_format, torch.channels_last):
            for direction, passes in PASSES.items():
                label = "SyncBatchNorm, channels last" if order == torch.channels_last else "SyncBatchNorm"
                yield Case(
                    label, direction, " x ".join(map(str, shape)), "bf16", passes * 2 * torch.Size(shape).numel(),
                    lambda s=shape, o=order, d=direction: _programs(device, s, o, d),
                )  # fmt: skip


def _programs(
    device: torch.device, shape: tuple[int, ...], order: torch.memory_format, direction: str
) -> dict[str, Callable[[], Any]]:
    x = torch.randn(shape, device=device, dtype=torch.bfloat16).contiguous(memory_format=order)
    x.requires_grad_(direction == "backward")
    ours, theirs = SyncBatchNorm(shape[1]).to(device), torch.nn.BatchNorm2d(shape[1]).to(device)
    for module in (ours, theirs):
        module.requires_grad_(direction == "backward")
    fused = compiled(theirs, device)
    functions = {
        "fusedops": lambda: ours(x),
        "torch": lambda: theirs(x),
        "torch.compile": None if fused is None else lambda: fused(x),
    }
    if direction == "forward":
        return functions
    dy = torch.randn_like(x)
    programs = {}
    for name, function in functions.items():
        if function is not None:
            module = ours if name == "fusedops" else theirs
            programs[name] = backward_of(function, (x, *module.parameters()), dy)
    return programs
