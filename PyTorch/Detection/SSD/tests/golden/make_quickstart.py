"""The first losses of configs/quickstart.yaml on fashion-scenes, stored in quickstart.json (see dlx.golden).

PYTHONPATH=../../../Tools:. python tests/golden/make_quickstart.py        (in the task's folder)
"""

from __future__ import annotations

from pathlib import Path

from dlx import config as configs
from dlx import golden
from ssd import train
from ssd.options import CONFIGS
from ssd.recipe import TrainConfig

FILE = Path(__file__).with_name("quickstart.json")
ARGUMENTS = (
    "--config quickstart --device cpu --engine eager "
    "--max_steps 20 --batch_size 4 --train_scenes 96 --val_scenes 8 --workers 0"
).split()


def first_losses() -> list[float]:
    config = configs.parse(TrainConfig, ARGUMENTS, configs_dir=CONFIGS)
    return golden.first_losses(config, train.Trainer)


if __name__ == "__main__":
    golden.write(FILE, first_losses())
