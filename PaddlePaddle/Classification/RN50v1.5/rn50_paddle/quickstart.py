"""From nothing to a report in minutes on a CPU: data, training, evaluation, a classified picture, the page.

./dlx quickstart rn50_paddle                           Fashion-MNIST, about four minutes on two cores
./dlx quickstart rn50_paddle -- --max_steps 60         a short look
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlx import config as configs
from dlx.files import atomic_path

from . import evaluate, infer, samples, train
from .data import Arrays, open_data
from .options import CONFIGS, TrainConfig


def main(args: list[str] | None = None) -> float:
    """The accuracy of the best checkpoint in percent."""
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data")
    splits = open_data(config.data, config.data_dir, num_classes=config.num_classes, num_samples=config.num_samples)
    if "val" not in splits:
        raise ValueError(f"the quickstart evaluates, and {config.data_dir or config.data} has no split val")
    print("2/4  train")
    train.run(config, arguments)
    print("3/4  evaluate the best checkpoint")
    output = Path(config.output_dir)
    source = ["--data", config.data] + (["--data_dir", config.data_dir] if config.data_dir else [])
    source += ["--num_samples", str(config.num_samples), "--device", config.device]
    result = evaluate.main(["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), *source])
    print("4/4  classify a picture")
    picture = output / "picture.png"
    val = splits["val"]
    if isinstance(val, Arrays):
        with atomic_path(picture) as path:
            samples.to_picture(val.images[0].transpose(2, 0, 1)).save(path, format="PNG")
    else:
        picture = Path(getattr(val, "paths", [output / "samples" / "00.png"])[0])
    infer.main(["--checkpoint", str(output), "--image", str(picture), "--topk", "3"]
               + ["--output_dir", str(output / "infer")])  # fmt: skip
    print(
        f"\n{config.arch} on {config.data_dir or config.data}: {result['top1']:.2f} % top-1 on {result['samples']:,} "
        f"pictures never trained on.\nReport: {output / 'report.html'}"
    )
    return result["top1"]


if __name__ == "__main__":
    main()
