"""The same pictures through NVIDIA DALI: `dali-cpu` decodes on the processor, `dali-gpu` on the GPU (nvJPEG).

Order, crop boxes and flips come from `augment`, as in the Pillow loader, and reach the pipeline as its inputs; so both
give the same picture for a sample, up to the rounding of the resize, the rim of a box cut out of a JPEG with subsampled
colours, and nvJPEG. DALI reads the files itself, in threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dlx import vision
from dlx.draws import draws
from dlx.loading import Batch, DataError, Loader, Plan, to_device

from . import augment, device_augment
from .folder import Samples, describe, inspect

if TYPE_CHECKING:
    from nvidia.dali import Pipeline


def _import() -> Any:
    try:
        import nvidia.dali as dali
        import nvidia.dali.fn  # noqa: F401
        import nvidia.dali.types  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the data backends dali-cpu and dali-gpu need NVIDIA DALI: pip install nvidia-dali-cuda130 "
            f"(Linux; see requirements.txt), or use backend 'pytorch' ({error})"
        ) from error
    return dali


class DaliLoader(Loader):
    """Goes on reading ahead into the next epoch, so that there is no pause between two.

    `decode_box`: decode only the part of each JPEG that is needed, else all of it, then cut. The first saves work on a
    processor; on a GPU, where a fixed unit decodes whole pictures, a benchmark decides.
    """

    decode_box = True
    hardware_share = 0.75  # of the pictures, for the GPU's JPEG units; the rest is decoded on its multiprocessors

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
        super().__init__(split, plan, device)
        if interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation {interpolation!r} needs data backend 'pytorch', not {backend!r}")
        special = np.flatnonzero(~split.plain)
        if len(special):
            first = split.paths[special[0]]
            count = f"{len(special)} pictures" if len(special) > 1 else "1 picture"
            raise DataError(
                f"{count} that DALI would not decode like Pillow, the first is {first} "
                f"({describe(first)}); use --data_backend pytorch or convert them"
            )
        if backend == "dali-gpu" and device.type != "cuda":
            raise ValueError(f"data backend 'dali-gpu' needs a CUDA device, not {str(device)!r}; use 'dali-cpu'")
        self.gpu = backend == "dali-gpu"
        self.augmented = train and augmentation != "none"
        self.augmentation = augmentation if train else "none"
        self.size, self.resize, self.interpolation, self.seed = size, resize, interpolation, seed
        self.threads = workers or min(8, os.cpu_count() or 1)
        self.prefetch = max(1, prefetch)
        self.pipeline: Pipeline | None = None
        self.pending: Iterator[tuple[int, np.ndarray]] = iter(())
        self.ahead = 0  # batches that the pipeline was given and has not returned
        self.next_batch = (0, 0)

    # What goes in, on the host

    def _inputs(self) -> tuple[list[np.ndarray] | np.ndarray, ...]:
        """For the next batch: file names, start and shape of the box to decode, start and end of the part of it that is
        scaled to the output, whether to mirror."""
        epoch, indices = next(self.pending)
        self.ahead += 1
        rows = np.where(indices >= 0, indices, 0)  # an empty place gets some picture; its label is -1
        names = [np.frombuffer(os.fsencode(self.split.paths[row]), np.uint8) for row in rows]
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
        return names, *boxes, *(np.ascontiguousarray(v, np.float32) for v in inner), flips.astype(np.int32)

    def _evaluation_parts(self, shapes: np.ndarray) -> list[np.ndarray]:
        """Start and end (height, width) of what `vision.resize_and_crop` shows of pictures of these shapes.

        Scaling only this part spares the memory that the whole of a very long picture would take.
        """
        whole = np.array([vision.short_side_sizes(*shape, self.resize) for shape in shapes.tolist()])
        corners = (whole - self.size) // 2
        return [edge * shapes / whole for edge in (corners, corners + self.size)]

    # The pipeline

    def _build(self) -> Pipeline:
        dali = _import()
        fn, types = dali.fn, dali.types
        kinds = {"bilinear": types.INTERP_TRIANGULAR, "bicubic": types.INTERP_CUBIC}
        pipeline = dali.Pipeline(
            batch_size=self.batch_size,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if self.gpu else None,
            prefetch_queue_depth=self.prefetch,
            exec_dynamic=True,
            seed=0,
        )
        with pipeline:
            names, starts, shapes, inner_starts, inner_ends, flips = fn.external_source(
                source=self._inputs, num_outputs=6, batch=True
            )
            packed = fn.io.file.read(names)
            box = {"start": starts, "shape": shapes, "axes": [0, 1]}
            decoding = {
                "device": "mixed" if self.gpu else "cpu",
                "output_type": types.RGB,
                "hw_decoder_load": self.hardware_share,
            }
            if self.decode_box:
                images = fn.decoders.image_slice(packed, **box, **decoding)
            else:
                images = fn.slice(fn.decoders.image(packed, **decoding), **box)
            part = {"roi_start": inner_starts, "roi_end": inner_ends, "size": [self.size, self.size]}
            images = fn.resize(images, **part, interp_type=kinds[self.interpolation], antialias=True)
            images = fn.flip(images, horizontal=flips)
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline

    # What comes out

    def __iter__(self) -> Iterator[Batch]:
        """AutoAugment and erasing are done on the device, on whole batches."""
        epoch, plan = self.epoch, self.plan
        batches = self._batches() if self.gpu else to_device(self._batches(), self.device)
        for indices, (images, labels) in zip(plan.batches(epoch, self.start_batch), batches, strict=True):
            if self.augmentation == "autoaugment":
                values = draws(self.seed, epoch, indices, augment.POLICY_DRAWS, augment.POLICY)
                images = device_augment.auto_augment(images, values)
            elif self.augmentation == "erase":
                values = draws(self.seed, epoch, indices, augment.ERASE_DRAWS, augment.ERASE)
                images = device_augment.erase(images, values)
            yield images, labels

    def _batches(self) -> Iterator[Batch]:
        pinned = self.device.type == "cuda"
        for indices, pictures in self._runs():
            # DALI's executor leaves an output alone for as long as somebody holds it, so nothing is copied.
            images = torch.from_dlpack(pictures)
            labels = torch.from_numpy(np.where(indices >= 0, self.split.labels[indices], -1))
            if self.gpu:
                labels = labels.pin_memory().to(self.device, non_blocking=True)
            elif pinned:
                images, labels = images.pin_memory(), labels.pin_memory()
            yield images.permute(0, 3, 1, 2), labels

    def _runs(self) -> Iterator[tuple[np.ndarray, Any]]:
        """(sample indices, DALI's tensor NHWC) per batch."""
        epoch = self.epoch if self.plan.train else 0
        if self.pipeline is None:
            self.pending, self.ahead = self._from(epoch, self.start_batch), 0
            self.pipeline = self._build()
        elif self.next_batch != (epoch, self.start_batch):
            stale, self.pending = self.ahead, self._from(epoch, self.start_batch)
            for _ in range(stale):
                self._run()
        self.next_batch = (epoch, self.start_batch)
        following = self._from(epoch, self.start_batch)
        for batch in range(self.start_batch, len(self)):
            _, indices = next(following)
            images = self._run()
            self.next_batch = (epoch, batch + 1) if batch + 1 < len(self) else (epoch + self.plan.train, 0)
            yield indices, images

    def _from(self, epoch: int, start: int) -> Iterator[tuple[int, np.ndarray]]:
        """This epoch from batch `start` on, and all that follow."""
        while True:
            yield from ((epoch, indices) for indices in self.plan.batches(epoch, start))
            epoch, start = epoch + self.plan.train, 0

    def _run(self) -> Any:
        try:
            if self.gpu:
                (images,) = self.pipeline.run(torch.cuda.current_stream(self.device))
            else:
                (images,) = self.pipeline.run()
        except RuntimeError as error:
            self.pipeline = None
            following = self._from(*self.next_batch)
            in_hand = [next(following)[1] for _ in range(self.ahead + 1)]
            raise DataError(self._explain(in_hand, error)) from error
        self.ahead -= 1
        return images.as_tensor()

    def _explain(self, suspects: list[np.ndarray], error: Exception) -> str:
        """DALI names no file; decode those that it had in hand until one fails."""
        for index in (int(index) for indices in suspects for index in indices if index >= 0):
            try:
                inspect(self.split.paths[index], "full")
            except ValueError as reason:
                return str(reason)
        return f"DALI failed: {error}"

    def close(self) -> None:
        self.pipeline = None
