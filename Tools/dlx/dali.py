"""Loaders that read picture files through NVIDIA DALI: the order, reading ahead, resuming and errors of all of them.

`dali-cpu` decodes on the processor, `dali-gpu` on the GPU (nvJPEG). What is random reaches the pipeline as its inputs,
computed on the host from the sample's draws; so it does what a Pillow loader with the same draws does. DALI reads the
files itself, in threads. A task writes a subclass with `path`, `inputs`, `define` and `finish`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .inspection import describe, inspect
from .loading import Batch, DataError, Loader, Plan, Split, rebuild, to_device

if TYPE_CHECKING:
    from nvidia.dali import Pipeline


def import_dali() -> Any:
    """The module nvidia.dali with fn and types; an ImportError says how to get it."""
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

    `plain` (N,) tells which pictures of the split DALI decodes like Pillow: all of them must be.
    """

    # Share of the pictures that the GPU's JPEG units decode; the rest is done by processor threads and the GPU's
    # multiprocessors. The units are the faster way to decode alone, but each of their pictures waits its turn on a GPU
    # that trains: fed with them, ResNet-50's step on an H200 lost more than without.
    hardware_share = 0.0

    def __init__(
        self,
        split: Split,
        plan: Plan,
        device: torch.device,
        *,
        backend: str,
        plain: np.ndarray,
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        super().__init__(split, plan, device)
        special = np.flatnonzero(~plain)
        if len(special):
            first = self.path(int(special[0]))
            count = f"{len(special)} pictures" if len(special) > 1 else "1 picture"
            raise DataError(
                f"{count} that DALI would not decode like Pillow, the first is {first} "
                f"({describe(first)}); use --data_backend pytorch or convert them"
            )
        if backend == "dali-gpu" and device.type != "cuda":
            raise ValueError(f"data backend 'dali-gpu' needs a CUDA device, not {str(device)!r}; use 'dali-cpu'")
        self.gpu = backend == "dali-gpu"
        self.threads = workers or min(8, os.cpu_count() or 1)
        self.prefetch = max(1, prefetch)
        self.pipeline: Pipeline | None = None
        self.pending: Iterator[tuple[int, np.ndarray]] = iter(())
        self.ahead = 0  # batches that the pipeline was given and has not returned
        self.next_batch = (0, 0)

    # What a task says

    def path(self, index: int) -> str:
        """The file of a sample."""
        raise NotImplementedError

    def inputs(self, epoch: int, rows: np.ndarray) -> tuple[Any, ...]:
        """For these samples of an epoch, each input of the pipeline after the files: an array or a list of arrays."""
        raise NotImplementedError

    def define(self, dali: Any, packed: Any, *inputs: Any) -> tuple[Any, ...]:
        """The graph, from the files' bytes and the nodes of `inputs` to the outputs."""
        raise NotImplementedError

    def finish(self, indices: np.ndarray, outputs: list[torch.Tensor]) -> Batch:
        """The batch of `outputs`, which lie on the GPU for dali-gpu, else on the host; index -1 is an empty place."""
        raise NotImplementedError

    def decoding(self, dali: Any) -> dict[str, Any]:
        """Arguments of DALI's image decoders."""
        device = "mixed" if self.gpu else "cpu"
        return {"device": device, "output_type": dali.types.RGB, "hw_decoder_load": self.hardware_share}

    def to_loader(self, tensor: torch.Tensor) -> torch.Tensor:
        """Something small made on the host, for `finish`: on the GPU for dali-gpu."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.gpu else tensor

    # The pipeline

    def _inputs(self) -> tuple[Any, ...]:
        epoch, indices = next(self.pending)
        self.ahead += 1
        rows = np.where(indices >= 0, indices, 0)  # an empty place gets some picture
        names = [np.frombuffer(os.fsencode(self.path(int(row))), np.uint8) for row in rows]
        return names, *self.inputs(epoch, rows)

    def _build(self) -> Pipeline:
        dali = import_dali()
        # One look at the inputs tells how many there are.
        count = len(self.inputs(0, np.zeros(self.batch_size, np.int64)))
        pipeline = dali.Pipeline(
            batch_size=self.batch_size,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if self.gpu else None,
            prefetch_queue_depth=self.prefetch,
            exec_dynamic=True,
            seed=0,
        )
        with pipeline:
            names, *inputs = dali.fn.external_source(source=self._inputs, num_outputs=1 + count, batch=True)
            pipeline.set_outputs(*self.define(dali, dali.fn.io.file.read(names), *inputs))
        pipeline.build()
        return pipeline

    # What comes out

    def __iter__(self) -> Iterator[Batch]:
        return self._batches() if self.gpu else to_device(self._batches(), self.device)

    def _batches(self) -> Iterator[Batch]:
        pinned = self.device.type == "cuda" and not self.gpu
        for indices, outputs in self._runs():
            # DALI's executor leaves an output alone for as long as somebody holds it, so nothing is copied.
            batch = self.finish(indices, [torch.from_dlpack(output.as_tensor()) for output in outputs])
            yield rebuild(batch, (tensor.pin_memory() for tensor in batch)) if pinned else batch

    def _runs(self) -> Iterator[tuple[np.ndarray, tuple[Any, ...]]]:
        """(sample indices, DALI's outputs) per batch."""
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
            outputs = self._run()
            self.next_batch = (epoch, batch + 1) if batch + 1 < len(self) else (epoch + self.plan.train, 0)
            yield indices, outputs

    def _from(self, epoch: int, start: int) -> Iterator[tuple[int, np.ndarray]]:
        """This epoch from batch `start` on, and all that follow."""
        while True:
            yield from ((epoch, indices) for indices in self.plan.batches(epoch, start))
            epoch, start = epoch + self.plan.train, 0

    def _run(self) -> tuple[Any, ...]:
        try:
            if self.gpu:
                outputs = self.pipeline.run(torch.cuda.current_stream(self.device))
            else:
                outputs = self.pipeline.run()
        except RuntimeError as error:
            self.pipeline = None
            following = self._from(*self.next_batch)
            in_hand = [next(following)[1] for _ in range(self.ahead + 1)]
            raise DataError(self._explain(in_hand, error)) from error
        self.ahead -= 1
        return outputs

    def _explain(self, suspects: list[np.ndarray], error: Exception) -> str:
        """DALI names no file; decode those that it had in hand until one fails."""
        for index in (int(index) for indices in suspects for index in indices if index >= 0):
            try:
                inspect(self.path(index), "full")
            except ValueError as reason:
                return str(reason)
        return f"DALI failed: {error}"

    def close(self) -> None:
        self.pipeline = None
