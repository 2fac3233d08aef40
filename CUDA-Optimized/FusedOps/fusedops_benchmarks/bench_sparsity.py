"""The product with a 2:4 sparse weight against the dense one, and the search for a permutation. CUDA only, but for
the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fusedops.sparsity import create_mask, search_for_good_permutation, to_sparse_semi_structured

from .harness import Case

LAYERS = [(4096, 4096), (4096, 14336), (14336, 4096)]  # inputs, outputs
ROWS = [64, 2048, 8192]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    if device.type == "cuda":
        for inputs, outputs in [(256, 512)] if quick else LAYERS:
            for rows in [64] if quick else ROWS:
                shape = f"{rows} x {inputs} x {outputs}"
                yield Case(
                    "linear 2:4",
                    "forward",
                    shape,
                    "fp16",
                    0,
                    lambda r=rows, i=inputs, o=outputs: _linear(r, i, o, device),
                )
    rows, columns = (16, 16) if quick else (64, 128)
    yield Case("permutation search", "both", f"{rows} x {columns}", "fp32", 0, lambda: _search(rows, columns, device))
    yield Case(
        "mask 2:4", "both", f"{32 * rows} x {32 * columns}", "fp32", 0, lambda: _mask(32 * rows, 32 * columns, device)
    )


def _linear(rows: int, inputs: int, outputs: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    dense = nn.Linear(inputs, outputs, device=device, dtype=torch.float16).requires_grad_(False)
    dense.weight.mul_(create_mask(dense.weight))
    sparse = nn.Linear(inputs, outputs, device=device, dtype=torch.float16).requires_grad_(False)
    sparse.weight.copy_(dense.weight)
    to_sparse_semi_structured(sparse)
    x = torch.randn(rows, inputs, device=device, dtype=torch.float16)
    return {"fusedops": lambda: sparse(x), "dense": lambda: dense(x)}


def _search(rows: int, columns: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    matrix = torch.randn(rows, columns, device=device)
    return {
        "fusedops": lambda: search_for_good_permutation(matrix),
        "swaps only": lambda: search_for_good_permutation(matrix, "channel_swap"),
    }


def _mask(rows: int, columns: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    matrix = torch.randn(rows, columns, device=device)
    return {
        "fusedops": lambda: create_mask(matrix),
        "4 x 4 blocks": lambda: create_mask(matrix, "m4n2_2d_best"),
    }
