"""Group norm with SiLU for channels-last pictures against torch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.ops import group_norm

from .harness import Case, backward_of, compiled

SIZES = [(8, 320, 64, 64), (8, 640, 32, 32), (8, 1280, 16, 16), (2, 512, 128, 128), (1, 128, 512, 512)]
GROUPS = 32


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for shape in [(2, 64, 4, 4)] if quick else SIZES:
        size = 2 * torch.Size(shape).numel()
        for direction, passes in (("forward", 2), ("backward", 3)):
            yield Case(
                "group_norm + silu", direction, " x ".join(map(str, shape)), "bf16", passes * size,
                lambda shape=shape, direction=direction: _programs(device, shape, direction),
            )  # fmt: skip


def _programs(device: torch.device, shape: tuple[int, ...], direction: str) -> dict[str, Callable[[], Any]]:
    needed = direction == "backward"
    x = torch.randn(shape, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    x.requires_grad_(needed)
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": needed}
    weight, bias = torch.ones(shape[1], **options), torch.zeros(shape[1], **options)

    def torchs(x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, GROUPS, weight, bias))

    fused = compiled(torchs, device)
    functions = {
        "fusedops": lambda: group_norm(x, GROUPS, weight, bias, activation="silu"),
        "torch": lambda: torchs(x),
        "torch.compile": None if fused is None else lambda: fused(x),
    }
    if direction == "forward":
        return functions
    dy = torch.randn_like(x)
    inputs = (x, weight, bias)
    return {name: backward_of(function, inputs, dy) for name, function in functions.items() if function is not None}
