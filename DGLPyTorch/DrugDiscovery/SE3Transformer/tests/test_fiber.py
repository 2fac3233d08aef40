"""Fibers: order, sums, heads, errors."""

from __future__ import annotations

import pytest
import torch

from se3_transformer.model.fiber import Fiber, FiberEl


def test_order_is_by_degree_whatever_the_channels():
    fiber = Fiber({1: 3, 0: 32, 2: 1})
    assert fiber.degrees == [0, 1, 2] and fiber.channels == [32, 3, 1]
    assert list(fiber) == [FiberEl(0, 32), FiberEl(1, 3), FiberEl(2, 1)]
    assert Fiber([(2, 1), (0, 32), (1, 3)]) == fiber == Fiber(fiber)
    assert fiber.num_features == 32 + 9 + 5 and fiber.max_degree == 2


def test_absent_degrees_have_no_channels():
    fiber = Fiber({0: 4, 3: 0})
    assert fiber[3] == fiber[1] == 0 and 3 not in fiber and fiber["0"] == 4 and len(fiber) == 1
    assert Fiber({}).max_degree == -1 and not Fiber({})


@pytest.mark.parametrize(
    ("left", "right", "total", "largest"),
    [
        ({0: 2, 1: 3}, {1: 4, 2: 5}, {0: 2, 1: 7, 2: 5}, {0: 2, 1: 4, 2: 5}),
        ({}, {3: 1}, {3: 1}, {3: 1}),
        ({1: 8}, {0: 8}, {0: 8, 1: 8}, {0: 8, 1: 8}),
    ],
)
def test_sum_and_maximum_keep_degrees_of_both_sides(left, right, total, largest):
    left, right = Fiber(left), Fiber(right)
    assert left + right == right + left == Fiber(total)
    assert left.combine_max(right) == right.combine_max(left) == Fiber(largest)


def test_create_select_and_from_features():
    assert Fiber.create(3, 8) == Fiber({0: 8, 1: 8, 2: 8})
    assert Fiber.create(3, 8).select([2, 5]) == Fiber({2: 8})
    features = {"0": torch.zeros(5, 4, 1), "2": torch.zeros(5, 2, 5)}
    assert Fiber.from_features(features) == Fiber({0: 4, 2: 2})
    with pytest.raises(ValueError, match="degree 1 need 3"):
        Fiber.from_features({"1": torch.zeros(5, 4, 2)})


@pytest.mark.parametrize("structure", [{-1: 2}, {0: -2}, [(0, 1), (0, 2)]])
def test_impossible_fibers_are_refused(structure):
    with pytest.raises(ValueError, match="degree"):
        Fiber(structure)


def test_heads_get_consecutive_channels_of_every_degree():
    fiber = Fiber({0: 4, 1: 2})
    features = {"0": torch.arange(4.0).view(1, 4, 1), "1": 10 + torch.arange(6.0).view(1, 2, 3)}
    heads = fiber.to_attention_heads(features, 2)
    assert heads.tolist() == [[[0, 1, 10, 11, 12], [2, 3, 13, 14, 15]]]
