"""The same .rec files through NVIDIA DALI (`readers.mxnet`), for hosts where decoding is what training waits for.

DALI 2 has no plugin for MXNet any more, so its outputs are taken as arrays of the host; `dali-gpu` decodes on the GPU
and copies back. Order and crops are DALI's own, so runs differ from ImageRecordIter's in their randomness, not in what
a label or a pixel of the evaluation is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np

from dlx.draws import draws

from . import recordio
from .data import PAD, SMALL, Batch, Dataset, Loader


def import_dali() -> Any:
    """nvidia.dali with fn and types; an ImportError says how to get it."""
    try:
        import nvidia.dali as dali
        import nvidia.dali.fn  # noqa: F401
        import nvidia.dali.types  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the data backends dali-cpu and dali-gpu need NVIDIA DALI (nvidia-dali-cuda130, Linux); else use "
            f"--data_backend mxnet ({error})"
        ) from error
    return dali


class DaliLoader(Loader):
    """One pipeline an epoch, seeded by (seed, epoch)."""

    def __init__(self, dataset: Dataset, split: str, options: dict[str, Any], gpu: bool, **general: Any) -> None:
        super().__init__(dataset, split, **general)
        self.dali, self.options, self.gpu = import_dali(), options, gpu

    @staticmethod
    def share(count: int, rank: int, num_workers: int) -> int:
        """DALI cuts the file at count * rank / num_workers."""
        return count * (rank + 1) // num_workers - count * rank // num_workers

    def _pipeline(self, number: int) -> Any:
        fn, types = self.dali.fn, self.dali.types
        path = self.dataset.path(self.split)
        size, resize = self.options["size"], self.options["resize"]
        seed = int(draws(self.options["seed"], number, 0, 1)[0, 0] * 2**31)
        augmented = self.train and self.options["augmentation"] == "standard"
        pipeline = self.dali.Pipeline(
            self.batch_size, max(1, self.options["workers"]), 0 if self.gpu else None, seed=seed, exec_dynamic=True
        )
        with pipeline:
            encoded, labels = fn.readers.mxnet(
                path=[str(path)], index_path=[str(recordio.index_path(path))], name="reader",
                random_shuffle=self.train, initial_fill=4096, shard_id=self.rank, num_shards=self.num_workers,
                stick_to_shard=True, pad_last_batch=True,
            )  # fmt: skip
            kind = types.GRAY if self.dataset.channels == 1 else types.RGB
            images = fn.decoders.image(encoded, device="mixed" if self.gpu else "cpu", output_type=kind)
            if augmented and size >= SMALL:
                images = fn.random_resized_crop(
                    images, size=size, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], antialias=False
                )
            else:
                images = fn.resize(images, resize_shorter=resize, interp_type=types.INTERP_LINEAR, antialias=False)
            if augmented and size < SMALL:
                shift = fn.random.uniform(values=list(range(-PAD, PAD + 1)), shape=2, dtype=types.INT32)
                images = fn.slice(images, shift, [size, size], axes=(0, 1), out_of_bounds_policy="pad", fill_values=0)
            mirror = fn.random.coin_flip() if augmented else 0
            images = fn.crop_mirror_normalize(
                images, crop=(size, size), mirror=mirror, dtype=types.FLOAT, output_layout="CHW", mean=[0.0], std=[1.0],
            )  # fmt: skip
            pipeline.set_outputs(images, labels)
        pipeline.build()
        return pipeline

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        try:
            pipeline = self._pipeline(number)
        except RuntimeError as error:
            if not self.gpu:
                raise
            raise ValueError(f"data_backend dali-gpu: DALI can use no GPU here; use dali-cpu ({error})") from None
        for index in range(self.batches):
            images, labels = (np.array(output.as_cpu().as_array()) for output in pipeline.run())
            if index < start_batch:
                continue
            kept = self.batch_size if self.train else min(self.batch_size, self.samples - index * self.batch_size)
            yield mx.nd.array(images[:kept]), mx.nd.array(labels[:kept].reshape(-1))
