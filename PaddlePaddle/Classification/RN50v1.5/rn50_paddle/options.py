"""Options that verbs share, as dataclasses; nothing here imports Paddle, so that flags can be set before it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlx import config as configs
from dlx import data as datasets

TASK = "PaddlePaddle/Classification/RN50v1.5"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class DataOptions:
    """Which pictures, and how they are read."""

    data: str = configs.field("fashion-mnist", help="fashion-mnist or synthetic", group="data")
    data_dir: str | None = configs.field(
        None, help="your own pictures: train/CLASS/*.jpg and val/CLASS/*.jpg (instead of data)", group="data"
    )
    data_backend: Literal["paddle", "dali-cpu", "dali-gpu"] = configs.field(
        "paddle", help="who decodes picture files: Pillow below paddle.io, or DALI", group="data"
    )
    image_size: int | None = configs.field(None, help="side in pixels; the architecture's own by default", ge=8)
    resize: int | None = configs.field(None, help="short side before the evaluation crop", ge=8, group="data")
    workers: int = configs.field(2, help="loading processes (paddle.io) or threads (DALI)", ge=0, group="data")
    num_classes: int = configs.field(1000, help="of synthetic data", ge=2, group="data")
    num_samples: int = configs.field(12800, help="of synthetic data", ge=1, group="data")
    batch_size: int = configs.field(64, help="images per device and micro-batch", ge=1, group="data")
    seed: int = configs.field(1, help="of weights, order and augmentation", ge=0)
    device: Literal["auto", "cpu", "gpu"] = configs.field("auto", help="auto takes a GPU where Paddle sees one")

    def data_identity(self) -> dict[str, str]:
        """Hash of a registered data set for the record."""
        if self.data_dir is not None or self.data not in datasets.names():
            return {}
        return {self.data: datasets.identity(self.data)}


@dataclass
class TrainConfig(DataOptions):
    """Train a classifier. `--config NAME` takes a recipe of configs/, `--key value` changes it."""

    run_scope: Literal["train_eval", "train_only", "eval_only"] = configs.field(
        "train_eval", help="eval_only measures the run's best checkpoint, or `checkpoint`"
    )
    checkpoint: str | None = configs.field(None, help="what eval_only measures: a run, a checkpoint or weights")
    arch: str = configs.field("resnet50", help="resnet18, resnet50, resnet101 or resnet8_small", group="model")
    data_layout: Literal["NCHW", "NHWC"] = configs.field("NCHW", help="of activations", group="model")
    zero_init_residual: bool = configs.field(True, help="start each residual branch at zero", group="model")
    to_static: bool = configs.field(False, help="compile the forward pass into a static graph", group="model")
    init_from: str | None = configs.field(None, help="start from these weights: a run, .safetensors, .pdparams, .npz")
    epochs: int = configs.field(90, help="passes over the training pictures", ge=1, group="recipe")
    max_steps: int | None = configs.field(None, help="stop after this many optimiser steps", ge=1, group="recipe")
    gradient_merge: int = configs.field(1, help="micro-batches per optimiser step", ge=1, group="recipe")
    lr: float = configs.field(0.256, help="peak rate at lr_batch_size", gt=0, group="recipe")
    lr_batch_size: int | None = configs.field(
        256, help="lr is scaled by global batch / this; null: as it is", ge=1, group="recipe"
    )
    warmup_epochs: float = configs.field(5.0, help="linear warm-up, then a cosine to zero", ge=0, group="recipe")
    momentum: float = configs.field(0.875, ge=0, lt=1, group="recipe")
    nesterov: bool = configs.field(False, help="Nesterov momentum", group="recipe")
    weight_decay: float = configs.field(3.0517578125e-5, help="not of norms and biases", ge=0, group="recipe")
    label_smoothing: float = configs.field(0.1, ge=0, lt=1, group="recipe")
    mixup: float = configs.field(0.0, help="alpha of the Beta distribution; 0 is off", ge=0, group="recipe")
    augmentation: Literal["standard", "none"] = configs.field("standard", group="recipe")
    precision: Literal["fp32", "bf16", "fp16"] = configs.field(
        "fp32", help="AMP on a GPU; Paddle has none on a CPU, where all is fp32", group="precision"
    )
    scale_loss: float = configs.field(128.0, help="first loss scale of fp16", gt=0, group="precision")
    use_dynamic_loss_scaling: bool = configs.field(True, help="of fp16", group="precision")
    asp: bool = configs.field(False, help="keep 2:4 sparsity masks while training", group="sparsity")
    prune_model: bool = configs.field(
        True, help="with asp: prune; false: keep the zeros of init_from", group="sparsity"
    )
    mask_algo: Literal["mask_1d", "mask_2d_greedy", "mask_2d_best"] = configs.field("mask_1d", group="sparsity")
    output_dir: str = configs.field("runs/paddle", help="folder of this run")
    resume: Literal["auto", "none"] = configs.field(
        "auto", help="auto: continue what output_dir holds; none: refuse that"
    )
    keep_checkpoints: int = configs.field(2, help="newest checkpoints kept besides the best", ge=1)
    save_steps: int | None = configs.field(None, help="also save every so many steps", ge=1)
    log_every: int = configs.field(20, help="steps between log lines", ge=1)
    tensorboard: bool = configs.field(False, help="also write TensorBoard events")
