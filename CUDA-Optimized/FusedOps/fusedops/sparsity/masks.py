"""Masks of patterns with two of four kept (Mishra et al., 2021)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PATTERNS", "create_mask", "is_2to4"]


def create_mask(
    tensor: Tensor, pattern: str | Callable[[Tensor, float], Tensor] = "m4n2_1d", density: float = 0.5
) -> Tensor:
    """Mask of a weight, of its shape and dtype, 1 where it is kept.

    ``m4n2_1d``: of each four values that follow each other along the inputs the two of largest magnitude, which is
    the best of the six patterns. ``m4n2_2d_best``: in each 4 x 4 block two of each row and column, the best of the 90
    patterns (so the transposed weight is 2:4, too). ``m4n2_2d_greedy``: likewise, but taken greedily from the largest
    on, which may keep fewer. Or a function of matrix and density. The inputs are dimension 1 (2-D to 4-D weights,
    [out, in, ...]) or the only one.
    """
    if not 1 <= tensor.dim() <= 4:
        raise ValueError(f"a weight has 1 to 4 dimensions, not {tensor.dim()}: {tuple(tensor.shape)}")
    if isinstance(pattern, str) and pattern not in PATTERNS:
        raise ValueError(f"pattern is one of {', '.join(PATTERNS)}, not {pattern!r}")
    calculate = PATTERNS[pattern] if isinstance(pattern, str) else pattern
    # [kernel positions x out, in]: what is multiplied and added together lies in a row
    moved = tensor.detach().movedim(1, -1) if tensor.dim() > 1 else tensor.detach()[None]
    mask = calculate(moved.reshape(-1, moved.shape[-1]), density).reshape(moved.shape)
    mask = mask.movedim(-1, 1) if tensor.dim() > 1 else mask[0]
    return mask.to(tensor.dtype).contiguous()


def _best_of_six(matrix: Tensor, density: float) -> Tensor:
    _check_density(density)
    columns = matrix.shape[1]
    groups = F.pad(matrix.abs().float(), (0, -columns % 4)).reshape(matrix.shape[0], -1, 4)
    # a stable sort, so that of equal values the first are kept, on every device
    chosen = groups.argsort(dim=-1, descending=True, stable=True)[..., :2]
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, chosen, True)
    return mask.reshape(matrix.shape[0], -1)[:, :columns]


def _blocks(matrix: Tensor) -> Tensor:
    """-> magnitudes [blocks of rows, blocks of columns, 4, 4], padded with zeros."""
    rows, columns = matrix.shape
    padded = F.pad(matrix.abs().float(), (0, -columns % 4, 0, -rows % 4))
    return padded.reshape(padded.shape[0] // 4, 4, padded.shape[1] // 4, 4).transpose(1, 2)


def _from_blocks(mask: Tensor, matrix: Tensor) -> Tensor:
    rows, columns = mask.shape[0] * 4, mask.shape[1] * 4
    return mask.transpose(1, 2).reshape(rows, columns)[: matrix.shape[0], : matrix.shape[1]]


def _best_of_90(matrix: Tensor, density: float) -> Tensor:
    _check_density(density)
    blocks = _blocks(matrix)
    pairs = [[float(i in pair) for i in range(4)] for pair in itertools.combinations(range(4), 2)]
    candidates = torch.tensor(list(itertools.product(pairs, repeat=4)), device=matrix.device)
    candidates = candidates[(candidates.sum(1) == 2).all(1)].reshape(-1, 16)
    best = (blocks.reshape(*blocks.shape[:2], 16) @ candidates.t()).argmax(-1)
    return _from_blocks(candidates[best].reshape(blocks.shape).bool(), matrix)


def _greedy(matrix: Tensor, density: float) -> Tensor:
    _check_density(density)
    blocks = _blocks(matrix)
    flat = blocks.reshape(-1, 16)
    order = flat.argsort(dim=1, descending=True, stable=True)
    number = torch.arange(len(flat), device=matrix.device)
    rows, columns = (torch.zeros(len(flat), 4, dtype=torch.int8, device=matrix.device) for _ in range(2))
    mask = torch.zeros_like(flat, dtype=torch.bool)
    for place in order.t():
        row, column = place // 4, place % 4
        taken = (rows[number, row] < 2) & (columns[number, column] < 2)
        rows[number, row] += taken.to(torch.int8)
        columns[number, column] += taken.to(torch.int8)
        mask[number, place] = taken
    return _from_blocks(mask.reshape(blocks.shape), matrix)


def _check_density(density: float) -> None:
    if density != 0.5:
        raise ValueError(f"a pattern of two of four has density 0.5, not {density}")


PATTERNS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "m4n2_1d": _best_of_six,
    "m4n2_2d_best": _best_of_90,
    "m4n2_2d_greedy": _greedy,
}


def is_2to4(matrix: Tensor) -> bool:
    """Whether at most two of each four values along the rows are not zero."""
    if matrix.dim() != 2 or matrix.shape[1] % 4:
        return False
    return bool(((matrix != 0).reshape(matrix.shape[0], -1, 4).sum(-1) <= 2).all())
