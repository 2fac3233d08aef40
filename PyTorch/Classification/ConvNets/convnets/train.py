"""Train an image classifier: one process or many, CPU or GPU, stopped and resumed at any step.

    ./dlx run ConvNets train -- --config quickstart
    ./dlx run ConvNets train -- --config resnet50 --data_dir /data/imagenet --output_dir runs/rn50
    ./dlx run ConvNets train --nproc gpu -- --config resnet50 --data_dir /data/imagenet

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlx import config as configs
from dlx import dist, optim, trainer, training, weights
from dlx.inputs import Normalize
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.step import GraphedStep, wrap

from . import pretrained, registry, samples
from .augment import mixup_weight
from .evaluate import evaluate, record_results
from .options import CONFIGS, TASK
from .recipe import TrainConfig
from .resnet import ResNet
from .step import Batch, TrainState, capture, train_step


class Trainer(trainer.Trainer):
    """Builds everything of a run. `train_step` itself knows nothing of it."""

    task, score, loss_unit = TASK, "top1", "nats"
    metrics = {
        "loss": {"unit": "nats", "goal": "MINIMIZE", "format": ":.4f"},
        "top1": {"unit": "%", "goal": "MAXIMIZE", "format": ":.2f"},
        "top5": {"unit": "%", "goal": "MAXIMIZE", "format": ":.2f"},
    }

    def __init__(self, config: TrainConfig, world: dist.World):
        self.config, self.world = config, world
        entry = registry.architecture(config.arch)
        self.image_size = config.image_size or entry.image_size
        with world.main_first():  # one process fetches; not around more, since building DDP needs all at once
            splits = config.open(num_classes=config.num_classes or 1000)
        options = {"image_size": self.image_size}
        self.train_loader = config.loader("train", splits, True, world, augmentation=config.augmentation, **options)
        self.val_loader = config.loader("val", splits, False, world, **options) if "val" in splits else None
        self.classes = self.train_loader.classes
        if self.val_loader is not None and self.val_loader.classes != self.classes:
            raise ValueError("train and val name different classes")
        self.channels = getattr(self.train_loader, "channels", 3)
        self.preprocessing = pretrained.default_preprocessing(
            config.arch, self.image_size, self.channels, interpolation=config.interpolation
        )
        self.plan()
        self.state = self._build_state()
        self.graphed: GraphedStep | None = None

    def _build_state(self) -> TrainState:
        config, world = self.config, self.world
        dist.seed_everything(config.seed)  # equal weights on every process
        model = registry.build(
            config.arch, len(self.classes), in_channels=self.channels, zero_init_residual=config.zero_init_residual
        )
        if config.init_from:
            self._start_from(model, config.init_from)
        dist.seed_everything(config.seed, world.rank)
        model = model.to(world.device, memory_format=torch.channels_last).train()
        optimizer = optim.build_optimizer(
            model,
            config.optimizer,
            lr=self.peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            decays_norms=config.bn_weight_decay,
        )
        # The fused norms cover ReLU networks; elsewhere the compiler's fusion is the faster one.
        self.engine = self.resolve_engine(graphs=isinstance(model, ResNet))
        return TrainState(
            model,
            optimizer,
            normalize=Normalize(self.preprocessing.mean, self.preprocessing.std).to(world.device),
            forward=wrap(model, self.world, self.engine == "compile"),
            precision=config.precision,
            label_smoothing=config.label_smoothing,
            scaler=LossScaler(model.named_parameters(), enabled=config.precision == "fp16"),
            ema=optim.ModelEma(model, config.ema_decay) if config.ema_decay else None,
        )

    def _start_from(self, model: nn.Module, name: str) -> None:
        """Take weights and input statistics of another classifier, and its head too if it has as many classes."""
        source = pretrained.load(name, arch=self.config.arch)
        tensors, fresh = source.model.state_dict(), model.state_dict()
        for key in pretrained.HEADS:
            if key in tensors and len(source.classes) != len(self.classes):
                for own in (key, key.removesuffix("weight") + "bias"):
                    tensors[own] = fresh[own]
        weights.load_into(model, tensors)
        if source.preprocessing.channels == self.channels:
            shape = source.preprocessing
            self.preprocessing = dataclasses.replace(self.preprocessing, mean=shape.mean, std=shape.std)

    def step(self, batch: Batch, epoch: int, index: int) -> Tensor:
        state, config = self.state, self.config
        mix = mixup_weight(config.mixup, config.seed, epoch, index) if config.mixup else None
        optim.set_learning_rate(state.optimizer, self.learning_rate(state.step))
        if self.engine != "graph":
            weight = None if mix is None else torch.full((), mix, device=self.world.device)  # without a wait
            return train_step(state, batch, weight)
        if self.graphed is None:
            self.graphed = capture(state, batch, mixes=mix is not None)
        return self.graphed((batch,) if mix is None else (batch, mix))

    def evaluate(self) -> dict[str, Any]:
        return evaluate(
            self.evaluated,
            self.val_loader,
            normalize=self.state.normalize,
            num_classes=len(self.classes),
            world=self.world,
            precision=self.config.precision,
        )

    def identity(self) -> dict[str, Any]:
        return {
            "arch": self.config.arch,
            "classes": self.classes,
            "preprocessing": self.preprocessing.to_dict(),
        }

    def conditions(self) -> dict[str, Any]:
        return super().conditions() | {"image_size": self.image_size}

    def record_results(self, record: Record, result: dict[str, Any]) -> None:
        record_results(record, result, self.classes)

    def finish(self, record: Record, output: Path) -> None:
        shown = samples.predict_samples(
            self.evaluated, self.val_loader, self.state.normalize, self.classes, output / "samples"
        )
        record.attach("samples", shown)


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    return training.run(config, Trainer)


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
