"""Generated photograph-like JPEG files for speed tests of the loaders: sizes, detail and file sizes as in ImageNet.

They teach a model nothing. A picture is a sum of noise at several scales (natural images have about as much energy in
each octave), 500 x 375 pixels on average, about 110 kB at JPEG quality 92.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from dlx.files import atomic_path


def picture(generator: np.random.Generator) -> Image.Image:
    """One picture, landscape or portrait."""
    width, height = int(generator.integers(400, 601)), int(generator.integers(300, 451))
    if generator.random() < 0.25:
        width, height = height, width
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(7):
        shape = (max(2, height >> (6 - octave)), max(2, width >> (6 - octave)))
        noise = generator.normal(0, 1, (*shape, 3)).astype(np.float32)
        grey = noise.mean(2, keepdims=True)
        noise = 0.3 * noise + grey  # mostly brightness, less colour
        layer = [
            np.asarray(Image.fromarray(noise[:, :, c]).resize((width, height), Image.Resampling.BICUBIC))
            for c in range(3)
        ]
        total += np.stack(layer, 2) * 0.72**octave
    total = (total - total.mean()) / total.std()
    return Image.fromarray(np.clip(128 + 52 * total, 0, 255).astype(np.uint8))


def generate(folder: Path, count: int, num_classes: int, seed: int = 0) -> Path:
    """Class folders ``train`` (``count`` pictures) and ``val`` (an eighth of it). A finished folder is left alone."""
    if folder.is_dir() and any(folder.iterdir()):
        if (folder / "train").is_dir() and (folder / "val").is_dir():
            return folder
        raise ValueError(f"{folder} holds something else; choose an empty output_dir")
    with atomic_path(folder) as temporary, ProcessPoolExecutor() as workers:
        jobs = []
        for split, size in (("train", count), ("val", max(num_classes, count // 8))):
            for index in range(size):
                target = temporary / split / f"class_{index % num_classes:04d}"
                target.mkdir(parents=True, exist_ok=True)
                jobs.append((target / f"{index:06d}.jpg", [seed, split == "val", index]))
        for _ in workers.map(_write, jobs, chunksize=16):
            pass
    return folder


def _write(job: tuple[Path, list[int]]) -> None:
    path, seed = job
    picture(np.random.default_rng(seed)).save(path, quality=92)
