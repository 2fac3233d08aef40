"""From nothing to a report in minutes on a CPU: pack, train, evaluate, classify a picture, write the page.

./dlx quickstart rn50_mxnet                              Fashion-MNIST
./dlx quickstart rn50_mxnet -- --max_steps 60            a short look
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlx import config as configs
from dlx.files import atomic_write

from . import evaluate, infer, recordio, train
from .options import CONFIGS


def first_picture(path: Path, folder: Path) -> Path:
    """The first picture of a .rec file as a file of its own."""
    _, _, payload = next(recordio.read_records(path))
    picture = recordio.decode_picture(payload)[2]
    target = folder / ("picture.png" if picture.startswith(b"\x89PNG") else "picture.jpg")
    atomic_write(target, picture)
    return target


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(train.TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data")
    dataset = config.open()
    if dataset.folder is None or "val" not in dataset.counts:
        raise ValueError(f"quickstart needs pictures to evaluate; {config.source()} has none")
    print("2/4  train")
    train.run(config)
    print("3/4  evaluate the best checkpoint")
    output = config.output_dir
    source = ["--data_dir", config.data_dir] if config.data_dir else ["--data", config.data]
    common = ["--checkpoint", output, "--device", config.device]
    result = evaluate.main([*common, *source, "--output_dir", str(Path(output) / "evaluate")])
    print("4/4  classify a picture")
    picture = first_picture(dataset.path("val"), Path(output))
    infer.main([*common, "--image", str(picture), "--topk", "3", "--output_dir", str(Path(output) / "infer")])
    print(
        f"\n{config.arch} on {config.source()}: {result['top1']:.2f} % top-1 on {result['samples']:,} pictures never "
        f"trained on.\nReport: {Path(output) / 'report.html'}"
    )


if __name__ == "__main__":
    main()
