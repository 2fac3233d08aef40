"""Rotary embedding of q and k against torch (eager and compiled) and Liger-Kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.ops import rope, rotary_table

from .harness import Case, compiled, has_liger

SIZES = [(4, 4096, 32, 8, 128), (2, 8192, 32, 32, 128), (8, 2048, 64, 8, 128)]  # batch, length, q and k heads, width


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for shape in [(1, 8, 2, 1, 16)] if quick else SIZES:
        batch, length, heads, kv_heads, width = shape
        size = 2 * batch * length * (heads + kv_heads) * width
        for direction in ("forward", "both"):
            yield Case(
                "rope", direction, " x ".join(map(str, shape)), "bf16", size * (2 if direction == "forward" else 4),
                lambda shape=shape, direction=direction: _programs(device, shape, direction),
            )  # fmt: skip


def _programs(device: torch.device, shape: tuple[int, ...], direction: str) -> dict[str, Callable[[], Any]]:
    batch, length, heads, kv_heads, width = shape
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": direction == "both"}
    q, k = torch.randn(batch, length, heads, width, **options), torch.randn(batch, length, kv_heads, width, **options)
    cos, sin = rotary_table(length, width, device=device)
    full_cos, full_sin = (torch.cat([t, t], 1).to(torch.bfloat16)[None, :, None] for t in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * full_cos + torch.cat([-second, first], -1) * full_sin

    def torchs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q), turn(k)

    functions = {
        "fusedops": lambda q, k: rope(q, k, cos, sin),
        "torch": torchs,
        "torch.compile": compiled(torchs, device),
    }
    if has_liger() and device.type == "cuda":
        from liger_kernel.transformers import functional

        tables = (full_cos[:, :, 0].contiguous(), full_sin[:, :, 0].contiguous())  # (1, length, width)
        functions["liger"] = lambda q, k: functional.liger_rope(q.transpose(1, 2), k.transpose(1, 2), *tables)

    def step(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Any]:
        if direction == "forward":
            return lambda: function(q, k)

        def both() -> tuple[Tensor, ...]:
            outputs = function(q, k)
            above = [dy if out.shape == dy.shape else dy.transpose(1, 2) for out, dy in zip(outputs, dys, strict=True)]
            return torch.autograd.grad(outputs, (q, k), above)

        return both

    dys = [torch.randn_like(q), torch.randn_like(k)]
    return {name: step(function) for name, function in functions.items() if function is not None}
