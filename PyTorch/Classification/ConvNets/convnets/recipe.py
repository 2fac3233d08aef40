"""The options of training: a recipe is a file of configs/ with values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlx import config as configs
from dlx.trainer import TrainOptions

from .options import DataOptions


@dataclass
class TrainConfig(DataOptions, TrainOptions):
    """Train a classifier. `--config NAME` takes a recipe of configs/, `--key value` changes it."""

    arch: str = configs.field("resnet50", help="a name of convnets.registry", group="model")
    num_classes: int | None = configs.field(None, help="of synthetic data; else the data says", ge=1, group="model")
    zero_init_residual: bool = configs.field(False, help="start every residual branch at zero", group="model")
    init_from: str | None = configs.field(None, help="start from these weights (card, run or file)", group="model")
    epochs: int = configs.field(90, help="passes over the training pictures", ge=1, group="recipe")
    optimizer: Literal["sgd", "rmsprop"] = configs.field("sgd", help="see dlx.optim", group="recipe")
    lr: float = configs.field(0.256, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    lr_batch_size: int | None = configs.field(
        256, help="lr is scaled by global batch / this; null: lr is used as it is", ge=1, group="recipe"
    )
    warmup_epochs: float = configs.field(8.0, help="linear warm-up", ge=0, group="recipe")
    momentum: float = configs.field(0.875, ge=0, lt=1, group="recipe")
    nesterov: bool = configs.field(False, help="Nesterov momentum (sgd)", group="recipe")
    weight_decay: float = configs.field(3.0517578125e-5, help="not of norms and biases", ge=0, group="recipe")
    bn_weight_decay: bool = configs.field(False, help="decay norms and biases too", group="recipe")
    label_smoothing: float = configs.field(0.1, ge=0, lt=1, group="recipe")
    mixup: float = configs.field(0.0, help="alpha of the Beta distribution; 0 is off", ge=0, group="recipe")
    augmentation: Literal["none", "standard", "autoaugment", "erase"] = configs.field("standard", group="recipe")
