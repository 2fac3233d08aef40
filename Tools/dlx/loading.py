"""What all loaders share: which samples a rank takes in which order, the interface, the way to the device."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from . import draws
from .checkpoint import ignore_stop_signals

Batch = tuple[torch.Tensor, ...]  # images first; may be a named tuple


class DataError(ValueError):
    """Data that cannot be trained on; the message lists every fault with its path."""


class Split(Protocol):
    """One split of a task's data set."""

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


def move(batch: Batch, device: torch.device) -> Batch:
    """A batch of the same kind on `device`; from pinned memory the copy is not waited for."""
    return rebuild(batch, (tensor.to(device, non_blocking=True) for tensor in batch))


def rebuild(batch: Batch, tensors: Iterator[torch.Tensor]) -> Batch:
    """`tensors` in a tuple, or named tuple, like `batch`."""
    return type(batch)(*tensors) if hasattr(batch, "_fields") else tuple(tensors)


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`. On a GPU, the copy of the next one runs on a stream of its own during the step."""
    if device.type != "cuda":
        for batch in batches:
            yield move(batch, device)
        return
    stream = torch.cuda.Stream(device)
    waiting: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            following = move(batch, device)
        if waiting is not None:
            yield waiting
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in following:
            tensor.record_stream(torch.cuda.current_stream(device))
        waiting = following
    if waiting is not None:
        yield waiting


# Worker processes


class _BatchOrder:
    """What torch's DataLoader asks for the next batch; takes the loader's epoch and start as an iteration begins."""

    def __init__(self, loader: Loader) -> None:
        # The loader holds this; a cycle would be collected late, after the queues to its workers, which then never hear
        # that they may leave.
        self.loader = weakref.proxy(loader)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.loader.epoch
        for indices in self.loader.plan.batches(epoch, self.loader.start_batch):
            yield [(epoch, int(index)) for index in indices]

    def __len__(self) -> int:
        return len(self.loader.plan) - self.loader.start_batch


class WorkerLoader(Loader):
    """Batches made by worker processes, or in this one (`workers` 0).

    `dataset[[(epoch, index), ...]]` gives (batch, [(path, reason), ...] of what was left out), where images are
    N H W C and come out as N C H W in channels_last order; or a DataError, returned since torch would wrap one that is
    raised in a worker into its traceback. Index -1 asks for an empty sample.
    """

    def __init__(
        self,
        split: Split,
        plan: Plan,
        device: torch.device,
        dataset: torch.utils.data.Dataset,
        workers: int,
        prefetch: int,
    ) -> None:
        super().__init__(split, plan, device)
        self.batches = torch.utils.data.DataLoader(
            dataset,
            sampler=_BatchOrder(self),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            worker_init_fn=ignore_stop_signals,
            generator=torch.Generator(),  # else every iteration would draw from the global generator
        )
        if workers:
            # When Python ends it sends SIGTERM to the workers that are left and waits; they ignore it, so they must
            # have been asked to leave before. Exit functions run last registered first.
            import multiprocessing.util  # noqa: F401  (registers its own)

            atexit.register(_close, weakref.ref(self))

    def __iter__(self) -> Iterator[Batch]:
        return to_device(self._host_batches(), self.device)

    def _host_batches(self) -> Iterator[Batch]:
        for item in self.batches:
            if isinstance(item, DataError):
                raise item
            batch, faults = item
            known = {path for path, _ in self.skipped}
            self.skipped += [fault for fault in dict(faults).items() if fault[0] not in known]
            images, *others = batch
            yield rebuild(batch, iter((images.permute(0, 3, 1, 2), *others)))

    def close(self) -> None:
        iterator, self.batches._iterator = self.batches._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # dropping it is not enough while an iteration is in somebody's hands


def _close(reference: weakref.ref[WorkerLoader]) -> None:
    loader = reference()
    if loader is not None:
        loader.close()
