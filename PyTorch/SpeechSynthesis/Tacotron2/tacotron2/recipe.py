"""The options of training: a recipe is a file of configs/ with values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlx import config as configs
from dlx.trainer import TrainOptions

from .options import DataOptions


@dataclass
class TrainConfig(DataOptions, TrainOptions):
    """Train a voice (Tacotron 2) or a vocoder (WaveGlow). `--config NAME` takes a recipe of configs/."""

    arch: str = configs.field("tacotron2", help="a name of tacotron2.registry", group="model")
    init_from: str | None = configs.field(None, help="start from these weights (card, run or file)", group="model")
    guide: float = configs.field(0.0, help="weight of guided attention; 0 is off", ge=0, group="recipe")
    gate_positive: float = configs.field(1.0, help="weight of the last frame in the gate's loss", gt=0, group="recipe")
    hide: float = configs.field(
        0.0, help="share of the true frames that a voice is not told in training; 0 is off", ge=0, lt=1, group="recipe"
    )
    hide_run: int = configs.field(8, help="frames hidden in a row, at least", ge=1, group="recipe")
    sigma: float = configs.field(1.0, help="deviation of WaveGlow's prior", gt=0, group="recipe")
    epochs: int = configs.field(1500, help="passes over the training utterances", ge=1, group="recipe")
    optimizer: Literal["adam", "adamw"] = configs.field("adam", help="see dlx.optim", group="recipe")
    lr: float = configs.field(1e-3, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    lr_schedule: Literal["cosine", "linear", "step", "constant"] = configs.field("step", group="recipe")
    lr_milestones: list[float] = configs.field(
        [500.0, 1000.0], help="epochs at which step divides the rate by 10", group="recipe"
    )
    momentum: float = configs.field(0.9, help="Adam's first beta", ge=0, lt=1, group="recipe")
    weight_decay: float = configs.field(1e-6, help="not of norms and biases", ge=0, group="recipe")
    gradient_clip: float | None = configs.field(1.0, help="largest norm of all gradients", gt=0, group="recipe")
    listen: int = configs.field(2, help="validation texts that a finished run says, for the report", ge=0)
