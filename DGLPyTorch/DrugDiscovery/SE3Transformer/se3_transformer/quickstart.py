"""From nothing to a report in minutes on a CPU: prepare, train on a few molecules, evaluate, predict, write the page.

./dlx quickstart SE3Transformer                          2,000 molecules of QM9
./dlx quickstart SE3Transformer -- --max_steps 20        a short look
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlx import config as configs

from . import evaluate, infer, train
from .options import CONFIGS
from .recipe import TrainConfig

MOLECULES = ["CCO", "c1ccccc1", "NCC(=O)O", "C1CCOC1"]


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data")
    splits = config.open()
    print("2/4  train")
    train.run(config)
    print("3/4  evaluate the best checkpoint on molecules that nothing was chosen by")
    output = Path(config.output_dir)
    source = [] if config.data_dir is None else ["--data_dir", config.data_dir]
    if config.max_molecules is not None:
        source += ["--max_molecules", str(config.max_molecules)]
    source += ["--split_seed", str(config.split_seed), "--device", config.device]
    result = evaluate.main(["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), *source])
    print("4/4  predict for four molecules by their names in SMILES")
    infer.main(
        ["--checkpoint", str(output), "--output_dir", str(output / "infer"), "--device", config.device]
        + ["--smiles", " ".join(MOLECULES)]
    )
    unit = config.scale(splits["train"]).unit
    print(
        f"\n{config.task}: mean absolute error {result['mae']:.3f} {unit} on {result['molecules']:,} test molecules "
        f"after training on {len(splits['train']):,}.\nReport: {output / 'report.html'}"
    )


if __name__ == "__main__":
    main()
