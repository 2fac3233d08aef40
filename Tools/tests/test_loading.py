"""Loaders of any task's batches: order for any world, worker processes, named tuples, faults, leaving in the middle."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dlx.loading import DataError, Plan, WorkerLoader, rebuild, to_device


class Pair(NamedTuple):
    images: torch.Tensor
    index: torch.Tensor


@dataclass
class Numbers:
    name: str = "numbers"
    classes: list[str] = field(default_factory=lambda: ["a"])
    size: int = 10
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size


class NumberDataset(torch.utils.data.Dataset):
    """Picture n of epoch e has the value n + 100 e; 3 is left out with a fault; 7 is an error if `strict`."""

    def __init__(self, strict: bool = False, plain: bool = False) -> None:
        self.strict, self.plain = strict, plain

    def __getitem__(self, batch):
        if self.strict and any(index == 7 for _, index in batch):
            return DataError("seven")
        values = torch.tensor([index + 100 * epoch for epoch, index in batch])
        images = values.view(-1, 1, 1, 1).expand(-1, 4, 5, 3).to(torch.float32)
        index = torch.tensor([index for _, index in batch])
        faults = [("three", "no good")] if any(index == 3 for _, index in batch) else []
        return ((images, index) if self.plain else Pair(images, index)), faults


def loader(workers: int = 0, train: bool = True, rank: int = 0, world: int = 1, **options) -> WorkerLoader:
    plan = Plan(10, 2, train, 5, rank, world)
    return WorkerLoader(Numbers(), plan, torch.device("cpu"), NumberDataset(**options), workers, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_resume_and_faults(workers):
    one = loader(workers)
    seen = {}
    for epoch in (0, 1):
        one.set_epoch(epoch)
        batches = list(one)
        assert all(isinstance(batch, Pair) and batch.images.shape == (2, 3, 4, 5) for batch in batches)
        assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)
        seen[epoch] = [batch.images[:, 0, 0, 0].tolist() for batch in batches]
        assert sorted(itertools.chain(*seen[epoch])) == [100 * epoch + n for n in range(10)]
    one.set_epoch(1, 3)
    assert [batch.images[:, 0, 0, 0].tolist() for batch in one] == seen[1][3:]
    assert one.skipped == [("three", "no good")]  # once, though it came in two epochs and more
    one.close()
    ranks = [[batch.index.tolist() for batch in loader(workers, rank=rank, world=2)] for rank in (0, 1)]
    order = [int(value) for batch in seen[0] for value in batch]
    assert [a + b for a, b in zip(*ranks, strict=True)] == [order[:4], order[4:8]]


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_come_as_they_are(workers):
    one = loader(workers, strict=True)
    with pytest.raises(DataError, match="^seven$"):
        list(one)
    one.close()


def test_evaluation_is_filled_up():
    for world in (1, 2, 3):
        found = [[b.index.tolist() for b in loader(train=False, rank=rank, world=world)] for rank in range(world)]
        assert len({len(batches) for batches in found}) == 1
        assert sorted(i for batches in found for batch in batches for i in batch if i >= 0) == list(range(10))


def test_plain_tuples_stay_tuples():
    batch = next(iter(loader(plain=True)))
    assert type(batch) is tuple and len(batch) == 2
    moved = next(to_device(iter([Pair(torch.ones(1), torch.zeros(2))]), torch.device("cpu")))
    assert isinstance(moved, Pair) and type(rebuild((1, 2), iter((3, 4)))) is tuple


def test_a_loader_dropped_in_the_middle_leaves_its_workers_at_once():
    one = loader(2)
    iterator = iter(one)
    next(iterator)
    started = time.monotonic()
    del one, iterator
    gc.collect()
    assert time.monotonic() - started < 4


def test_set_epoch_is_checked():
    with pytest.raises(ValueError, match="start_batch 6 is not within the epoch's 5 batches"):
        loader().set_epoch(0, 6)
    with pytest.raises(DataError, match="lower --batch_size to 5"):
        Plan(10, 20, True, world_size=2)
    assert np.array_equal(*(np.concatenate(list(Plan(10, 5, True, 1).batches(3))) for _ in range(2)))
