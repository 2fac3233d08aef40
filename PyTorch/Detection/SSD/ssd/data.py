"""One loader interface for every source of pictures and every back end.

    splits = open_data("/data/coco")
    loader = build_loader("train", data=splits, batch_size=32, train=True, seed=1)
    loader.set_epoch(3, start_batch=10)             # resume in the middle of epoch 3
    for images, boxes, labels in loader: ...        # pictures.Batch; evaluation gives pictures.EvalBatch

Order and augmentation depend only on (seed, epoch, sample). In training, the global batch number b of an epoch is the
same samples for any number of ranks, and the ragged tail is dropped. In evaluation every sample comes exactly once over
all ranks; the last batch is filled up with samples of index -1, so that all ranks see equally many full batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dlx.loading import Loader, Plan, WorkerLoader

from . import geometry
from .pictures import PictureDataset
from .splits import AnySplit, Synthetic, open_data, split_of
from .synthetic import SyntheticLoader

__all__ = ["BACKENDS", "build_loader", "open_data", "split_of"]

BACKENDS = ("pytorch", "dali-cpu", "dali-gpu", "synthetic")


def build_loader(
    split: str,
    *,
    data: Mapping[str, AnySplit],
    batch_size: int,
    train: bool,
    image_size: int = 300,
    backend: str = "pytorch",
    augmentation: str = "ssd",
    seed: int = 0,
    epoch: int = 0,
    start_batch: int = 0,
    workers: int = 0,
    prefetch: int = 2,
    world_rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
    tolerant: bool = False,
    anchors: np.ndarray | None = None,
) -> Loader:
    """The loader of a split ("train" or "val") of `data` (see `open_data`) on one rank; batches arrive on `device`.

    `augmentation` (training only): "none", "flip", "crop" (random crop, flip, colours: NVIDIA's recipe) or "ssd" (the
    paper's, which zooms out before it crops). `workers`: processes, or DALI's threads. `tolerant`: leave out and count
    files that turn out to be unreadable; DALI cannot, so open its data with check "full". `anchors` (A, 4 corners):
    DALI matches and encodes, too, and gives `dali.EncodedBatch`es.
    """
    if backend not in BACKENDS:
        raise ValueError(f"data backend {backend!r} is none of {', '.join(BACKENDS)}")
    if augmentation not in geometry.AUGMENTATIONS:
        raise ValueError(f"augmentation {augmentation!r} is none of {', '.join(geometry.AUGMENTATIONS)}")
    if image_size < 8:
        raise ValueError(f"image_size must be at least 8, got {image_size}")
    if anchors is not None and not (train and backend.startswith("dali")):
        raise ValueError(f"anchors are for training with a DALI back end, not {backend!r} with train={train}")
    chosen = split_of(data, split)
    device = torch.device(device)
    plan = Plan(len(chosen), batch_size, train, seed, world_rank, world_size)
    loader: Loader
    if backend == "synthetic" or isinstance(chosen, Synthetic):
        loader = SyntheticLoader(chosen, plan, device, size=image_size, train=train)
    else:
        options: dict[str, Any] = {
            "train": train, "size": image_size, "augmentation": augmentation, "seed": seed, "tolerant": tolerant,
        }  # fmt: skip
        if backend == "pytorch":
            loader = WorkerLoader(chosen, plan, device, PictureDataset(chosen, **options), workers, prefetch)
        else:
            from . import dali

            options |= {"backend": backend, "workers": workers, "prefetch": prefetch, "anchors": anchors}
            loader = dali.DaliLoader(chosen, plan, device, **options)
    loader.set_epoch(epoch, start_batch)
    return loader
