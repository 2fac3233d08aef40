"""Search for an order of a weight's columns in which a 2:4 mask keeps more of it (Pool and Yu, 2021).

Columns that are large in the same rows compete when they are among the same four; another order of the input
channels, made up for where the channels are produced, lets more of them live. Neighbourhoods of two or three stripes
of four columns are optimised exhaustively, the best first, until none gets better.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["kept_magnitude", "search_for_good_permutation"]

ELEMENTS_AT_ONCE = 2**25  # of the intermediate values
WINDOWS = 500_000  # neighbourhoods that are looked at, at most
SMALLEST_GAIN = 1e-6  # of the whole magnitude, so that rounding does not turn the search in circles


def kept_magnitude(matrix: Tensor, order: Tensor | None = None) -> float:
    """Sum of the magnitudes that the best 2:4 mask keeps, with the columns taken in an order. [rows, 4 n]."""
    x = matrix.abs().double()
    x = x if order is None else x[:, order]
    return float(_best_two(x.reshape(x.shape[0], -1, 4)).sum())


def search_for_good_permutation(
    matrix: Tensor, strategy: str = "stripe_groups", window: int = 8, escapes: int = 0, seed: int = 0
) -> Tensor:
    """-> order of the columns, int64 [columns], to be used as ``matrix[:, order]``.

    ``strategy``: "stripe_groups" tries all divisions of ``window`` columns (8: 35, 12: 5775) into fours;
    "channel_swap" only the exchange of two columns. ``escapes``: how often a search that stands still is shaken by
    exchanging two columns at random; the best order found is given. The number of columns must be a multiple of 4.
    """
    if matrix.dim() != 2 or matrix.shape[1] % 4:
        raise ValueError(f"a matrix of 4 n columns is wanted, not {tuple(matrix.shape)}")
    candidates = _candidates(strategy, window).to(matrix.device)
    x = matrix.detach().abs().float()
    order = torch.arange(x.shape[1], device=x.device).reshape(-1, 4)
    stripes = candidates.shape[1] // 4
    if len(order) < stripes:
        return order.flatten()
    count = math.comb(len(order), stripes)
    if count > WINDOWS:
        raise ValueError(
            f"{count} neighbourhoods of {stripes} among {len(order)} stripes: use window=8 or channel groups"
        )
    windows = torch.combinations(torch.arange(len(order), device=x.device), stripes)
    generator = torch.Generator().manual_seed(seed)
    order, best = _climb(x, order, windows, candidates), None
    for _ in range(escapes):
        value = kept_magnitude(x, order.flatten())
        if best is None or value > best[0]:
            best = value, order.clone()
        shaken = best[1].flatten().clone()
        first, second = torch.randperm(len(shaken), generator=generator)[:2].tolist()
        shaken[[first, second]] = shaken[[second, first]]
        order = _climb(x, shaken.reshape(-1, 4), windows, candidates)
    if best is not None and best[0] >= kept_magnitude(x, order.flatten()):
        order = best[1]
    return order.flatten()


def _best_two(groups: Tensor) -> Tensor:
    """Sum of the two largest of the last dimension's four values, none of which is negative."""
    a, b, c, d = groups.unbind(-1)
    return torch.maximum(torch.maximum(a, b) + torch.maximum(c, d), torch.maximum(a + b, c + d))


def _candidates(strategy: str, window: int) -> Tensor:
    """Orders of the columns of a neighbourhood, int64 [candidates, window]; the first changes nothing."""
    if strategy == "channel_swap":
        orders: list[Any] = [list(range(8))]
        for first, second in itertools.product(range(4), range(4, 8)):
            swapped = list(range(8))
            swapped[first], swapped[second] = second, first
            orders.append(swapped)
        return torch.tensor(orders)
    if strategy != "stripe_groups":
        raise ValueError(f"strategy is stripe_groups or channel_swap, not {strategy!r}")
    if window not in (8, 12):
        raise ValueError(f"window is 8 or 12 columns, not {window}")
    return torch.tensor([sum(division, ()) for division in _divisions(tuple(range(window)))])


def _divisions(columns: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to divide columns into unordered groups of four."""
    if not columns:
        return [()]
    result = []
    for others in itertools.combinations(columns[1:], 3):
        group = (columns[0], *others)
        rest = tuple(column for column in columns if column not in group)
        result.extend((group, *division) for division in _divisions(rest))
    return result


def _climb(x: Tensor, order: Tensor, windows: Tensor, candidates: Tensor) -> Tensor:
    """Improve an order [stripes, 4] until no neighbourhood has a better one."""
    order = order.clone()
    smallest = SMALLEST_GAIN * float(x.sum())
    gains = torch.zeros(len(windows), device=x.device)
    choices = torch.zeros(len(windows), dtype=torch.int64, device=x.device)
    stale = torch.arange(len(windows), device=x.device)
    while True:
        gains[stale], choices[stale] = _evaluate(x, order, windows[stale], candidates)
        changed: set[int] = set()
        ranked = gains.argsort(descending=True, stable=True)
        good = ranked[: int((gains > smallest).sum())]
        for number, stripes in zip(good.tolist(), windows[good].tolist(), strict=True):
            if changed.isdisjoint(stripes):
                columns = order[stripes].flatten()[candidates[choices[number]]]
                order[stripes] = columns.reshape(-1, 4)
                changed.update(stripes)
        if not changed:
            return order
        touched = torch.zeros(len(order), dtype=torch.bool, device=x.device)
        touched[list(changed)] = True
        stale = touched[windows].any(1).nonzero().flatten()


def _evaluate(x: Tensor, order: Tensor, windows: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """-> for each neighbourhood the gain of its best candidate, and which that is."""
    per_window = x.shape[0] * candidates.numel()
    at_once = max(1, ELEMENTS_AT_ONCE // max(per_window, 1))
    gains, choices = [], []
    for part in windows.split(at_once):
        columns = order[part].flatten(1)[:, candidates].reshape(len(part), len(candidates), -1, 4)
        scores = _best_two(x[:, columns]).sum((0, 3))
        best = scores.max(1)
        gains.append(best.values - scores[:, 0])
        choices.append(best.indices)
    return torch.cat(gains), torch.cat(choices)
