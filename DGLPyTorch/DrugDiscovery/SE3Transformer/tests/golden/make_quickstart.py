"""The first losses of configs/quickstart.yaml on QM9, stored in quickstart.json (see dlx.golden).

PYTHONPATH=../../../Tools:. python tests/golden/make_quickstart.py        (in the task's folder)
"""

from __future__ import annotations

from pathlib import Path

from dlx import config as configs
from dlx import golden
from se3_transformer import train
from se3_transformer.options import CONFIGS
from se3_transformer.recipe import TrainConfig

FILE = Path(__file__).with_name("quickstart.json")
ARGUMENTS = ("--config quickstart --device cpu --engine eager --max_steps 20").split()


def first_losses() -> list[float]:
    config = configs.parse(TrainConfig, ARGUMENTS, configs_dir=CONFIGS)
    return golden.first_losses(config, train.Trainer)


if __name__ == "__main__":
    golden.write(FILE, first_losses())
