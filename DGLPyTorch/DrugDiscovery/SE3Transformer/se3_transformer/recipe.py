"""The options of training: a recipe is a file of configs/ with values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlx import config as configs
from dlx.trainer import TrainOptions

from .options import DataOptions, ModelOptions


@dataclass
class TrainConfig(DataOptions, ModelOptions, TrainOptions):
    """Train on a property of molecules. `--config NAME` takes a recipe of configs/, `--key value` changes it."""

    batch_size: int = configs.field(240, help="molecules per device and micro-batch", ge=1, group="data")
    epochs: int = configs.field(100, help="passes over the training molecules", ge=1, group="recipe")
    optimizer: Literal["adam", "adamw", "sgd"] = configs.field("adamw", help="see dlx.optim", group="recipe")
    lr: float = configs.field(2e-3, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    end_lr: float = configs.field(2e-4, help="rate that cosine and linear end at", ge=0, group="recipe")
    momentum: float = configs.field(0.9, help="or Adam's first beta", ge=0, lt=1, group="recipe")
    weight_decay: float = configs.field(0.1, help="of all parameters", ge=0, group="recipe")
    gradient_clip: float | None = configs.field(None, help="largest norm of all gradients", gt=0, group="recipe")
    seed: int = configs.field(1, help="of weights and order", ge=0)
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")
