"""Two linear layers with a GELU between them, and bias with activation alone, against torch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.ops import bias_activation, dense_gelu_dense

from .harness import Case, backward_of, compiled

SIZES = [(16384, 1024, 4096), (8192, 4096, 16384)]  # rows, features, hidden features


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for rows, features, hidden in [(8, 6, 24)] if quick else SIZES:
        shape = f"{rows} x {features} x {hidden}"
        yield Case(
            "dense_gelu_dense", "both", shape, "bf16", 0,
            lambda rows=rows, features=features, hidden=hidden: _layers(device, rows, features, hidden),
        )  # fmt: skip
        for direction, passes in (("forward", 2), ("backward", 3)):
            yield Case(
                "bias_gelu", direction, f"{rows} x {hidden}", "bf16", passes * 2 * rows * hidden,
                lambda rows=rows, hidden=hidden, direction=direction: _activation(device, rows, hidden, direction),
            )  # fmt: skip


def _layers(device: torch.device, rows: int, features: int, hidden: int) -> dict[str, Callable[[], Any]]:
    options = {"device": device, "dtype": torch.bfloat16}
    shapes = ((rows, features), (hidden, features), (hidden,), (features, hidden), (features,))
    inputs = [(torch.randn(shape, **options) / shape[-1] ** 0.5).requires_grad_() for shape in shapes]
    dy = torch.randn(rows, features, **options)

    def torchs(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)

    def step(function: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*inputs), inputs, dy)

    fused = compiled(torchs, device)
    return {
        "fusedops": step(dense_gelu_dense),
        "torch": step(torchs),
        "torch.compile": None if fused is None else step(fused),
    }


def _activation(device: torch.device, rows: int, hidden: int, direction: str) -> dict[str, Callable[[], Any]]:
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": direction == "backward"}
    x, bias = torch.randn(rows, hidden, **options), torch.randn(hidden, **options)

    def torchs(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    fused = compiled(torchs, device)
    functions = {
        "fusedops": lambda: bias_activation(x, bias, "gelu_tanh"),
        "torch": lambda: torchs(x, bias),
        "torch.compile": None if fused is None else lambda: fused(x, bias),
    }
    if direction == "forward":
        return functions
    dy = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    return {name: backward_of(function, (x, bias), dy) for name, function in functions.items() if function is not None}
