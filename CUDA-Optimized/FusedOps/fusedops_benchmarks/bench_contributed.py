"""Focal loss, rows by an index, transducer joint and loss, and weight gradients in float32, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops.ops import (
    accumulate_weight_gradient,
    focal_loss,
    index_mul_2d,
    transducer_joint,
    transducer_loss,
)

from .harness import Case

HALF = torch.bfloat16


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    anchors = 64 if quick else 8 * 120087
    yield Case("focal_loss", "both", f"{anchors} x 88", "bf16", 3 * 2 * anchors * 88, lambda: _focal(device, anchors))
    rows = 64 if quick else 1 << 20
    yield Case("index_mul_2d", "both", f"{rows} x 64", "fp32", 0, lambda: _index(device, rows))
    sizes = (2, 4, 3, 8) if quick else (16, 256, 64, 512)
    shape = " x ".join(map(str, sizes))
    joint_bytes = 2 * torch.Size(sizes).numel()
    yield Case("transducer_joint", "forward", shape, "bf16", joint_bytes, lambda: _joint(device, sizes))
    yield Case("transducer_loss", "both", shape, "bf16", 3 * joint_bytes, lambda: _loss(device, sizes))
    sizes = (16, 8, 8) if quick else (8192, 4096, 4096)
    shape = " x ".join(map(str, sizes))
    yield Case("weight gradient", "forward", shape, "bf16 to fp32", 0, lambda: _weight_gradient(device, sizes))


def _in_both(function: Callable[[], Any], plain_name: str = "torch") -> dict[str, Callable[[], Any]]:
    """The same call with our kernels and in its plain form."""

    def plain() -> Any:
        with fusedops.use("plain"):
            return function()

    return {"fusedops": function, plain_name: plain}


def _focal(device: torch.device, anchors: int) -> dict[str, Callable[[], Any]]:
    x = torch.randn(anchors, 88, device=device, dtype=HALF, requires_grad=True)
    target = torch.randint(-2, 88, (anchors,), device=device)
    return _in_both(lambda: torch.autograd.grad(focal_loss(x, target, 100.0), x))


def _index(device: torch.device, rows: int) -> dict[str, Callable[[], Any]]:
    a = torch.randn(rows // 4, 64, device=device, requires_grad=True)
    b = torch.randn(rows, 64, device=device, requires_grad=True)
    index = torch.randint(0, rows // 4, (rows,), device=device)
    dy = torch.randn_like(b)
    return _in_both(lambda: torch.autograd.grad(index_mul_2d(a, b, index), (a, b), dy))


def _lengths(device: torch.device, items: int, longest: int) -> Tensor:
    return torch.randint(longest // 2 + 1, longest + 1, (items,), device=device)


def _joint(device: torch.device, sizes: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    items, frames, symbols, width = sizes
    f, g = (torch.randn(items, n, width, device=device, dtype=HALF) for n in (frames, symbols))
    f_len, g_len = torch.full((items,), frames, device=device), torch.full((items,), symbols, device=device)
    return _in_both(lambda: transducer_joint(f, g, f_len, g_len, relu=True))


def _loss(device: torch.device, sizes: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    items, frames, symbols, classes = sizes
    x = torch.randn(sizes, device=device, dtype=HALF, requires_grad=True)
    label = torch.randint(1, classes, (items, symbols - 1), device=device)
    f_len, y_len = _lengths(device, items, frames), _lengths(device, items, symbols) - 1
    return _in_both(lambda: torch.autograd.grad(transducer_loss(x, label, f_len, y_len, 0).sum(), x))


def _weight_gradient(device: torch.device, sizes: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    rows, inputs, outputs = sizes
    x, dy = (torch.randn(rows, n, device=device, dtype=HALF) for n in (inputs, outputs))
    total = torch.zeros(outputs, inputs, device=device)
    return {
        "fusedops": lambda: accumulate_weight_gradient(x, dy, total),
        "torch": lambda: total.add_(dy.t() @ x),
    }
