"""The first losses of configs/quickstart.yaml, stored in quickstart.json (see dlx.golden).

PYTHONPATH=../../Tools:. python tests/golden/make_quickstart.py        (in the task's folder)
"""

from __future__ import annotations

from pathlib import Path

from dlx import config as configs
from dlx import golden
from fastspeech import train
from fastspeech.options import CONFIGS
from fastspeech.recipe import TrainConfig

FILE = Path(__file__).with_name("quickstart.json")
ARGUMENTS = "--config quickstart --device cpu --engine eager --max_steps 20 --utterances 30 --batch_size 4 --workers 0"


def first_losses() -> list[float]:
    config = configs.parse(TrainConfig, [*ARGUMENTS.split(), "--max_seconds", "12"], configs_dir=CONFIGS)
    return golden.first_losses(config, train.Trainer, count=6)


if __name__ == "__main__":
    golden.write(FILE, first_losses())
