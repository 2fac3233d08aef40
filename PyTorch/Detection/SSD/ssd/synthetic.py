"""Made-up batches: the speed of a training or an evaluation without its input."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dlx.loading import Loader, Plan

from .pictures import Batch, EvalBatch
from .splits import AnySplit, Synthetic

OBJECTS = 8


def random_objects(
    batch: int, count: int, num_classes: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes (batch, count, 4) of 0.1 to 0.5 of the picture a side, and labels (batch, count) from 1 on."""
    sides = 0.1 + 0.4 * torch.rand((batch, count, 2), generator=generator)
    corners = torch.rand((batch, count, 2), generator=generator) * (1 - sides)
    return torch.cat([corners, corners + sides], -1), torch.randint(
        1, num_classes + 1, (batch, count), generator=generator
    )


class SyntheticLoader(Loader):
    """One batch, made once and given again and again."""

    def __init__(self, split: AnySplit, plan: Plan, device: torch.device, *, size: int, train: bool) -> None:
        super().__init__(split, plan, device)
        generator = torch.Generator().manual_seed(plan.seed + plan.rank)
        count = split.objects if isinstance(split, Synthetic) else OBJECTS
        images = torch.randint(256, (plan.batch_size, 3, size, size), dtype=torch.uint8, generator=generator)
        images = images.contiguous(memory_format=torch.channels_last)
        batch = Batch(images, *random_objects(plan.batch_size, count, len(split.classes), generator))
        self.batch = Batch(*(tensor.to(device) for tensor in batch))
        self.train = train

    def __iter__(self) -> Iterator[Batch | EvalBatch]:
        for indices in self.plan.batches(self.epoch, self.start_batch):
            yield self.batch if self.train else EvalBatch(self.batch.images, torch.from_numpy(indices).to(self.device))
