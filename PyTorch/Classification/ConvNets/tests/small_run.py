"""Run verbs on a few made-up pictures, for tests that need processes of their own.

    python small_run.py '[{"verb": "train", "args": ["--epochs", "1"], "pause_at": 3}, ...]'

`pause_at`: after that step, print PAUSED and wait until `pause_file` exists, so that the parent can send a signal then.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from convnets import memory, options, train
from dlx import checkpoint, dist

CLASSES = ["ant", "bee", "cat", "dog"]
TRAIN, VAL = 24, 37  # 37: neither two processes nor any batch size divide it


def make_splits(classes: list[str] = CLASSES, train_size: int = TRAIN, channels: int = 3) -> dict[str, memory.Tensors]:
    """Coarse patterns, one per class, under noise: learnable within a few steps."""
    coarse = torch.rand(len(classes), 4, 4, channels, generator=torch.Generator().manual_seed(1))
    patterns = coarse.repeat_interleave(7, 1).repeat_interleave(7, 2)
    splits = {}
    for seed, (name, count) in enumerate({"train": train_size, "val": VAL}.items()):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, len(classes), (count,), generator=generator)
        noise = torch.rand(count, 28, 28, channels, generator=generator)
        images = (patterns[labels] * 160 + noise * 95).to(torch.uint8)
        splits[name] = memory.Tensors(name, list(classes), images, labels)
    return splits


def pause(step: int, file: str) -> None:
    """Make training wait after `step`."""
    original = train.train_step

    def waiting(state, batch, mix=None):
        loss = original(state, batch, mix)
        if state.step == step:
            print("PAUSED", flush=True)
            deadline = time.monotonic() + 60
            while not Path(file).exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        return loss

    train.train_step = waiting


def main(jobs: list[dict]) -> None:
    torch.set_num_threads(1)
    options.open_data = lambda *args, **kwargs: make_splits()
    original, close = train.train_step, dist.World.close
    with dist.init("cpu") as world:
        # A process group is made once: a second one would find the addresses of the first.
        dist.init, dist.World.close = lambda *args, **kwargs: world, lambda self: None
        run_jobs(jobs, original)
        dist.World.close = close


def run_jobs(jobs: list[dict], original: Callable) -> None:
    for job in jobs:
        train.train_step = original
        if "pause_at" in job:
            pause(job["pause_at"], job["pause_file"])
        try:
            importlib.import_module(f"convnets.{job['verb']}").main(job["args"])
        except checkpoint.Stopped as stopped:
            print(f"LEFT {stopped.code}", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
