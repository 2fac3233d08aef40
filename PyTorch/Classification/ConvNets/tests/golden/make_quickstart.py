"""The first losses of configs/quickstart.yaml on Fashion-MNIST, stored in quickstart.json (see dlx.golden).

PYTHONPATH=../../../Tools:. python tests/golden/make_quickstart.py        (in the task's folder)
"""

from __future__ import annotations

from pathlib import Path

from convnets import train
from convnets.options import CONFIGS
from convnets.recipe import TrainConfig
from dlx import config as configs
from dlx import golden

FILE = Path(__file__).with_name("quickstart.json")
ARGUMENTS = ("--config quickstart --device cpu --engine eager --max_steps 20").split()


def first_losses() -> list[float]:
    config = configs.parse(TrainConfig, ARGUMENTS, configs_dir=CONFIGS)
    return golden.first_losses(config, train.Trainer)


if __name__ == "__main__":
    golden.write(FILE, first_losses())
