"""Batches of molecules in the order of a plan, gathered where the molecules are: on the device if they fit there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlx.loading import Plan

from . import buckets
from .molecules import Batch, Collator


class MoleculeLoader:
    """Training batches, or (batch, rows) of an evaluation in which every molecule comes once over all processes.

    ``padded``: batches in a few sizes (see `buckets`), for CUDA graphs. A training batch has ``batch_size`` molecules.
    """

    def __init__(self, collate: Collator, plan: Plan, padded: bool = False):
        self.collate, self.plan, self.padded = collate, plan, padded
        self.num_samples, self.batch_size = plan.count, plan.batch_size
        self.skipped: list[tuple[str, str]] = []
        self.epoch, self.start_batch = 0, 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.plan)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """What the next iteration goes through: this epoch from batch `start_batch` on."""
        if not 0 <= start_batch <= len(self):
            raise ValueError(f"start_batch {start_batch} is not within the epoch's {len(self)} batches")
        self.epoch, self.start_batch = epoch, start_batch

    def __iter__(self) -> Iterator[Batch | tuple[Batch, np.ndarray]]:
        for indices in self.plan.batches(self.epoch, self.start_batch):
            rows = indices[indices >= 0]
            if not len(rows):  # the last batch of an evaluation has nothing for this process
                continue
            batch = self.collate(rows)
            batch = buckets.pad_to_bucket(batch) if self.padded else batch
            yield batch if self.plan.train else (batch, rows)

    def close(self) -> None:
        """There are no worker processes."""
