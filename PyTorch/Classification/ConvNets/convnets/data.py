"""One loader interface for every source of pictures: class folders (Pillow or DALI), Fashion-MNIST, synthetic.

    loader = build_loader("train", data="/data/mine", batch_size=64, image_size=224, train=True, seed=1)
    loader.set_epoch(3, start_batch=10)                 # resume in the middle of epoch 3
    for images, labels in loader: ...                   # uint8 (N, C, H, W) in channels_last order, int64 (N,)

Order and augmentation depend only on (seed, epoch, sample index). In training, the global batch number b of an epoch is
the same samples for any number of ranks, and the ragged tail is dropped. In evaluation every sample comes exactly once
over all ranks; the last batch is filled up with samples labelled -1, so that all ranks see equally many full batches.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from dlx import vision
from dlx.draws import draws
from dlx.loading import Batch, DataError, Loader, Plan, Split, WorkerLoader

from . import augment, folder, memory
from .folder import Samples

BACKENDS = ("pytorch", "dali-cpu", "dali-gpu", "synthetic")


def open_data(
    data: str | os.PathLike[str],
    *,
    home: str | os.PathLike[str] | None = None,
    tolerant: bool = False,
    check: str = "headers",
    num_classes: int = 1000,
    num_samples: int = 12800,
    channels: int = 3,
) -> dict[str, Split]:
    """The splits of "fashion-mnist", "foolbox-images", "synthetic" or a folder (see `folder.read_folder`).

    Give the result to `build_loader` as `data` to read and validate only once. The last three are for "synthetic".
    """
    if data == "fashion-mnist":
        return dict(memory.read_fashion_mnist(home=home))
    if data == "foolbox-images":
        return dict(folder.read_foolbox_images(home=home))
    if data == "synthetic":
        classes = [f"class_{number}" for number in range(num_classes)]
        return {name: memory.Synthetic(name, classes, num_samples, channels) for name in ("train", "val")}
    return dict(folder.read_folder(data, tolerant=tolerant, check=check))


def split_of(data: dict[str, Split], name: str) -> Split:
    """DataError with the names there are, if `name` is not one."""
    if name not in data:
        raise DataError(f"the data has no split {name!r}, only {', '.join(data)}")
    return data[name]


# Files through Pillow

Item = tuple[Batch, list[tuple[str, str]]]


class PictureDataset(torch.utils.data.Dataset):
    """Decodes and augments lists of (epoch, sample index); index -1 gives an empty sample labelled -1.

    One item is ((uint8 images (N, size, size, 3), int64 labels (N,)), [(path, reason), ...] of the unreadable ones).
    These are an error unless `tolerant`; then a training sample is replaced by the next readable one, an evaluation
    sample is labelled -1.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        train: bool,
        size: int,
        resize: int,
        augmentation: str,
        interpolation: str,
        seed: int,
        tolerant: bool,
    ) -> None:
        self.samples, self.train, self.size, self.resize = samples, train, size, resize
        self.augmentation, self.interpolation, self.seed = augmentation, interpolation, seed
        self.tolerant = tolerant

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, batch: list[tuple[int, int]]) -> Item | DataError:
        """An error is returned, not raised: torch would wrap one of a worker process into its traceback."""
        try:
            return self.read(batch)
        except DataError as error:
            return error

    def read(self, batch: list[tuple[int, int]]) -> Item:
        images = np.zeros((len(batch), self.size, self.size, 3), np.uint8)
        labels = np.full(len(batch), -1, np.int64)
        faults: list[tuple[str, str]] = []
        for row, (epoch, index) in enumerate(batch):
            if index < 0:
                continue
            attempts = len(self.samples) if self.tolerant and self.train else 1
            for attempt in range(attempts):
                sample = (index + attempt) % len(self.samples)
                try:
                    images[row] = self.picture(epoch, sample)
                    labels[row] = self.samples.labels[sample]
                    break
                except ValueError as error:
                    if not self.tolerant:
                        raise DataError(str(error)) from None
                    faults.append((self.samples.paths[sample], str(error)))
            if self.train and labels[row] < 0:
                raise DataError(f"not one of the {len(self.samples)} pictures can be read; {faults[0][1]}")
        return (torch.from_numpy(images), torch.from_numpy(labels)), faults

    def picture(self, epoch: int, index: int) -> np.ndarray:
        """uint8 (size, size, 3)."""
        image = vision.decode_image(self.samples.paths[index])
        if not self.train or self.augmentation == "none":
            return np.asarray(vision.resize_and_crop(image, self.resize, self.size, self.interpolation))
        values = draws(self.seed, epoch, index, augment.GEOMETRY_DRAWS)[0]
        resample = vision.INTERPOLATIONS[self.interpolation]
        image = augment.random_resized_crop(image, self.size, values, resample)
        if self.augmentation == "autoaugment":
            values = draws(self.seed, epoch, index, augment.POLICY_DRAWS, augment.POLICY)[0]
            image = augment.auto_augment(image, values)
        pixels = np.array(image)
        if self.augmentation == "erase":
            values = draws(self.seed, epoch, index, augment.ERASE_DRAWS, augment.ERASE)
            left, top, width, height = augment.erase_boxes(self.size, self.size, values)[0]
            pixels[top : top + height, left : left + width] = 0
        return pixels


# The one entry


def build_loader(
    split: str,
    *,
    data: str | os.PathLike[str] | dict[str, Split],
    batch_size: int,
    image_size: int,
    train: bool,
    backend: str = "pytorch",
    seed: int = 0,
    epoch: int = 0,
    start_batch: int = 0,
    workers: int = 0,
    prefetch: int = 2,
    world_rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
    augmentation: str = "standard",
    interpolation: str = "bilinear",
    resize: int | None = None,
    channels: int | None = None,
    tolerant: bool = False,
    home: str | os.PathLike[str] | None = None,
) -> Loader:
    """The loader of a split ("train" or "val") on one rank; images and labels arrive on `device`.

    `data`: see `open_data`, or its result. `augmentation` (training only): "none", "standard" (RandomResizedCrop and
    flip; shift and flip for data in memory), "autoaugment", "erase". Evaluation scales the short side to `resize`
    (image_size + 32, or image_size below 64) and crops the centre. `workers`: processes, or DALI's threads.
    """
    if backend not in BACKENDS:
        raise ValueError(f"data backend {backend!r} is none of {', '.join(BACKENDS)}")
    if augmentation not in augment.AUGMENTATIONS:
        raise ValueError(f"augmentation {augmentation!r} is none of {', '.join(augment.AUGMENTATIONS)}")
    if interpolation not in vision.INTERPOLATIONS:
        raise ValueError(f"interpolation {interpolation!r} is none of {', '.join(vision.INTERPOLATIONS)}")
    resize = resize or (image_size + 32 if image_size >= 64 else image_size)
    if resize < image_size:
        raise ValueError(f"resize {resize} is smaller than image_size {image_size}")
    if not isinstance(data, dict):
        # DALI cannot pass over a bad file in the middle of a batch, so all must be known before.
        check = "full" if tolerant and backend.startswith("dali") else "headers"
        data = open_data(data, home=home, tolerant=tolerant, check=check)
    chosen = split_of(data, split)
    device = torch.device(device)
    plan = Plan(len(chosen), batch_size, train, seed, world_rank, world_size)
    loader: Loader
    if backend == "synthetic" or isinstance(chosen, memory.Synthetic):
        loader = memory.SyntheticLoader(chosen, plan, device, size=image_size, channels=channels or _channels(chosen))
    elif isinstance(chosen, memory.Tensors):
        if backend != "pytorch":
            raise ValueError(f"data backend {backend!r} reads picture files; {chosen.name} is in memory: use 'pytorch'")
        channels = channels or _channels(chosen)
        loader = memory.TensorLoader(
            chosen, plan, device, size=image_size, channels=channels, augmentation=augmentation
        )
    else:
        if channels not in (None, 3):
            raise ValueError(f"picture files give 3 channels, not {channels}")
        options: dict[str, Any] = {
            "train": train, "size": image_size, "resize": resize, "augmentation": augmentation,
            "interpolation": interpolation, "seed": seed, "tolerant": tolerant,
        }  # fmt: skip
        if backend == "pytorch":
            loader = WorkerLoader(chosen, plan, device, PictureDataset(chosen, **options), workers, prefetch)
        else:
            from . import dali

            loader = dali.DaliLoader(
                chosen, plan, device, backend=backend, workers=workers, prefetch=prefetch, **options
            )
    loader.set_epoch(epoch, start_batch)
    return loader


def _channels(split: Split) -> int:
    if isinstance(split, memory.Tensors):
        return split.images.shape[-1]
    return split.channels if isinstance(split, memory.Synthetic) else 3
