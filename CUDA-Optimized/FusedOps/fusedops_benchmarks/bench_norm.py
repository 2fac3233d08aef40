"""LayerNorm and RMSNorm against torch (eager and compiled) and Liger-Kernel where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops import norm

from .harness import Case, backward_of, compiled, has_liger

SIZES = [(8192, 1024), (16384, 4096), (8192, 8192), (4096, 16384)]
WIDTHS = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384]
ELEMENTS = 1 << 25  # in each matrix of the sweep over widths


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    sizes = [(16, 96)] if quick else SIZES + [(ELEMENTS // width, width) for width in WIDTHS]
    for rms in (False, True):
        name = "rms_norm" if rms else "layer_norm"
        for rows, width in dict.fromkeys(sizes):
            element = rows * width * 2
            for direction, passes in (("forward", 2), ("backward", 3)):
                yield Case(
                    name, direction, f"{rows} x {width}", "bf16", passes * element,
                    lambda rms=rms, rows=rows, width=width, d=direction: _programs(device, rms, rows, width, d),
                )  # fmt: skip
    for rows, width in [(16, 96)] if quick else SIZES[1:]:
        yield Case(
            "add_rms_norm", "forward", f"{rows} x {width}", "bf16", 4 * rows * width * 2,
            lambda rows=rows, width=width: _residual_programs(device, rows, width),
        )  # fmt: skip


def _programs(device: torch.device, rms: bool, rows: int, width: int, direction: str) -> dict[str, Callable[[], Any]]:
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": direction == "backward"}
    x = torch.randn(rows, width, **options)
    weight, bias = torch.ones(width, **options), torch.zeros(width, **options)
    dy = torch.randn_like(x)
    inputs = (x, weight) if rms else (x, weight, bias)
    if rms:
        functions = {
            "fusedops": lambda: norm.rms_norm(x, width, weight, 1e-6),
            "torch": lambda: F.rms_norm(x, (width,), weight, 1e-6),
            "torch.compile": compiled(lambda: F.rms_norm(x, (width,), weight, 1e-6), device),
        }
    else:
        functions = {
            "fusedops": lambda: norm.layer_norm(x, width, weight, bias),
            "torch": lambda: F.layer_norm(x, (width,), weight, bias),
            "torch.compile": compiled(lambda: F.layer_norm(x, (width,), weight, bias), device),
        }
    functions |= _liger(rms, x, weight, bias)
    if direction == "forward":
        return functions
    return {name: backward_of(function, inputs, dy) for name, function in functions.items() if function is not None}


def _liger(rms: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Callable[[], Any]]:
    if not has_liger() or x.device.type != "cuda":
        return {}
    from liger_kernel.transformers import functional

    if rms:
        return {"liger": lambda: functional.liger_rms_norm(x, weight, 1e-6, in_place=False)}
    return {"liger": lambda: functional.liger_layer_norm(x, weight, bias, 1e-5)}


def _residual_programs(device: torch.device, rows: int, width: int) -> dict[str, Callable[[], Any]]:
    x, residual = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(width, device=device, dtype=torch.bfloat16)

    def torchs() -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return F.rms_norm(total, (width,), weight, 1e-6), total

    return {
        "fusedops": lambda: norm.add_rms_norm(x, residual, width, weight, 1e-6),
        "torch": torchs,
        "torch.compile": compiled(torchs, device),
    }
