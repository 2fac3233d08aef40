"""The options of training: a recipe is a file of configs/ with values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlx import config as configs
from dlx.trainer import TrainOptions

from .options import DataOptions


@dataclass
class TrainConfig(DataOptions, TrainOptions):
    """Train a detector. `--config NAME` takes a recipe of configs/, `--key value` changes it."""

    arch: str = configs.field("ssd300_resnet50", help="a name of ssd.registry", group="model")
    num_classes: int | None = configs.field(None, help="of synthetic data; else the data says", ge=1, group="model")
    zero_init_residual: bool = configs.field(
        False, help="start every residual branch at zero, where the backbone starts from nothing", group="model"
    )
    init_from: str | None = configs.field(
        None, help="start from this detector (card, run or file), whatever its classes", group="model"
    )
    backbone_from: str | None = configs.field(
        None,
        help="start the backbone from a classifier's weights (file or card)",
        group="model",
    )
    backbone_lr_factor: float = configs.field(
        1.0,
        help="the backbone's rate over that of the heads; less keeps more of what it begins with",
        gt=0,
        group="recipe",
    )
    epochs: int = configs.field(65, help="passes over the training pictures", ge=1, group="recipe")
    lr: float = configs.field(2.6e-3, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    lr_batch_size: int | None = configs.field(
        32, help="lr is scaled by global batch / this; null: lr is used as it is", ge=1, group="recipe"
    )
    lr_schedule: Literal["cosine", "linear", "step", "constant"] = configs.field("step", group="recipe")
    lr_milestones: list[float] = configs.field(
        [43.0, 54.0], help="epochs at which step divides the rate by 10", group="recipe"
    )
    warmup_epochs: float = configs.field(0.0, help="linear warm-up", ge=0, group="recipe")
    warmup_steps: int | None = configs.field(None, help="linear warm-up in steps, instead", ge=0, group="recipe")
    momentum: float = configs.field(0.9, ge=0, lt=1, group="recipe")
    nesterov: bool = configs.field(False, help="Nesterov momentum", group="recipe")
    weight_decay: float = configs.field(5e-4, help="not of norms and biases", ge=0, group="recipe")
