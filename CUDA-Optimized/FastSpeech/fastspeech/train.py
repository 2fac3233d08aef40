"""Train a voice: one process or many, stopped and resumed at any step.

    ./dlx run FastSpeech train -- --config quickstart
    ./dlx run FastSpeech train -- --config flite --output_dir runs/flite
    ./dlx run FastSpeech train --nproc gpu -- --config fastspeech --train_list train.txt --val_list val.txt

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dlx import config as configs
from dlx import dist, optim, trainer, training, weights
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.speech.vocoder import GriffinLim
from dlx.step import GraphedStep, wrap

from . import pretrained, registry, samples
from .data import TimedSplit
from .evaluate import METRICS, evaluate
from .loss import FastSpeechLoss
from .options import CONFIGS, TASK
from .recipe import TrainConfig
from .step import TrainState, capture, fuse, train_step

FREE = ("fuse", "resident", "listen")  # options that a run may be continued with other values of


class Trainer(trainer.Trainer):
    """Builds everything of a run. The step itself knows nothing of it."""

    task, score, maximize, items = TASK, "loss", False, "utterances"
    metrics = {name: {"unit": unit, "goal": "MINIMIZE", "format": ":.4f"} for name, unit in METRICS.items()}

    def __init__(self, config: TrainConfig, world: dist.World):
        self.config, self.world = config, world
        with world.main_first():  # one process makes the corpus, its spectrograms and durations
            self.splits = config.open_timed(world.device)
        self.front_end, self.mel = config.front_end(), config.mel()
        dist.seed_everything(config.seed)  # equal weights on every process
        model = registry.build(config.arch, len(self.front_end.symbols))
        self.train_loader = config.loader("train", self.splits, True, world)
        real = isinstance(self.splits.get("val"), TimedSplit)  # nothing is learnt about made-up data
        self.val_loader = config.loader("val", self.splits, False, world) if real else None
        self.plan()
        if config.init_from:
            found = pretrained.load(config.init_from, arch=config.arch)
            weights.load_into(model, found.model.state_dict())
        dist.seed_everything(config.seed, world.rank)
        self.state = self._build_state(model.to(world.device).train())
        self.graphed: dict[tuple, GraphedStep] = {}

    def _build_state(self, model: nn.Module) -> TrainState:
        config = self.config
        optimizer = optim.build_optimizer(
            model,
            config.optimizer,
            lr=self.peak_lr,
            momentum=config.momentum,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
        )
        # A graph needs batches of few shapes: those of the buckets, or of the one made-up batch.
        few = bool(config.text_buckets and config.mel_buckets) or not isinstance(self.splits["train"], TimedSplit)
        self.engine = self.resolve_engine(graphs=few)
        if config.engine == "auto" and self.engine == "compile":
            self.engine = "eager"
        if config.fuse:
            fuse(model)
        return TrainState(
            model,
            optimizer,
            loss=FastSpeechLoss(config.duration_weight),
            forward=wrap(model, self.world, self.engine == "compile"),
            precision=config.precision,
            scaler=LossScaler(model.named_parameters(), enabled=config.precision == "fp16"),
            ema=optim.ModelEma(model, config.ema_decay) if config.ema_decay else None,
            max_norm=config.gradient_clip,
        )

    def warmup_steps(self) -> int:
        return self.config.warmup_steps or super().warmup_steps()

    def learning_rate(self, step: int) -> float:
        if self.config.lr_schedule != "noam":
            return super().learning_rate(step)
        return noam(step, self.peak_lr, max(self.warmup_steps(), 1))

    def step(self, batch: list[Any], epoch: int, index: int) -> Tensor:
        optim.set_learning_rate(self.state.optimizer, self.learning_rate(self.state.step))
        if self.engine != "graph":
            return train_step(self.state, batch)
        shapes = tuple(tensor.shape for micro in batch for tensor in micro)
        if shapes not in self.graphed:
            self.graphed[shapes] = capture(self.state, batch)
        return self.graphed[shapes](batch)

    def evaluate(self) -> dict[str, Any]:
        return evaluate(self.evaluated, self.val_loader, world=self.world, precision=self.config.precision)

    def identity(self) -> dict[str, Any]:
        return pretrained.describe(self.config.arch, self.mel, self.front_end)

    def conditions(self) -> dict[str, Any]:
        """Without what changes no result but by rounding."""
        return {key: value for key, value in super().conditions().items() if key not in FREE}

    def data_identity(self) -> dict[str, str]:
        return self.config.identity(self.splits)

    def finish(self, record: Record, output: Path) -> None:
        split = self.splits.get("val")
        if not (self.config.listen and isinstance(split, TimedSplit)):
            return
        voice = pretrained.Found(self.evaluated, self.config.arch, self.mel, self.front_end, str(output))
        vocoder = GriffinLim(self.mel).to(self.world.device)
        pictures, sounds = samples.say(voice, vocoder, split, output / "samples", self.config.listen, self.world.device)
        record.attach("samples", pictures)
        record.attach("audio", sounds)


def noam(step: int, peak: float, warmup: int) -> float:
    """Rate for step `step` (from 0): linear up to `peak` in `warmup` steps, then with the root of the steps down.

    Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), 5.3.
    """
    count = step + 1
    return peak * min(count / warmup, math.sqrt(warmup / count))


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    return training.run(config, Trainer)


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
