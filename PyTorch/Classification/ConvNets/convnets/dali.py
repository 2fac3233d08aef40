"""The same pictures through NVIDIA DALI: `dali-cpu` decodes on the processor, `dali-gpu` on the GPU (nvJPEG).

Order, crop boxes and flips come from `augment`, as in the Pillow loader, and reach the pipeline as its inputs; so both
give the same picture for a sample, up to the rounding of the resize, the rim of a box cut out of a JPEG with subsampled
colours, and nvJPEG.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dlx import dali, vision
from dlx.draws import draws
from dlx.loading import Batch, Plan

from . import augment, device_augment
from .folder import Samples


class DaliLoader(dali.DaliLoader):
    """`decode_box`: decode only the part of each JPEG that is needed, else all of it, then cut. The first saves work on
    a processor; on a GPU, where a fixed unit decodes whole pictures, a benchmark decides.
    """

    decode_box = True

    def __init__(
        self,
        split: Samples,
        plan: Plan,
        device: torch.device,
        *,
        backend: str,
        train: bool,
        size: int,
        resize: int,
        augmentation: str,
        interpolation: str,
        seed: int,
        tolerant: bool,
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        if interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation {interpolation!r} needs data backend 'pytorch', not {backend!r}")
        options: dict[str, Any] = {"backend": backend, "workers": workers, "prefetch": prefetch}
        super().__init__(split, plan, device, plain=split.plain, **options)
        self.augmented = train and augmentation != "none"
        self.augmentation = augmentation if train else "none"
        self.size, self.resize, self.interpolation, self.seed = size, resize, interpolation, seed

    def path(self, index: int) -> str:
        return self.split.paths[index]

    def inputs(self, epoch: int, rows: np.ndarray) -> tuple[Any, ...]:
        """Start and shape of the box to decode, start and end of the part of it that is scaled to the output, whether
        to mirror.
        """
        sizes = self.split.sizes[rows].astype(np.int64)
        if self.augmented:
            values = draws(self.seed, epoch, rows, augment.GEOMETRY_DRAWS)
            boxes = augment.crop_boxes(sizes, values)
            flips = augment.flips(values)
        else:
            boxes = np.concatenate([np.zeros_like(sizes), sizes], 1)
            flips = np.zeros(len(rows), bool)
        starts, shapes = boxes[:, [1, 0]], boxes[:, [3, 2]]
        inner = [np.zeros(shapes.shape), shapes] if self.augmented else self._evaluation_parts(shapes)
        boxes = [np.ascontiguousarray(values, np.int32) for values in (starts, shapes)]
        return *boxes, *(np.ascontiguousarray(v, np.float32) for v in inner), flips.astype(np.int32)

    def _evaluation_parts(self, shapes: np.ndarray) -> list[np.ndarray]:
        """Start and end (height, width) of what `vision.resize_and_crop` shows of pictures of these shapes.

        Scaling only this part spares the memory that the whole of a very long picture would take.
        """
        whole = np.array([vision.short_side_sizes(*shape, self.resize) for shape in shapes.tolist()])
        corners = (whole - self.size) // 2
        return [edge * shapes / whole for edge in (corners, corners + self.size)]

    def define(
        self, dali: Any, packed: Any, starts: Any, shapes: Any, inner_starts: Any, inner_ends: Any, flips: Any
    ) -> tuple[Any, ...]:
        fn, types = dali.fn, dali.types
        kinds = {"bilinear": types.INTERP_TRIANGULAR, "bicubic": types.INTERP_CUBIC}
        box = {"start": starts, "shape": shapes, "axes": [0, 1]}
        if self.decode_box:
            images = fn.decoders.image_slice(packed, **box, **self.decoding(dali))
        else:
            images = fn.slice(fn.decoders.image(packed, **self.decoding(dali)), **box)
        part = {"roi_start": inner_starts, "roi_end": inner_ends, "size": [self.size, self.size]}
        images = fn.resize(images, **part, interp_type=kinds[self.interpolation], antialias=True)
        return (fn.flip(images, horizontal=flips),)

    def finish(self, indices: np.ndarray, outputs: list[torch.Tensor]) -> Batch:
        labels = torch.from_numpy(np.where(indices >= 0, self.split.labels[indices], -1))
        return outputs[0].permute(0, 3, 1, 2), self.to_loader(labels)

    def __iter__(self) -> Iterator[Batch]:
        """AutoAugment and erasing are done on the device, on whole batches."""
        epoch, plan = self.epoch, self.plan
        for indices, (images, labels) in zip(plan.batches(epoch, self.start_batch), super().__iter__(), strict=True):
            if self.augmentation == "autoaugment":
                values = draws(self.seed, epoch, indices, augment.POLICY_DRAWS, augment.POLICY)
                images = device_augment.auto_augment(images, values)
            elif self.augmentation == "erase":
                values = draws(self.seed, epoch, indices, augment.ERASE_DRAWS, augment.ERASE)
                images = device_augment.erase(images, values)
            yield images, labels
