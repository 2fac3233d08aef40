"""Train on a property of QM9's molecules: one process or many, CPU or GPU, stopped and resumed at any step.

    ./dlx run SE3Transformer train -- --config quickstart
    ./dlx run SE3Transformer train -- --config qm9 --task homo --output_dir runs/homo
    ./dlx run SE3Transformer train --nproc gpu -- --config qm9 --task gap

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlx import config as configs
from dlx import dist, optim, trainer, training
from dlx.loading import Plan
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.step import TrainState, wrap

from . import samples
from .evaluate import measure, predict, record_results
from .loading import MoleculeLoader
from .molecules import Batch
from .options import CONFIGS, TASK, build_model
from .recipe import TrainConfig
from .step import GraphedSteps, train_step


class Trainer(trainer.Trainer):
    """Builds everything of a run. `train_step` itself knows nothing of it."""

    task, score, maximize, items = TASK, "mae", False, "molecules"
    fixed = ("model_options", "graph", "radius", "split_seed")  # another split would train on molecules of the test

    def __init__(self, config: TrainConfig, world: dist.World):
        self.config, self.world = config, world
        with world.main_first():  # one process fetches and reads the tables
            self.splits = config.open()
        self.scale = config.scale(self.splits["train"])
        self.metrics = {
            "mae": {"unit": self.scale.unit, "goal": "MINIMIZE", "format": ":.5f"},
            "loss": {"unit": "deviations", "goal": "MINIMIZE", "format": ":.4f"},
        }
        self.engine = self.resolve_engine(graphs=True)
        self.train_loader = self._loader("train", train=True)
        self.val_loader = self._loader("val", train=False)
        self.plan()
        self.state = self._build_state()
        self.graphed = GraphedSteps(self.state, config.batch_size) if self.engine == "graph" else None
        self.latest: dict[str, Any] | None = None

    def _loader(self, split: str, train: bool) -> MoleculeLoader:
        config, world, molecules = self.config, self.world, self.splits[split]
        plan = Plan(len(molecules), config.batch_size, train, config.seed, world.rank, world.size)
        collate = config.collator(molecules, self.scale, world.device)
        return MoleculeLoader(collate, plan, padded=train and self.engine == "graph")

    def _build_state(self) -> TrainState:
        config, world = self.config, self.world
        dist.seed_everything(config.seed)  # equal weights on every process
        model = build_model(config.model_options()).to(world.device).train()
        dist.seed_everything(config.seed, world.rank)
        optimizer = optim.build_optimizer(
            model,
            config.optimizer,
            lr=self.peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            decays_norms=True,
        )
        return TrainState(
            model,
            optimizer,
            forward=wrap(model, self.world, self.engine == "compile"),
            precision=config.precision,
            scaler=LossScaler(model.named_parameters(), enabled=config.precision == "fp16"),
            ema=optim.ModelEma(model, config.ema_decay) if config.ema_decay else None,
            max_norm=config.gradient_clip,
        )

    def step(self, batch: list[Batch], epoch: int, index: int) -> Tensor:
        optim.set_learning_rate(self.state.optimizer, self.learning_rate(self.state.step))
        if self.graphed is not None:
            return self.graphed(batch)
        return train_step(self.state, batch, self.config.batch_size)

    def evaluate(self) -> dict[str, Any]:
        outputs, _ = predict(self.evaluated, self.val_loader, self.world, self.config.precision)
        self.latest = measure(outputs, self.splits["val"], self.scale, self.config.task)
        return self.latest

    def identity(self) -> dict[str, Any]:
        config = self.config
        return {
            "arch": "se3_transformer",
            "classes": [config.task],
            "model_options": config.model_options(),
            "targets": [self.scale.to_json()],
            "graph": config.graph,
            "radius": config.radius,
            "split_seed": config.split_seed,
        }

    def record_results(self, record: Record, result: dict[str, Any]) -> None:
        record_results(record, result, self.scale.unit, "val")

    def finish(self, record: Record, output: Path) -> None:
        if self.latest is None:  # resumed when all was done
            self.evaluate()
        record.attach("samples", samples.draw(self.latest, self.scale, output / "samples", "val"))


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    before = torch.are_deterministic_algorithms_enabled()
    # On several CPU threads sums into atoms would otherwise come in any order, and no run would be another's equal. The
    # kernels of a GPU need no such switch.
    torch.use_deterministic_algorithms(before or not torch.cuda.is_available())
    try:
        return training.run(config, Trainer)
    finally:
        torch.use_deterministic_algorithms(before)


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
