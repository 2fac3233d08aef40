"""Loaders over `data`: paddle.io with worker processes, or DALI; both give the same batches as Paddle tensors.

loader = Loader(split, Order(...), size=224, resize=256, augment=True, workers=2)
loader.set_epoch(3, start=10)
for images, labels in loader: ...        # uint8 (N, C, size, size), int64 (N,); label -1 is padding
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator

import paddle
from paddle import Tensor

from .data import Arrays, Batches, Order, Pictures, Split


class _AsDataset(paddle.io.Dataset):
    def __init__(self, batches: Batches):
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int):
        return self.batches[number]


PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies


def _leave_the_group(worker: int) -> None:
    """A terminal and Paddle's launcher signal whole groups of processes, and the training still needs its loader to end
    its step. Paddle's own handler of SIGTERM stays: with it a worker ends quietly when the training does. Where the
    training is killed, a worker that waits for it would stay and hold what it inherited, the run's lock among it."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Loader:
    """One process's batches. `backend`: paddle, dali-cpu or dali-gpu."""

    def __init__(
        self, split: Split, order: Order, *, size: int, resize: int, augment: bool, workers: int = 0,
        backend: str = "paddle",
    ) -> None:  # fmt: skip
        if backend != "paddle" and not isinstance(split, Pictures):
            raise ValueError(f"data_backend {backend} reads picture files; {split.name} has none: use paddle")
        if backend == "dali-gpu" and not paddle.get_device().startswith("gpu"):
            raise ValueError(f"data_backend dali-gpu needs a GPU, this runs on {paddle.get_device()}: use dali-cpu")
        if resize < size:
            raise ValueError(f"resize {resize} is smaller than image_size {size}")
        self.split, self.order, self.size, self.resize, self.augment = split, order, size, resize, augment
        self.workers, self.backend = workers, backend
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = Batches(self.split, self.order, self.size, self.resize, self.augment, self.epoch, self.start)
        if self.backend != "paddle":
            from . import dali

            source = dali.batches(batches, self.backend == "dali-gpu", max(1, self.workers))
            yield from ((paddle.to_tensor(images), paddle.to_tensor(labels)) for images, labels in source)
        elif self.workers and not isinstance(self.split, Arrays):
            loader = paddle.io.DataLoader(
                _AsDataset(batches), batch_size=None, shuffle=False, num_workers=self.workers, return_list=True,
                worker_init_fn=_leave_the_group,
            )  # fmt: skip
            yield from loader
        else:  # pictures in memory: a worker process would cost more than it does
            yield from ((paddle.to_tensor(images), paddle.to_tensor(labels)) for images, labels in batches)
