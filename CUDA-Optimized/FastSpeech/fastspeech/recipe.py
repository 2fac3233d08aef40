"""The options of training: a recipe is a file of configs/ with values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlx.config import field
from dlx.trainer import TrainOptions

from .options import DataOptions


@dataclass
class TrainConfig(DataOptions, TrainOptions):
    """Train a voice. `--config NAME` takes a recipe of configs/."""

    arch: str = field("fastspeech", help="a name of fastspeech.registry", group="model")
    init_from: str | None = field(None, help="start from these weights (card, run or file)", group="model")
    duration_weight: float = field(1.0, help="of the durations' error in the loss", ge=0, group="recipe")
    epochs: int = field(400, help="passes over the training utterances", ge=1, group="recipe")
    optimizer: Literal["adam", "adamw"] = field("adam", help="see dlx.optim", group="recipe")
    lr: float = field(1e-3, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    lr_schedule: Literal["cosine", "linear", "step", "constant", "noam"] = field(
        "noam", help="noam falls with the root of the steps after the warm-up", group="recipe"
    )
    warmup_steps: int | None = field(None, help="in place of warmup_epochs", ge=1, group="recipe")
    momentum: float = field(0.9, help="Adam's first beta", ge=0, lt=1, group="recipe")
    beta2: float = field(0.98, help="Adam's second beta", ge=0, lt=1, group="recipe")
    weight_decay: float = field(0.0, help="not of norms and biases", ge=0, group="recipe")
    gradient_clip: float | None = field(1.0, help="largest norm of all gradients", gt=0, group="recipe")
    fuse: bool = field(False, help="compile the network's blocks, also those of a captured step")
    listen: int = field(2, help="validation texts that a finished run says, for the report", ge=0)
