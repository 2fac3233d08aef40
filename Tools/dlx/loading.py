"""What all loaders share: which samples a rank takes in which order, the interface, the way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from . import draws

Batch = tuple[torch.Tensor, torch.Tensor]


class DataError(ValueError):
    """Data that cannot be trained on; the message lists every fault with its path."""


class Split(Protocol):
    """One split of a data set: `folder.Samples`, `memory.Tensors` or `memory.Synthetic`."""

    name: str
    classes: list[str]
    skipped: list[tuple[str, str]]

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Plan:
    """Which samples a rank takes in each batch of an epoch."""

    count: int
    batch_size: int
    train: bool
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not within a world of {self.world_size}")
        if self.count < 1:
            raise DataError("the split holds no samples")
        if self.train and self.count < self.global_batch_size:
            largest = self.count // self.world_size
            advice = f"lower --batch_size to {largest} or less" if largest else "start fewer processes"
            raise DataError(
                f"{self.count} training samples do not fill one global batch of {self.global_batch_size} "
                f"({self.world_size} x batch_size {self.batch_size}): {advice}"
            )

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches per epoch, equal on all ranks."""
        whole, rest = divmod(self.count, self.global_batch_size)
        return whole if self.train else whole + bool(rest)

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """int64 (batch_size,) per batch; -1 where an evaluation batch has nothing left."""
        if self.train:
            order = draws.permutation(self.seed, epoch, self.count)
        else:
            order = np.arange(self.count)
        for batch in range(start, len(self)):
            first = batch * self.global_batch_size
            if self.train:
                first += self.rank * self.batch_size
                yield order[first : first + self.batch_size]
            else:
                mine = order[first : first + self.global_batch_size][self.rank :: self.world_size]
                yield np.pad(mine, (0, self.batch_size - len(mine)), constant_values=-1)


class Loader:
    """What all loaders share. `skipped` collects (path, reason) of unreadable files in tolerant mode."""

    def __init__(self, split: Split, plan: Plan, device: torch.device) -> None:
        self.split, self.plan, self.device = split, plan, device
        self.classes, self.num_samples = split.classes, len(split)
        self.batch_size = plan.batch_size
        self.skipped = list(split.skipped)
        self.epoch, self.start_batch = 0, 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.plan)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """What the next iteration goes through: this epoch from batch `start_batch` on."""
        if not 0 <= start_batch <= len(self):
            raise ValueError(f"start_batch {start_batch} is not within the epoch's {len(self)} batches")
        self.epoch, self.start_batch = epoch, start_batch

    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError

    def close(self) -> None:
        """Stop worker processes and free what the loader holds."""


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`. On a GPU, the copy of the next one runs on a stream of its own during the step."""
    if device.type != "cuda":
        for images, labels in batches:
            yield images.to(device), labels.to(device)
        return
    stream = torch.cuda.Stream(device)
    waiting: Batch | None = None
    for images, labels in batches:
        with torch.cuda.stream(stream):
            following = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        if waiting is not None:
            yield waiting
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in following:
            tensor.record_stream(torch.cuda.current_stream(device))
        waiting = following
    if waiting is not None:
        yield waiting
