"""From nothing to a report in minutes on a CPU: prepare, fine-tune, evaluate, detect in five pictures, write the page.

./dlx quickstart SSD                            published weights, fine-tuned on fashion-scenes
./dlx quickstart SSD -- --max_steps 20          a short look
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from dlx import config as configs
from dlx.files import atomic_path

from . import evaluate, infer, train
from .data import split_of
from .options import CONFIGS
from .recipe import TrainConfig

PICTURES = 5


def copy_pictures(split, folder: Path, count: int = PICTURES) -> Path:
    """The first pictures of a split as files in a folder of their own, for `infer`."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in np.linspace(0, len(split) - 1, min(count, len(split))).round().astype(int).tolist():
        source = Path(split.annotations.picture_path(row))
        with atomic_path(folder / source.name) as path:
            path.write_bytes(source.read_bytes())
    return folder


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data")
    splits = config.open()
    if not hasattr(split_of(splits, "val"), "annotations"):
        raise ValueError(f"quickstart needs pictures to evaluate; {config.data} has none")
    print("2/4  train")
    train.run(config)
    print("3/4  evaluate the best checkpoint")
    output = Path(config.output_dir)
    source = ["--data_dir", config.data_dir] if config.data_dir else ["--data", config.data]
    for name in ("train_json", "train_images", "val_json", "val_images", "train_scenes", "val_scenes"):
        if getattr(config, name) is not None:
            source += [f"--{name}", str(getattr(config, name))]
    source += ["--workers", str(config.workers), "--tolerant", str(config.tolerant).lower()]
    result = evaluate.main(
        ["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), "--device", config.device, *source]
    )
    print(f"4/4  detect in {PICTURES} pictures")
    pictures = copy_pictures(splits["val"], output / "pictures")
    infer.main(
        ["--checkpoint", str(output), "--image", str(pictures), "--output_dir", str(output / "infer")]
        + ["--device", config.device]
    )
    print(
        f"\n{config.arch} on {config.data}: mAP {result['map']:.3f}, mAP at IoU 0.5 {result['map_50']:.3f} on "
        f"{result['images']:,} pictures never trained on.\nPictures: {output / 'infer'}\n"
        f"Report: {output / 'report.html'}"
    )


if __name__ == "__main__":
    main()
