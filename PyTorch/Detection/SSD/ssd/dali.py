"""DALI's back ends: `dali-cpu` and `dali-gpu` from one definition, which does what `pictures` does from the same draws.

Only the part of a JPEG that lies inside the crop is decoded. It is scaled to the rectangle that it fills in the input,
its colours are changed, and the rest is filled with the mean: so a zoomed-out picture costs less, not more. Pixels
differ from Pillow's by the rounding of the resize, stretched by the contrast, and at the rim of a part cut out of a
JPEG with subsampled colours; on the GPU by nvJPEG, too. Boxes are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from dlx import dali
from dlx.loading import DataError, Plan

from . import geometry
from .pictures import FILL, Batch, EvalBatch, Samples, training_samples
from .splits import Split

CRITERIA = 0.5  # a default box learns the object that it overlaps by more than this
STDS = [0.1, 0.1, 0.2, 0.2]


class EncodedBatch(NamedTuple):
    """A `Batch`, and float32 N A 4 offsets of each default box to its object, int64 N A labels (0: background)."""

    images: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor
    offsets: torch.Tensor
    targets: torch.Tensor


class DaliLoader(dali.DaliLoader):
    """`anchors` (A, 4 corners): give `EncodedBatch`es, matched and encoded by DALI.

    `decode_box`: decode only the part of each JPEG that is needed, else all of it, then cut. The first saves work on a
    processor; on a GPU, where a fixed unit decodes whole pictures, a benchmark decides.
    """

    decode_box = True

    def __init__(
        self,
        split: Split,
        plan: Plan,
        device: torch.device,
        *,
        backend: str,
        train: bool,
        size: int,
        augmentation: str,
        seed: int,
        tolerant: bool,
        anchors: np.ndarray | None = None,
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        options: dict[str, Any] = {"backend": backend, "workers": workers, "prefetch": prefetch}
        super().__init__(split, plan, device, plain=split.annotations.plain, **options)
        self.train, self.size, self.augmentation, self.seed = train, size, augmentation, seed
        self.anchors = np.asarray(anchors, np.float32) if train and anchors is not None else None
        stored, turned = split.annotations.orientations != 1, split.annotations.turned
        if stored.any() and turned.any():
            one, other = (self.path(int(np.flatnonzero(which)[0])) for which in (stored, turned))
            raise DataError(
                f"boxes follow the EXIF orientation in {other} but not in {one}; DALI treats all pictures alike: "
                "use --data_backend pytorch"
            )
        self.upright = not stored.any()

    def path(self, index: int) -> str:
        return self.split.annotations.picture_path(index)

    def inputs(self, epoch: int, rows: np.ndarray) -> tuple[Any, ...]:
        """Start and shape of the part to decode, its size in the input, whether to mirror; in training also its place
        there, the colour changes, boxes and labels, and those of each sample without padding where DALI encodes them.
        """
        if not self.train:
            return self._cut(geometry.whole(self.split.annotations.sizes[rows], self.size))
        samples = training_samples(self.split, epoch, rows, self.seed, self.size, self.augmentation)
        changes = (*self._place(samples.cuts), *self._colours(samples))
        return *self._cut(samples.cuts), *changes, samples.boxes, samples.labels, *self._objects(samples)

    def _cut(self, cuts: geometry.Cuts) -> tuple[np.ndarray, ...]:
        start, shape = cuts.sources[:, [1, 0]], cuts.sources[:, [3, 2]]
        parts = [np.ascontiguousarray(values, np.int32) for values in (start, shape)]
        return *parts, np.ascontiguousarray(cuts.targets[:, [3, 2]], np.float32), cuts.flips.astype(np.int32)

    def _place(self, cuts: geometry.Cuts) -> tuple[np.ndarray, ...]:
        return (np.ascontiguousarray(-cuts.targets[:, [1, 0]], np.int32),) if self.augmentation == "ssd" else ()

    def _colours(self, samples: Samples) -> tuple[np.ndarray, ...]:
        return () if samples.changes is None else tuple(np.ascontiguousarray(c) for c in samples.changes.T)

    def _objects(self, samples: Samples) -> tuple[list[np.ndarray], ...]:
        if self.anchors is None:
            return ()
        counts = (samples.labels > 0).sum(1)
        boxes = [boxes[:count] for boxes, count in zip(samples.boxes, counts, strict=True)]
        labels = [labels[:count].astype(np.int32) for labels, count in zip(samples.labels, counts, strict=True)]
        return boxes, labels

    def define(
        self, dali: Any, packed: Any, start: Any, shape: Any, size: Any, flips: Any, *others: Any
    ) -> tuple[Any, ...]:
        fn, types = dali.fn, dali.types
        box = {"start": start, "shape": shape, "axes": [0, 1]}
        decoding = self.decoding(dali) | {"adjust_orientation": self.upright}
        if self.decode_box:
            images = fn.decoders.image_slice(packed, **box, **decoding)
        else:
            images = fn.slice(fn.decoders.image(packed, **decoding), **box)
        images = fn.resize(images, size=size, interp_type=types.INTERP_TRIANGULAR, antialias=True)
        place = None
        if self.train and self.augmentation == "ssd":
            place, *others = others
        if self.train and self.augmentation in ("crop", "ssd"):
            brightness, contrast, saturation, hue, *others = others
            images = fn.color_twist(
                images, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue, dtype=types.UINT8
            )
        if place is not None:
            frame = {"start": place, "shape": [self.size, self.size], "axes": [0, 1]}
            images = fn.slice(images, **frame, out_of_bounds_policy="pad", fill_values=list(FILL))
        images = fn.flip(images, horizontal=flips)
        if not self.train:
            return (images,)
        if self.gpu:
            others = [node.gpu() for node in others]
        boxes, labels, *objects = others
        if not objects:
            return images, boxes, labels
        encoding = {"criteria": CRITERIA, "offset": True, "means": [0.0] * 4, "stds": STDS}
        offsets, targets = fn.box_encoder(*objects, anchors=self.anchors.ravel().tolist(), **encoding)
        return images, boxes, labels, offsets, fn.cast(targets, dtype=types.INT64)

    def finish(self, indices: np.ndarray, outputs: list[torch.Tensor]) -> Batch | EvalBatch | EncodedBatch:
        images, *others = outputs
        images = images.permute(0, 3, 1, 2)
        if not self.train:
            return EvalBatch(images, self.to_loader(torch.from_numpy(indices.copy())))
        return (Batch if len(others) == 2 else EncodedBatch)(images, *others)
