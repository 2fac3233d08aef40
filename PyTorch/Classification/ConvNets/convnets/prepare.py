"""Get a data set ready, or check your own pictures before training.

./dlx run ConvNets prepare                                  Fashion-MNIST, 31 MB
./dlx run ConvNets prepare -- --data_dir /data/mine         validate a folder: every problem, named
./dlx run ConvNets prepare -- --data pictures --output_dir /tmp/pictures    generated JPEG for speed tests
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlx import config as configs
from dlx import data as datasets

from . import pictures
from .data import open_data
from .folder import Samples, describe_ignored
from .options import CONFIGS


@dataclass
class PrepareConfig:
    """Fetch a registered data set, validate a folder, or generate pictures."""

    data: str = configs.field("fashion-mnist", help="fashion-mnist, foolbox-images or pictures (generated JPEG)")
    data_dir: str | None = configs.field(None, help="your own pictures to validate: train/CLASS/*.jpg, val/CLASS/*.jpg")
    source: str | None = configs.field(None, help="folder that already holds the data set's files")
    check: str = configs.field(
        "full", help="of your own pictures: headers or full (every byte)", choices=("headers", "full")
    )
    output_dir: str = configs.field("pictures", help="where generated pictures go")
    num_pictures: int = configs.field(2048, help="generated pictures of the train split", ge=10)
    num_classes: int = configs.field(10, help="generated classes", ge=2)


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
    if config.data_dir is not None:
        splits = open_data(config.data_dir, check=config.check)
        where = config.data_dir
    elif config.data == "pictures":
        where = pictures.generate(Path(config.output_dir), config.num_pictures, config.num_classes)
        splits = open_data(where)
    else:
        where = datasets.prepare(config.data, source=config.source, check=True)
        splits = open_data(config.data)
    for name, split in splits.items():
        print(f"{name}: {len(split):,} pictures, {len(split.classes)} classes")
        if isinstance(split, Samples) and split.ignored:
            print(f"{name}: {describe_ignored(split)}")
    print(f"ready: {where}")
    return {"where": str(where), "splits": {name: len(split) for name, split in splits.items()}}


if __name__ == "__main__":
    main()
