"""Train a detector: one process or many, CPU or GPU, stopped and resumed at any step.

    ./dlx run SSD train -- --config quickstart
    ./dlx run SSD train -- --config resnet50_coco --data_dir /data/coco --output_dir runs/coco
    ./dlx run SSD train --nproc gpu -- --config resnet50_coco --data_dir /data/coco

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlx import config as configs
from dlx import dist, optim, trainer, training, weights
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.step import GraphedStep, wrap

from . import pretrained, registry, samples
from .anchors import default_boxes
from .backbone import zero_residuals
from .evaluate import SHOWN, collect, measure, record_results
from .loss import MultiboxLoss
from .options import CONFIGS, TASK
from .pictures import Batch
from .preprocessing import Preprocessing
from .recipe import TrainConfig
from .step import TrainState, capture, train_step


class Trainer(trainer.Trainer):
    """Builds everything of a run. `train_step` itself knows nothing of it."""

    task, score = TASK, "map"
    metrics = {name: {"unit": "", "goal": "MAXIMIZE", "format": ":.4f"} for name in SHOWN[:3]}

    def __init__(self, config: TrainConfig, world: dist.World):
        self.config, self.world = config, world
        if config.batch_size < 2:
            raise ValueError("batch_size must be at least 2: a batch norm of one cell has nothing to average over")
        with world.main_first():  # one process fetches and generates
            self.splits = config.open(num_classes=config.num_classes or registry.COCO_CLASSES)
        if world.is_main:
            for name, split in self.splits.items():
                for kind, count in getattr(getattr(split, "annotations", None), "counts", {}).items():
                    print(f"{name}: {count:,} x {kind}", file=sys.stderr)
        self.train_loader = config.loader("train", self.splits, True, world)
        self.val_loader = None
        if hasattr(self.splits.get("val"), "annotations"):
            self.val_loader = config.loader("val", self.splits, False, world)
        self.classes = self.train_loader.classes
        self.category_ids = list(self.splits["train"].category_ids)
        if self.val_loader is not None and self.val_loader.classes != self.classes:
            raise ValueError("the training and validation annotations name different categories")
        self.preprocessing = Preprocessing(size=config.image_size)
        self.plan()
        self.state = self._build_state()
        self.graphed: GraphedStep | None = None
        self.latest: Any = None  # what the last evaluation found: (detections, pictures, measures)

    def _build_state(self) -> TrainState:
        config, world = self.config, self.world
        dist.seed_everything(config.seed)  # equal weights on every process
        model = registry.build(config.arch, len(self.classes))
        if config.zero_init_residual:
            zero_residuals(model)
        if config.init_from:
            pretrained.start_from(model, config.init_from, config.arch)
        if config.backbone_from:
            try:
                pretrained.load_backbone(model, config.backbone_from)
            except weights.WeightMismatch as error:
                raise ValueError(
                    f"backbone_from {config.backbone_from} does not fit the backbone of {config.arch} "
                    f"({str(error).splitlines()[0]}); give --backbone_from null or another file"
                ) from error
        dist.seed_everything(config.seed, world.rank)
        model = model.to(world.device, memory_format=torch.channels_last).train()
        optimizer = optim.build_optimizer(
            model,
            "sgd",
            lr=self.peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            slow=model.backbone,
            slow_factor=config.backbone_lr_factor,
        )
        self.engine = self.resolve_engine(graphs=True)
        return TrainState(
            model,
            optimizer,
            loss=MultiboxLoss(default_boxes(config.image_size)).to(world.device),
            normalize=self.preprocessing.normalize().to(world.device),
            forward=wrap(model, self.world, self.engine == "compile"),
            precision=config.precision,
            scaler=LossScaler(model.named_parameters(), enabled=config.precision == "fp16"),
            ema=optim.ModelEma(model, config.ema_decay) if config.ema_decay else None,
        )

    def warmup_steps(self) -> int:
        return super().warmup_steps() if self.config.warmup_steps is None else self.config.warmup_steps

    def step(self, batch: list[Batch], epoch: int, index: int) -> Tensor:
        optim.set_learning_rate(self.state.optimizer, self.learning_rate(self.state.step))
        if self.engine != "graph":
            return train_step(self.state, batch)
        if self.graphed is None:
            self.graphed = capture(self.state, batch)
        return self.graphed(batch)

    def evaluate(self) -> dict[str, Any]:
        annotations = self.val_loader.split.annotations
        detections, pictures = collect(
            self.evaluated,
            self.val_loader,
            annotations,
            normalize=self.state.normalize,
            world=self.world,
            precision=self.config.precision,
        )
        result = measure(annotations, detections, pictures, self.world)
        self.latest = (detections, pictures, result)
        return result

    def identity(self) -> dict[str, Any]:
        return pretrained.describe(self.config.arch, self.classes, self.category_ids, self.preprocessing)

    def data_identity(self) -> dict[str, str]:
        return self.config.identity(self.splits)

    def record_results(self, record: Record, result: dict[str, Any]) -> None:
        record_results(record, result, self.classes)

    def finish(self, record: Record, output: Path) -> None:
        if self.latest is None:  # resumed when all was done: the record has the results, the pictures are redrawn
            self.evaluate()
        shown = samples.draw_samples(self.val_loader.split.annotations, *self.latest, output / "samples")
        record.attach("samples", shown)


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    return training.run(config, Trainer)


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
