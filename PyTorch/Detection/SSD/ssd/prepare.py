"""Make a set of scenes, or check your own data before training; look at what the network will see.

./dlx run SSD prepare                                             fashion-scenes, 2,400 pictures
./dlx run SSD prepare -- --data stamp-scenes --preview 24         and two sheets of pictures with their boxes
./dlx run SSD prepare -- --data_dir /data/coco --check full       validate: every fault, named
./dlx run SSD prepare -- --data stamp-scenes --train_scenes 500 --val_scenes 50 --output_dir /tmp/scenes
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from dlx import config as configs
from dlx import scene_sets, vision
from dlx.files import atomic_path

from .data import build_loader
from .drawing import draw
from .options import CONFIGS, DataOptions
from .splits import Split, open_data, split_of

CELL = 300  # pixels of a picture on a sheet


@dataclass
class PrepareConfig(DataOptions):
    """Make a set, or validate your own; optionally draw sheets of it."""

    check: Literal["headers", "full"] = configs.field(
        "headers", help="of the pictures: headers or full (every byte)", choices=("headers", "full")
    )
    preview: int = configs.field(0, help="pictures on each of two sheets: as they are, and as training sees them", ge=0)
    preview_dir: str = configs.field("runs/preview", help="where the sheets go")
    output_dir: str | None = configs.field(None, help="make the set of scenes here instead of below $DLX_HOME")
    processes: int | None = configs.field(None, help="that make scenes; one for each processor by default", ge=1)


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
    where = config.data
    if config.output_dir and config.data not in scene_sets.NAMES:
        raise ValueError(
            f"output_dir is for sets of scenes; {config.data} stays where it is (sheets go to preview_dir)"
        )
    if config.data in scene_sets.NAMES:
        sizes = {"train": config.train_scenes, "val": config.val_scenes}
        where = scene_sets.prepare(config.data, folder=config.output_dir, processes=config.processes, **sizes)
    splits = open_data(
        where,
        files=config._files,
        tolerant=config.tolerant,
        check=config.check,
        exif=config.exif,
        keep_empty=config.keep_empty,
    )
    for name, split in splits.items():
        print(describe(name, split))
    sheets = preview(splits, config) if config.preview else []
    for sheet in sheets:
        print(f"preview: {sheet}")
    print(f"ready: {where}")
    return {
        "where": str(where), "splits": {name: len(split) for name, split in splits.items()}, "sheets": sheets,
    }  # fmt: skip


def describe(name: str, split: Split) -> str:
    """Lines about a split: how much there is of what, and what was left out."""
    numbers = np.bincount(split.annotations.labels, minlength=len(split.classes) + 1)[1:]
    lines = [f"{name}: {len(split):,} pictures, {numbers.sum():,} objects, {len(split.classes)} classes"]
    lines += ["  " + ", ".join(f"{label} {number:,}" for label, number in zip(split.classes, numbers, strict=True))]
    if split.empty:
        lines.append(f"  {split.empty:,} pictures without objects are left out of the training")
    lines += [f"  {count:,} x {kind}" for kind, count in split.annotations.counts.items()]
    return "\n".join(lines)


def preview(splits: dict[str, Split], config: PrepareConfig) -> list[str]:
    """Two sheets with `config.preview` pictures of the first split: as they are, and as training sees them."""
    name = next(iter(splits))
    split = split_of(splits, name)
    count = min(config.preview, len(split))
    chosen = np.linspace(0, len(split) - 1, count).astype(np.int64)
    raw = [drawn(split.annotations.decode(row), *objects(split, row), split.classes) for row in chosen.tolist()]
    loader = build_loader(
        name,
        data={name: Split(name, split.annotations.subset(chosen))},
        batch_size=count,
        train=True,
        image_size=config.image_size,
        backend="dali-cpu" if config.data_backend == "dali-cpu" else "pytorch",
        augmentation=config.augmentation,
        seed=config.seed,
    )
    batch = next(iter(loader))
    loader.close()
    seen = []
    for image, boxes, labels in zip(batch.images, batch.boxes.numpy(), batch.labels.numpy(), strict=True):
        kept = labels > 0
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        seen.append(drawn(picture, boxes[kept] * config.image_size, labels[kept], split.classes))
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in Path(config.data).name) or "data"
    sheets = []
    for kind, pictures in (("scenes", raw), ("training", seen)):
        target = Path(config.preview_dir) / f"{stem}-{kind}.png"
        with atomic_path(target) as path:
            vision.contact_sheet(pictures, [""] * len(pictures), cell=CELL).save(path)
        sheets.append(str(target))
    return sheets


def objects(split: Split, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes in pixels and labels of one picture."""
    rows = split.annotations.rows(row)
    return split.annotations.boxes[rows], split.annotations.labels[rows]


def drawn(image: Image.Image, boxes: np.ndarray, labels: np.ndarray, classes: list[str]) -> Image.Image:
    return draw(image, boxes, labels.tolist(), [classes[label - 1] for label in labels])


if __name__ == "__main__":
    main()
