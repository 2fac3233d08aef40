"""Pictures that are in memory: Fashion-MNIST, whole on the device and augmented there, and synthetic ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from dlx import data as datasets
from dlx.draws import draws
from dlx.loading import Batch, DataError, Loader, Plan, Split

from . import augment

FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


@dataclass
class Tensors:
    """A split held in memory: uint8 images (N, H, W, C), int64 labels (N,)."""

    name: str
    classes: list[str]
    images: torch.Tensor
    labels: torch.Tensor
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)


@dataclass
class Synthetic:
    """Pictures made up from their label, so that a model can learn them; `size` samples."""

    name: str
    classes: list[str]
    size: int
    channels: int = 3
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size


def read_fashion_mnist(*, home: str | os.PathLike[str] | None = None) -> dict[str, Tensors]:
    """The 60,000 training and 10,000 test pictures (28x28 grey), fetched if they are not here."""
    where = datasets.prepare("fashion-mnist", home=home)
    splits: dict[str, Tensors] = {}
    for name, prefix in (("train", "train"), ("val", "t10k")):
        images = datasets.read_idx(where / f"{prefix}-images-idx3-ubyte.gz")
        labels = datasets.read_idx(where / f"{prefix}-labels-idx1-ubyte.gz")
        if len(images) != len(labels):
            raise DataError(f"{where}: {len(images)} {name} images but {len(labels)} labels")
        tensors = torch.from_numpy(images)[..., None], torch.from_numpy(labels.astype(np.int64))
        splits[name] = Tensors(name, FASHION_CLASSES, *tensors)
    return splits


class TensorLoader(Loader):
    """A split that lies on the device whole; augmentation there, on whole batches, from the draws of the epoch.

    "standard": shifted by up to two pixels (black comes in) and mirrored; "erase": also random erasing with black.
    """

    SHIFT = 2

    def __init__(
        self, split: Tensors, plan: Plan, device: torch.device, *, size: int, channels: int, augmentation: str
    ) -> None:
        super().__init__(split, plan, device)
        if augmentation == "autoaugment":
            raise ValueError("augmentation 'autoaugment' works on picture files; for data in memory use 'erase'")
        if channels not in (split.images.shape[-1], 3 * split.images.shape[-1]):
            raise ValueError(f"cannot make {channels} channels of {split.images.shape[-1]}")
        self.size, self.channels, self.augmentation = size, channels, augmentation
        images = split.images.permute(0, 3, 1, 2)
        margin = (size - images.shape[-1]) // 2
        if 0 < margin <= 4:  # 28 -> 32: a border is better than a blur
            images = torch.nn.functional.pad(images, [margin, size - images.shape[-1] - margin] * 2)
        shift = self.SHIFT if plan.train and augmentation != "none" else 0
        self.images = torch.nn.functional.pad(images, [shift] * 4).contiguous().to(device)
        self.labels = split.labels.to(device)
        self.height, self.width = images.shape[-2:]

    def __iter__(self) -> Iterator[Batch]:
        plan = self.plan
        order = list(plan.batches(self.epoch, self.start_batch))
        if not order:
            return
        indices = torch.from_numpy(np.concatenate(order)).to(self.device)
        changes = None
        if plan.train and self.augmentation != "none":
            changes = self._changes(np.concatenate(order))
        for batch in range(len(order)):
            rows = slice(batch * plan.batch_size, (batch + 1) * plan.batch_size)
            chosen = indices[rows]
            labels = torch.where(chosen >= 0, self.labels[chosen], -1)
            images = self.images[chosen] if changes is None else self._augmented(chosen, changes[rows])
            yield self._sized(images), labels

    def _changes(self, indices: np.ndarray) -> torch.Tensor:
        """int64 (N, 7): row and column offset, mirrored?, box to erase."""
        steps = 2 * self.SHIFT + 1
        values = draws(self.plan.seed, self.epoch, indices, 3)
        shifts = np.floor(values[:, :2] * steps)
        boxes = np.zeros((len(indices), 4), np.int64)
        if self.augmentation == "erase":
            erasing = draws(self.plan.seed, self.epoch, indices, augment.ERASE_DRAWS, augment.ERASE)
            boxes = augment.erase_boxes(self.width, self.height, erasing)
        table = np.concatenate([shifts, values[:, 2:] < 0.5, boxes], 1).astype(np.int64)
        return torch.from_numpy(table).to(self.device)

    def _augmented(self, chosen: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
        across = torch.arange(self.width, device=self.device)
        down = torch.arange(self.height, device=self.device)
        columns = torch.where(changes[:, 2:3] > 0, across.flip(0), across) + changes[:, 1:2]
        rows = down + changes[:, 0:1]
        images = self.images[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # NHWC
        if self.augmentation == "erase":
            left, top, width, height = (changes[:, column : column + 1] for column in range(3, 7))
            erased = ((across >= left) & (across < left + width))[:, None, :]
            erased = erased & ((down >= top) & (down < top + height))[:, :, None]
            images = images.masked_fill(erased[..., None], 0)
        return images.permute(0, 3, 1, 2)

    def _sized(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-1] != self.size:
            scaled = torch.nn.functional.interpolate(
                images.float(), size=(self.size, self.size), mode="bilinear", antialias=True, align_corners=False
            )
            images = scaled.round_().clamp_(0, 255).to(torch.uint8)
        if images.shape[1] != self.channels:
            images = images.expand(-1, self.channels, -1, -1)
        return images.contiguous(memory_format=torch.channels_last)


class SyntheticLoader(Loader):
    """One batch, made once and given again and again: the speed of a training without its input."""

    def __init__(self, split: Split, plan: Plan, device: torch.device, *, size: int, channels: int) -> None:
        super().__init__(split, plan, device)
        generator = torch.Generator().manual_seed(plan.seed + plan.rank)
        classes = len(split.classes)
        labels = torch.randint(classes, (plan.batch_size,), generator=generator)
        coarse = torch.Generator().manual_seed(plan.seed)
        templates = torch.rand((classes, channels, 4, 4), generator=coarse)[labels]
        pictures = torch.nn.functional.interpolate(templates, size=(size, size), mode="nearest")
        pictures = (pictures + 0.25 * torch.randn((plan.batch_size, channels, size, size), generator=generator)) * 255
        self.images = pictures.clamp_(0, 255).to(torch.uint8).contiguous(memory_format=torch.channels_last).to(device)
        self.labels = labels.to(device)

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.plan.batches(self.epoch, self.start_batch):
            if (indices >= 0).all():
                yield self.images, self.labels
            else:
                valid = torch.from_numpy(indices >= 0).to(self.device)
                yield self.images, torch.where(valid, self.labels, -1)
