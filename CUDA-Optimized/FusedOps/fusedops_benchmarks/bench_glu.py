"""SwiGLU and GeGLU against torch (eager and compiled) and Liger-Kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.ops import geglu, swiglu

from .harness import Case, backward_of, compiled, has_liger

SIZES = [(16384, 11008), (8192, 14336), (32768, 4096)]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for rows, width in [(8, 48)] if quick else SIZES:
        for name in ("swiglu", "geglu"):
            for packed in (False, True):
                for direction, passes in (("forward", 3), ("backward", 5)):
                    yield Case(
                        f"{name}{' packed' if packed else ''}", direction, f"{rows} x {width}", "bf16",
                        passes * 2 * rows * width,
                        lambda n=name, p=packed, d=direction, r=rows, w=width: _programs(device, n, p, d, r, w),
                    )  # fmt: skip


def _programs(
    device: torch.device, name: str, packed: bool, direction: str, rows: int, width: int
) -> dict[str, Callable[[], Any]]:
    joint = torch.randn(rows, 2 * width, device=device, dtype=torch.bfloat16)
    inputs = (joint,) if packed else tuple(t.contiguous() for t in joint.chunk(2, -1))
    inputs = tuple(t.requires_grad_(direction == "backward") for t in inputs)
    own = swiglu if name == "swiglu" else geglu

    def torchs(*inputs: Tensor) -> Tensor:
        gate, value = inputs[0].chunk(2, -1) if packed else inputs
        return (F.silu(gate) if name == "swiglu" else F.gelu(gate, approximate="tanh")) * value

    fused = compiled(torchs, device)
    functions = {
        "fusedops": lambda: own(*inputs),
        "torch": lambda: torchs(*inputs),
        "torch.compile": None if fused is None else lambda: fused(*inputs),
    }
    if has_liger() and device.type == "cuda" and not packed:
        from liger_kernel.transformers import functional

        liger = functional.liger_swiglu if name == "swiglu" else functional.liger_geglu
        functions["liger"] = lambda: liger(*inputs)
    if direction == "forward":
        return functions
    # Liger-Kernel's backward pass overwrites what it saved, so a second one on the same graph has wrong numbers, but
    # the same work.
    dy = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    return {key: backward_of(function, inputs, dy) for key, function in functions.items() if function is not None}
