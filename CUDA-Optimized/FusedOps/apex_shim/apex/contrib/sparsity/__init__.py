from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apex.submodules import give_submodules
from fusedops.sparsity import ASP, create_mask, permute_model, search_for_good_permutation

__all__ = [
    "ASP", "Permutation", "accelerated_search_for_good_permutation", "create_mask", "m4n2_1d", "m4n2_2d_best",
    "m4n2_2d_greedy",
]  # fmt: skip


def m4n2_1d(mat: Tensor, density: float) -> Tensor:
    """The mask of the best 2 in each 4 along the rows."""
    return create_mask(mat, "m4n2_1d", density)


def m4n2_2d_best(mat: Tensor, density: float) -> Tensor:
    """The best mask of each 4 x 4 block that is 2:4 in both directions."""
    return create_mask(mat, "m4n2_2d_best", density)


def m4n2_2d_greedy(mat: Tensor, density: float) -> Tensor:
    """As `m4n2_2d_best`, by taking the largest that still fits."""
    return create_mask(mat, "m4n2_2d_greedy", density)


class Permutation:
    """Apex's pass over a network; here `fusedops.sparsity.permute_model`."""

    @staticmethod
    def permute_model(model: nn.Module, **options: Any) -> nn.Module:
        """Put the model's channels into an order in which masks keep more, in place; -> the model. ``options`` are
        those of `search_for_good_permutation`.
        """
        permute_model(model, **options)
        return model


def accelerated_search_for_good_permutation(
    matrix_group: Tensor | Any, options: Mapping[str, Any] | None = None, verbosity: int = 0
) -> list[int]:
    """-> an order of the columns. ``options``: ``strategy`` ("exhaustive", or "progressive channel swap"),
    ``stripe_group_size`` (8 or 12), ``escape_attempts``. ValueError for another strategy.
    """
    options = dict(options or {})
    strategy = options.get("strategy", "exhaustive")
    names = {"exhaustive": "stripe_groups", "progressive channel swap": "channel_swap"}
    if strategy not in names:
        raise ValueError(f"strategy is one of {', '.join(names)}, not {strategy!r}")
    order = search_for_good_permutation(
        torch.as_tensor(matrix_group), names[strategy], window=options.get("stripe_group_size", 8),
        escapes=options.get("escape_attempts", 0),
    )  # fmt: skip
    return order.tolist()


give_submodules(__name__)
