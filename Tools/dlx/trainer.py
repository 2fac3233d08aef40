"""What every PyTorch task's training is made of: common options and the base of its Trainer.

A task writes `class Trainer(trainer.Trainer)`, which builds model, optimiser and loaders and says what a step and an
evaluation are; `dlx.training.run` carries it through epochs, checkpoints, signals and reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from . import checkpoint as checkpoints
from . import config as configs
from . import dist, optim, resuming
from .record import Record
from .step import TrainState


@dataclass
class TrainOptions:
    """The options of training that tasks share; a task's own class adds to them and gives its defaults."""

    epochs: int = configs.field(100, help="passes over the training data", ge=1, group="recipe")
    max_steps: int | None = configs.field(None, help="stop after this many optimiser steps", ge=1, group="recipe")
    global_batch_size: int | None = configs.field(
        None, help="samples per optimiser step over all devices; reached by accumulation", ge=1, group="recipe"
    )
    lr: float = configs.field(1e-3, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    lr_batch_size: int | None = configs.field(
        None, help="lr is scaled by global batch / this; null: lr is used as it is", ge=1, group="recipe"
    )
    lr_schedule: Literal["cosine", "linear", "step", "constant"] = configs.field("cosine", group="recipe")
    lr_milestones: list[float] = configs.field([], help="epochs at which step divides the rate by 10", group="recipe")
    end_lr: float = configs.field(0.0, help="rate that cosine and linear end at", ge=0, group="recipe")
    warmup_epochs: float = configs.field(0.0, help="linear warm-up", ge=0, group="recipe")
    ema_decay: float = configs.field(
        0.0, help="of the averaged weights that are evaluated; 0 is off", ge=0, lt=1, group="recipe"
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="of the matrix products")
    engine: Literal["auto", "eager", "graph", "compile"] = configs.field(
        "auto", help="how a step runs; auto: the fastest that fits the device and the model"
    )
    output_dir: str = configs.field("runs/train", help="folder of this run")
    resume: str = configs.field("auto", help="auto: continue what output_dir holds; a folder; or none")
    keep_checkpoints: int = configs.field(2, help="newest checkpoints kept besides the best", ge=1)
    save_steps: int | None = configs.field(None, help="also save every so many steps", ge=1)
    evaluate_epochs: int = configs.field(1, help="evaluate and save every so many epochs", ge=1)
    log_every: int = configs.field(20, help="steps between log lines", ge=1)
    tensorboard: bool = configs.field(False, help="also write TensorBoard events")


class EpochLoader(Protocol):
    """A loader of training data: it can begin anywhere in an epoch."""

    num_samples: int
    skipped: list

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def set_epoch(self, epoch: int, start_batch: int = 0) -> None: ...
    def close(self) -> None: ...


class Trainer:
    """Everything of a run. A subclass sets the attributes below in its constructor and gives the methods that raise."""

    task: str  # its folder's name, for the record
    items = "images"  # what a sample is called
    loss_unit = ""
    fixed: tuple[str, ...] = ()  # keys of `identity` besides arch and classes with which a run cannot go on differently
    score = "loss"  # the key of `validate` that tells the best checkpoint
    maximize = True  # whether more of the score is better
    metrics: dict[str, dict[str, str]]  # unit, goal and format of each entry of `validate` that is logged

    config: Any  # a TrainOptions
    world: dist.World
    state: TrainState
    engine: str
    train_loader: EpochLoader
    val_loader: Any | None

    # Filled by plan()
    global_batch: int
    accumulation: int
    steps_per_epoch: int
    total_steps: int
    peak_lr: float
    best: float | None = None

    def plan(self) -> None:
        """Batches, steps and the peak rate from the options and the length of `train_loader`."""
        config = self.config
        self.global_batch = config.global_batch_size or config.batch_size * self.world.size
        self.accumulation = dist.accumulation(self.global_batch, config.batch_size, self.world.size)
        self.steps_per_epoch = len(self.train_loader) // self.accumulation
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"global_batch_size {self.global_batch} is more than the {self.train_loader.num_samples} training "
                f"{self.items}: lower --global_batch_size"
            )
        self.total_steps = self.steps_per_epoch * config.epochs
        if config.max_steps:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.peak_lr = config.lr * (self.global_batch / config.lr_batch_size if config.lr_batch_size else 1.0)

    def resolve_engine(self, graphs: bool) -> str:
        """What "auto" means here: ``graphs`` says that a CUDA graph of this model is faster than its compilation.

        ValueError where the choice cannot work.
        """
        world, engine = self.world, self.config.engine
        alone = world.device.type == "cuda" and world.size == 1
        if engine == "graph" and world.device.type != "cuda":
            raise ValueError("engine graph needs a CUDA device; use eager or compile")
        if engine != "auto":
            return engine
        return "eager" if not alone else "graph" if graphs else "compile"

    # What a task says

    def step(self, batch: list[Any], epoch: int, index: int) -> Tensor:
        """One optimiser step over micro-batches, the ``index``-th of its epoch, at the scheduled rate; its loss."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any]:
        """Results of `evaluated` on `val_loader`, the same on every process; `metrics` names those that are logged."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with this run to be continued, and needs to be used: arch, classes, ..."""
        raise NotImplementedError

    def record_results(self, record: Record, result: dict[str, Any]) -> None:
        """Write an evaluation into the record; by default each entry of `metrics`."""
        for key, description in self.metrics.items():
            record.metric(f"val.{key}", result[key], description.get("unit", ""), description.get("goal"))

    def finish(self, record: Record, output: Path) -> None:
        """Add to the record what the report shows of a finished run: pictures, audio."""

    def warmup_steps(self) -> int:
        return round(self.config.warmup_epochs * self.steps_per_epoch)

    def data_identity(self) -> dict[str, str]:
        """Hashes of the data for the record; a user's own folder may have none."""
        return self.config.identity()

    # What is the same everywhere

    def learning_rate(self, step: int) -> float:
        config = self.config
        return optim.learning_rate(
            step,
            schedule=config.lr_schedule,
            peak=self.peak_lr,
            end=config.end_lr,
            warmup_steps=self.warmup_steps(),
            total_steps=self.total_steps,
            milestones=tuple(round(epoch * self.steps_per_epoch) for epoch in config.lr_milestones),
        )

    def batches(self, epoch: int, start_step: int) -> Iterator[list[Any]]:
        """The micro-batches of each step of an epoch, from a step within it on."""
        self.train_loader.set_epoch(epoch, start_step * self.accumulation)
        micro: list[Any] = []
        for batch in self.train_loader:
            micro.append(batch)
            if len(micro) == self.accumulation:
                yield micro
                micro = []

    @property
    def evaluated(self) -> nn.Module:
        """The averaged weights if there are any, else the model."""
        return self.state.ema.module if self.state.ema else self.state.model

    def validate(self) -> dict[str, Any] | None:
        """`evaluate`, or None without validation data."""
        if self.val_loader is None:
            return None
        self._share_statistics()
        return self.evaluate()

    def is_better(self, score: float) -> bool:
        return self.best is None or (score > self.best if self.maximize else score < self.best)

    def _share_statistics(self) -> None:
        """Give every process the running statistics of rank 0, whose model is the one that is saved."""
        if self.world.backend:
            modules = [self.state.model, *([self.state.ema.module] if self.state.ema else [])]
            for buffer in itertools.chain.from_iterable(module.buffers() for module in modules):
                torch.distributed.broadcast(buffer, 0)

    def metadata(self) -> dict[str, Any]:
        """What makes a checkpoint usable by itself."""
        return self.identity() | {
            "config": configs.to_dict(self.config),
            "conditions": self.conditions(),
            "world_size": self.world.size,
        }

    def conditions(self) -> dict[str, Any]:
        """What continuing with another value of makes another run."""
        config = self.config
        named = {key: value for key, value in configs.to_dict(config).items() if key not in resuming.FREE_OPTIONS}
        folder = getattr(config, "data_dir", None)
        return named | {
            "data": str(Path(folder).resolve()) if folder else config.data,
            "global_batch_size": self.global_batch,
            f"training {self.items}": self.train_loader.num_samples,
        }

    def save(self, store: checkpoints.Checkpoints) -> Path | None:
        """Called on every process, written by the first, which gets the path.

        Weights that are not finite must not replace good ones.
        """
        state = self.state
        bad = [name for name, value in state.model.named_parameters() if not torch.isfinite(value).all()]
        if bad:
            raise ArithmeticError(self.divergence(f"{bad[0]} is not finite", store))
        random_states = self.world.gather(checkpoints.rng_state())
        if not self.world.is_main:
            return None
        models = {"model": state.model.state_dict()}
        if state.ema:
            models["ema"] = state.ema.module.state_dict()
        rest = {"optimizer": state.optimizer.state_dict(), "rng": random_states, "best": self.best}
        if state.scaler:
            rest["scaler"] = state.scaler.state_dict()
        return store.save(state.step, model=models, state=rest, metadata=self.metadata())

    def divergence(self, what: str, store: checkpoints.Checkpoints) -> str:
        config = self.config
        return (
            f"{what} at step {self.state.step}; the last good checkpoint is {store.latest() or 'none'}. "
            f"Lower lr ({config.lr}) or lengthen warmup_epochs ({config.warmup_epochs})"
        )

    def restore(self, loaded: checkpoints.Loaded) -> None:
        """Continue from a checkpoint of any number of processes or devices."""
        state = self.state
        self.check_identity(loaded)
        state.model.load_state_dict(loaded.model["model"])
        if state.ema:
            state.ema.module.load_state_dict(loaded.model.get("ema", loaded.model["model"]))
        rates = [group["lr"] for group in state.optimizer.param_groups]
        state.optimizer.load_state_dict(loaded.state["optimizer"])
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # this run's schedule (a tensor on a GPU, a number on a CPU) sets it anew
        if state.scaler and "scaler" in loaded.state:
            state.scaler.load_state_dict(loaded.state["scaler"])
        state.step, self.best = loaded.step, loaded.state["best"]
        # A checkpoint is evaluated after it is saved, so what it scored stands beside its state.
        score = loaded.meta["metric"]
        if score is not None and self.is_better(score):
            self.best = score
        if len(loaded.state["rng"]) == self.world.size:
            checkpoints.set_rng_state(loaded.state["rng"][self.world.rank])

    def check_identity(self, loaded: checkpoints.Loaded) -> None:
        """ValueError where a checkpoint is of another model or other classes than this run."""
        own = self.identity()
        if loaded.metadata.get("arch") != own["arch"]:
            raise ValueError(
                f"{loaded.path} holds a {loaded.metadata.get('arch')}, not a {own['arch']}; {resuming.ADVICE}"
            )
        before, now = loaded.metadata.get("classes"), own.get("classes")
        if before != now:
            known, found = (", ".join(map(str, _first(names))) for names in (before, now))
            raise ValueError(
                f"{loaded.path} was trained on other classes ({known} ...) than the data's ({found} ...); "
                f"{resuming.ADVICE}"
            )
        for key in self.fixed:
            before, now = loaded.metadata.get(key), own[key]
            if before != now:
                raise ValueError(f"{loaded.path} was trained with {key} {before}, not {now}; {resuming.ADVICE}")

    def close(self) -> None:
        """Stop the loaders' processes."""
        for loader in (self.train_loader, self.val_loader):
            if loader is not None:
                loader.close()


def _first(names: Iterable[str] | None, count: int = 5) -> list[str]:
    return list(itertools.islice(names or (), count))
