"""Steps of Adagrad on the tensors of BERT-large and on thousands of small ones, against torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedops import optim

from .bench_optimizers import adapters, bert_large, parameters
from .harness import Case

BYTES = 20  # a parameter: gradient, weight and sum are read, weight and sum written


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for label, shapes in (("BERT-large", bert_large(quick)), ("adapters", adapters(quick))):
        count = sum(torch.Size(shape).numel() for shape in shapes)
        shape = f"{label}: {count / 1e6:.0f} M in {len(shapes)}"
        yield Case("adagrad", "step", shape, "fp32", BYTES * count, lambda s=shapes: _programs(s, device))


def _programs(shapes: list[tuple[int, ...]], device: torch.device) -> dict[str, Callable[[], Any]]:
    programs = {"fusedops": optim.Adagrad(parameters(shapes, device)).step}
    programs["torch foreach"] = torch.optim.Adagrad(parameters(shapes, device), foreach=True).step
    try:
        programs["torch fused"] = torch.optim.Adagrad(parameters(shapes, device), fused=True).step
    except RuntimeError:  # on a GPU from torch 2.13 on
        return programs
    return programs
