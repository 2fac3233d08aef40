"""Picture files through NVIDIA DALI: `pipeline.run()` on the CPU, decoding on the GPU where there is one.

What is random reaches the pipeline as its inputs, computed from the sample's draws, so that crops and mirrors are those
of the Pillow loader; the pixels differ by the two decoders' and resizers' rounding. DALI's own plugin for Paddle wants
a GPU even for CPU pipelines, so its outputs are taken as arrays. Needs nvidia-dali-cuda130 (Linux).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlx import vision

from .data import Batches, DataError, Pictures


def _pipeline(batches: Batches, inputs: Iterator[Any], gpu: bool, threads: int) -> Any:
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise ImportError(f"data_backend dali-* needs nvidia-dali-cuda130 (Linux), paddle does not: {error}") from error
    device = int(os.environ.get("FLAGS_selected_gpus", "0").split(",")[0]) if gpu else None  # of Paddle's launcher
    pipeline = Pipeline(batches.order.batch_size, threads, device, prefetch_queue_depth=2)
    with pipeline:
        # A source, so that DALI asks for it ahead of time.
        encoded, anchor, shape, mirror = fn.external_source(
            source=inputs, num_outputs=4, dtype=[types.UINT8, types.FLOAT, types.FLOAT, types.INT32]
        )
        pixels = fn.decoders.image(encoded, device="mixed" if gpu else "cpu", output_type=types.RGB)
        pixels = fn.slice(pixels, anchor, shape, axis_names="WH", normalized_anchor=False, normalized_shape=False)
        pixels = fn.resize(
            pixels, resize_x=batches.size, resize_y=batches.size, interp_type=types.INTERP_LINEAR, antialias=True
        )
        pixels = fn.flip(pixels, horizontal=mirror)
        pipeline.set_outputs(fn.transpose(pixels, perm=[2, 0, 1]))
    pipeline.build()
    return pipeline


def _evaluation_window(width: int, height: int, resize: int, size: int) -> tuple[float, float, float, float]:
    """The centre crop in the original's pixels: scaling it to `size` is scaling the short side to `resize`."""
    scaled_width, scaled_height = vision.short_side_sizes(width, height, resize)
    across, down = width / scaled_width, height / scaled_height
    left, top = (scaled_width - size) // 2, (scaled_height - size) // 2
    return left * across, top * down, size * across, size * down


def batches(source: Batches, gpu: bool, threads: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The epoch's batches, as `Batches` gives them."""
    split = source.split
    if not isinstance(split, Pictures):
        raise ValueError(f"DALI reads picture files; {split.name} has none")
    special = np.flatnonzero(~split.plain)
    if len(special):
        raise DataError(
            f"{len(special)} picture(s) that DALI would not decode like Pillow, the first is "
            f"{split.paths[special[0]]}; use --data_backend paddle"
        )
    pipeline = _pipeline(source, _inputs(source, split), gpu, threads)
    for row in source.table:
        (output,) = pipeline.run()
        images = np.asarray((output.as_cpu() if gpu else output).as_array())
        yield images.copy(), np.where(row >= 0, split.labels[np.maximum(row, 0)], -1).astype(np.int64)


def _inputs(source: Batches, split: Pictures) -> Iterator[tuple[list[np.ndarray], ...]]:
    """Of each batch the files' bytes, the windows' corners and sizes, and what is mirrored."""
    for row in source.table:
        given = np.maximum(row, 0)
        windows = np.zeros((len(row), 4), np.float32)
        mirrors = np.zeros(len(row), np.int32)
        for place, index in enumerate(given):
            if source.augment:
                *window, mirrors[place] = split.window(source.epoch, int(index), source.order.seed)
            else:
                window = _evaluation_window(*(int(v) for v in split.sizes[index]), source.resize, source.size)
            windows[place] = window
        encoded = [np.fromfile(split.paths[index], np.uint8) for index in given]
        yield encoded, list(windows[:, :2]), list(windows[:, 2:]), list(mirrors)
