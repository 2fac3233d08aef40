"""Scaled masked softmax against torch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.ops import scaled_softmax

from .harness import Case, backward_of, compiled

SIZES = [(8, 16, 2048, 2048), (2, 16, 4096, 4096), (1, 8, 8192, 8192)]
SCALE = 0.125


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for shape in [(1, 2, 8, 16)] if quick else SIZES:
        size = 2 * torch.Size(shape).numel()
        for form in ("none", "mask", "causal"):
            # Half of a causal matrix is read; all of it is written.
            read = 0.5 if form == "causal" else 1.0
            mask = size / 2 / shape[1] if form == "mask" else 0  # a byte for each element of one head
            for direction, floor in (("forward", size * (read + 1) + mask), ("backward", size * (2 * read + 1))):
                yield Case(
                    f"softmax ({form})", direction, " x ".join(map(str, shape)), "bf16", floor,
                    lambda shape=shape, form=form, direction=direction: _programs(device, shape, form, direction),
                )  # fmt: skip


def _programs(device: torch.device, shape: tuple[int, ...], form: str, direction: str) -> dict[str, Callable[[], Any]]:
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=direction == "backward")
    hidden = None
    if form == "mask":
        hidden = torch.rand(shape[0], 1, *shape[2:], device=device) < 0.2
    elif form == "causal":
        hidden = torch.ones(shape[2:], dtype=torch.bool, device=device).triu(1)

    def torchs(x: Tensor) -> Tensor:
        scores = x * SCALE
        return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -float("inf")), -1)

    mask = hidden if form == "mask" else None
    fused = compiled(torchs, device)
    functions = {
        "fusedops": lambda: scaled_softmax(x, SCALE, mask=mask, causal=form == "causal"),
        "torch": lambda: torchs(x),
        "torch.compile": None if fused is None else lambda: fused(x),
    }
    if direction == "forward":
        return functions
    dy = torch.randn_like(x)
    return {name: backward_of(function, (x,), dy) for name, function in functions.items() if function is not None}
