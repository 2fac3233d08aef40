"""Make a data set's RecordIO files, or check those that are there. An interrupted run goes on where it was.

./dlx run rn50_mxnet prepare                                                   Fashion-MNIST
./dlx run rn50_mxnet prepare -- --pictures my_pictures --data_dir my_records   train/CLASS/*.jpg, val/CLASS/*.jpg
./dlx run rn50_mxnet prepare -- --data_dir my_records --check true             every record of what is there
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlx import config as configs
from dlx.files import lock

from . import packing
from .data import Dataset, open_dataset
from .fashion_mnist import FASHION_MNIST, prepare_fashion_mnist
from .options import CONFIGS


@dataclass
class PrepareConfig:
    """Pack pictures into train.rec and val.rec, shuffled, or check such files."""

    data: str = configs.field(FASHION_MNIST, help="fashion-mnist, when neither pictures nor data_dir is given")
    pictures: str | None = configs.field(None, help="your own pictures: train/CLASS/*.jpg and val/CLASS/*.jpg")
    data_dir: str | None = configs.field(None, help="folder of the RecordIO files; required with pictures")
    source: str | None = configs.field(None, help="folder that already holds the registered data set's files")
    resize: int | None = configs.field(None, help="scale larger pictures to this short side", ge=8)
    quality: int = configs.field(95, help="of pictures that must be encoded again", ge=1, le=100)
    seed: int = configs.field(1, help="of the order in the files", ge=0)
    check: bool = configs.field(False, help="read every record of finished files again")


def folder_items(pictures: str, resize: int | None, quality: int) -> tuple[list[str], packing.Splits]:
    """The items of a folder's splits. ValueError where their classes differ."""
    classes, train = packing.list_folder(Path(pictures) / "train", resize, quality)
    found, val = packing.list_folder(Path(pictures) / "val", resize, quality)
    if found != classes:
        odd = sorted(set(found) ^ set(classes))
        raise ValueError(f"{pictures}: train and val have different classes; {odd[0]!r} is in one only")
    return classes, {"train": train, "val": val}


def main(args: list[str] | None = None) -> Dataset:
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
    if config.pictures is not None:
        if config.data_dir is None:
            raise ValueError("pictures needs data_dir: the folder to write the RecordIO files into")
        classes, splits = folder_items(config.pictures, config.resize, config.quality)
        settings = {"resize": config.resize, "quality": config.quality}
        folder = Path(config.data_dir)
        with lock(folder / ".lock", timeout=1, message=f"{folder} is being written by another process"):
            dataset = packing.make(folder, classes, splits, 3, config.seed, settings)
    elif config.data_dir is not None:
        dataset = open_dataset(config.data_dir, check=config.check)
    elif config.data == FASHION_MNIST:
        dataset = prepare_fashion_mnist(config.source, config.seed)
        dataset = open_dataset(dataset.folder, check=config.check)
    else:
        raise ValueError(f"data {config.data!r} is not {FASHION_MNIST}; your own pictures go into pictures")
    print(f"{dataset.folder}: {len(dataset.classes)} classes, {dataset.counts}, left out {dataset.skipped}")
    return dataset


if __name__ == "__main__":
    main()
