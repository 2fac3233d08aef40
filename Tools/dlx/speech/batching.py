"""Batches of utterances: which go together, and how a batch is padded.

`BucketPlan` puts utterances of like length into a batch, so that little is padded, and is a function of (seed, epoch)
alone, so that a run resumes in the middle of an epoch with the batches it would have had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dlx import draws
from dlx.loading import DataError, Plan

STREAM = 44  # of the draws that order the batches of an epoch

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BucketPlan(Plan):
    """A `Plan` whose batches hold utterances of like `lengths` (N,).

    Training: the epoch's permutation is cut into windows of `window` global batches, each window is sorted by length
    and cut into global batches, and these come in an order drawn for the epoch; the ranks share a global batch. With
    `window` 1 lengths play no part. Evaluation: from the longest to the shortest.
    """

    lengths: np.ndarray | Sequence[int] = ()
    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lengths) != self.count:
            raise ValueError(f"{len(self.lengths)} lengths of {self.count} utterances")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """int64 (batch_size,) per batch; -1 where an evaluation batch has nothing left."""
        lengths = np.asarray(self.lengths)
        if not self.train:
            order = np.argsort(-lengths, kind="stable")
            for batch in range(start, len(self)):
                first = batch * self.global_batch_size
                mine = order[first : first + self.global_batch_size][self.rank :: self.world_size]
                yield np.pad(mine, (0, self.batch_size - len(mine)), constant_values=-1)
            return
        order = draws.permutation(self.seed, epoch, self.count)[: len(self) * self.global_batch_size]
        if self.window > 1:
            width = self.window * self.global_batch_size
            windows = [order[first : first + width] for first in range(0, len(order), width)]
            order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in windows])
        turns = draws.permutation(self.seed, epoch, len(self), STREAM) if self.window > 1 else np.arange(len(self))
        for batch in turns[start:].tolist():
            whole = order[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]
            yield whole[self.rank :: self.world_size]


def bucket(length: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `length`, or `length` itself when there are none.

    DataError when it is longer than all.
    """
    if not sizes:
        return length
    found = next((size for size in sizes if size >= length), None)
    if found is None:
        raise DataError(f"a length of {length} is over the largest bucket, {sizes[-1]}")
    return found


def pad(rows: Sequence[np.ndarray], length: int, value: float = 0.0) -> Tensor:
    """Arrays (..., L) of one dtype and of different lengths as one tensor (B, ..., length)."""
    shape = (len(rows), *rows[0].shape[:-1], length)
    padded = np.full(shape, value, rows[0].dtype)
    for number, row in enumerate(rows):
        padded[number, ..., : row.shape[-1]] = row
    return torch.from_numpy(padded)


def ahead(jobs: Iterator[Any], work: Callable[[Any], T], threads: int, depth: int = 4) -> Iterator[T]:
    """`work(job)` of each job in their order, up to `depth` of them done beforehand by threads; 0 threads: one by one.

    An exception of a job is raised when its turn comes; jobs not begun are dropped when the iteration ends.
    """
    if threads == 0:
        yield from map(work, jobs)
        return
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="loader")
    try:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
