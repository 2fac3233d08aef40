"""From nothing to a report in minutes on a CPU: prepare, train, evaluate, classify a picture, write the page.

./dlx quickstart                                all of Fashion-MNIST, about a minute on two cores
./dlx quickstart -- --max_steps 60              a short look
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlx import config as configs

from . import evaluate, infer, pretrained, samples, train
from .data import split_of
from .options import CONFIGS

MIN_STEPS = 4  # per epoch, else there is little to learn from


def fit_batch(config: train.TrainConfig, count: int) -> None:
    """Lower batch and learning rate alike where the pictures would make less than MIN_STEPS steps per epoch."""
    fitting = max(count // MIN_STEPS, min(2, count))
    if config.batch_size > fitting and config.global_batch_size is None:
        rate = config.lr if config.lr_batch_size else config.lr * fitting / config.batch_size
        print(f"     {count} pictures: batch_size {config.batch_size} -> {fitting}, lr {config.lr:g} -> {rate:g}")
        config.batch_size, config.lr = fitting, rate


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(train.TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data")
    splits = config.open()
    split_of(splits, "train")
    if "val" not in splits or config.data == "synthetic" and not config.data_dir:
        raise ValueError(f"quickstart needs pictures to evaluate; {config.data_dir or config.data} has none")
    fit_batch(config, len(splits["train"]))
    print("2/4  train")
    train.run(config)
    print("3/4  evaluate the best checkpoint")
    output = Path(config.output_dir)
    source = ["--data_dir", config.data_dir] if config.data_dir else ["--data", config.data]
    source += ["--workers", str(config.workers), "--tolerant", str(config.tolerant).lower()]
    result = evaluate.main(
        ["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), "--device", config.device, *source]
    )
    print("4/4  classify a picture")
    split = splits["val"]
    if hasattr(split, "images"):
        picture = output / "picture.png"
        samples.to_picture(split.images[0].permute(2, 0, 1)).save(picture)
    else:
        picture = Path(split.paths[0])
    infer.main(
        ["--checkpoint", str(output), "--image", str(picture), "--output_dir", str(output / "infer")]
        + ["--topk", "3", "--device", config.device]
    )
    found = pretrained.load(output)
    print(
        f"\n{found.arch} on {config.data_dir or config.data}: {result['top1']:.2f} % top-1 on "
        f"{result['samples']:,} pictures never trained on.\nReport: {output / 'report.html'}"
    )


if __name__ == "__main__":
    main()
