"""Get a data set ready, or check your own pictures before training.

./dlx run rn50_paddle prepare                                  Fashion-MNIST, 31 MB
./dlx run rn50_paddle prepare -- --data_dir /data/mine         every problem of a folder, named
"""

from __future__ import annotations

from dataclasses import dataclass

from dlx import config as configs
from dlx import data as datasets

from .data import open_data
from .options import CONFIGS


@dataclass
class PrepareConfig:
    """Fetch a registered data set, or validate a folder."""

    data: str = configs.field("fashion-mnist", help="a registered data set", choices=("fashion-mnist",))
    data_dir: str | None = configs.field(None, help="your own pictures: train/CLASS/*.jpg, val/CLASS/*.jpg")
    source: str | None = configs.field(None, help="folder that already holds the data set's files")
    check: str = configs.field("full", help="of your own pictures", choices=("headers", "full"))


def main(args: list[str] | None = None) -> dict[str, int]:
    """The number of pictures by split."""
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
    if config.data_dir is None:
        print(f"ready: {datasets.prepare(config.data, source=config.source, check=True)}")
    splits = open_data(config.data, config.data_dir, check=config.check)
    for name, split in splits.items():
        print(f"{name}: {len(split):,} pictures, {len(split.classes)} classes")
    return {name: len(split) for name, split in splits.items()}


if __name__ == "__main__":
    main()
