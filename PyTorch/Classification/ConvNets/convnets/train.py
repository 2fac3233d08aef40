"""Train an image classifier: one process or many, CPU or GPU, stopped and resumed at any step.

    ./dlx run ConvNets train -- --config quickstart
    ./dlx run ConvNets train -- --config resnet50 --data_dir /data/imagenet --output_dir runs/rn50
    ./dlx run ConvNets train --nproc gpu -- --config resnet50 --data_dir /data/imagenet

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import dist, report, runlog, weights
from dlx import record as records
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.runlog import RunLog

from . import optim, pretrained, registry, samples
from .augment import mixup_weight
from .evaluate import evaluate, record_results
from .options import CONFIGS, TASK, DataOptions
from .resnet import ResNet
from .step import Batch, GraphedStep, Normalize, TrainState, train_step

CURVES = ("train.loss", "train.lr", "val.loss", "val.top1", "val.top5")  # of the log, kept in the record
STOP_CHECK_STEPS = 10  # with several processes, asking whether any was told to stop costs an exchange


@dataclass
class TrainConfig(DataOptions):
    """Train a classifier. `--config NAME` takes a recipe of configs/, `--key value` changes it."""

    arch: str = configs.field("resnet50", help="a name of convnets.registry", group="model")
    num_classes: int | None = configs.field(None, help="of synthetic data; else the data says", ge=1, group="model")
    zero_init_residual: bool = configs.field(False, help="start every residual branch at zero", group="model")
    init_from: str | None = configs.field(None, help="start from these weights (card, run or file)", group="model")
    epochs: int = configs.field(90, help="passes over the training pictures", ge=1, group="recipe")
    max_steps: int | None = configs.field(None, help="stop after this many optimiser steps", ge=1, group="recipe")
    global_batch_size: int | None = configs.field(
        None, help="images per optimiser step over all devices; reached by accumulation", ge=1, group="recipe"
    )
    optimizer: Literal["sgd", "rmsprop"] = configs.field("sgd", help="see optim.py", group="recipe")
    lr: float = configs.field(0.256, help="peak learning rate at lr_batch_size", gt=0, group="recipe")
    lr_batch_size: int | None = configs.field(
        256, help="lr is scaled by global batch / this; null: lr is used as it is", ge=1, group="recipe"
    )
    lr_schedule: Literal["cosine", "linear", "step", "constant"] = configs.field("cosine", group="recipe")
    lr_milestones: list[float] = configs.field([], help="epochs at which step divides the rate by 10", group="recipe")
    end_lr: float = configs.field(0.0, help="rate that cosine and linear end at", ge=0, group="recipe")
    warmup_epochs: float = configs.field(8.0, help="linear warm-up", ge=0, group="recipe")
    momentum: float = configs.field(0.875, ge=0, lt=1, group="recipe")
    nesterov: bool = configs.field(False, help="Nesterov momentum (sgd)", group="recipe")
    weight_decay: float = configs.field(3.0517578125e-5, help="not of norms and biases", ge=0, group="recipe")
    bn_weight_decay: bool = configs.field(False, help="decay norms and biases too", group="recipe")
    label_smoothing: float = configs.field(0.1, ge=0, lt=1, group="recipe")
    mixup: float = configs.field(0.0, help="alpha of the Beta distribution; 0 is off", ge=0, group="recipe")
    augmentation: Literal["none", "standard", "autoaugment", "erase"] = configs.field("standard", group="recipe")
    ema_decay: float = configs.field(
        0.0, help="of the averaged weights that are evaluated; 0 is off", ge=0, lt=1, group="recipe"
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="of the matrix products")
    engine: Literal["auto", "eager", "graph", "compile"] = configs.field(
        "auto", help="how a step runs; auto: a CUDA graph or torch.compile on one GPU, else eager"
    )
    output_dir: str = configs.field("runs/train", help="folder of this run")
    resume: str = configs.field("auto", help="auto: continue what output_dir holds; a folder; or none")
    keep_checkpoints: int = configs.field(2, help="newest checkpoints kept besides the best", ge=1)
    save_steps: int | None = configs.field(None, help="also save every so many steps", ge=1)
    evaluate_epochs: int = configs.field(1, help="evaluate and save every so many epochs", ge=1)
    log_every: int = configs.field(20, help="steps between log lines", ge=1)
    tensorboard: bool = configs.field(False, help="also write TensorBoard events")


def resolve_engine(config: TrainConfig, world: dist.World, model: nn.Module) -> str:
    """What "auto" means here. ValueError where the choice cannot work."""
    if config.engine != "auto":
        if config.engine == "graph" and (world.device.type != "cuda" or world.size > 1):
            raise ValueError("engine graph needs exactly one CUDA device; use eager or compile")
        return config.engine
    if world.device.type != "cuda" or world.size > 1:
        return "eager"
    # The fused norms cover ReLU networks; elsewhere the compiler's fusion is the faster one.
    return "graph" if isinstance(model, ResNet) else "compile"


class Trainer:
    """Builds everything of a run; `run` goes through the epochs. `train_step` itself knows nothing of it."""

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
        global_batch = config.global_batch_size or config.batch_size * world.size
        self.accumulation = dist.accumulation(global_batch, config.batch_size, world.size)
        self.global_batch = global_batch
        self.steps_per_epoch = len(self.train_loader) // self.accumulation
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"global_batch_size {global_batch} is more than the {self.train_loader.num_samples} training pictures"
            )
        self.total_steps = self.steps_per_epoch * config.epochs
        if config.max_steps:
            self.total_steps = min(self.total_steps, config.max_steps)
        scale = global_batch / config.lr_batch_size if config.lr_batch_size else 1.0
        self.peak_lr = config.lr * scale
        self.state = self._build_state()
        self.graphed: GraphedStep | None = None
        self.best = float("-inf")

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
        self.engine = resolve_engine(config, world, model)
        forward: Any = model
        if self.engine == "compile":
            forward = torch.compile(model)
        if world.size > 1:
            devices = [world.device.index] if world.device.type == "cuda" else None
            forward = nn.parallel.DistributedDataParallel(forward, device_ids=devices, gradient_as_bucket_view=True)
        return TrainState(
            model,
            optimizer,
            normalize=Normalize(self.preprocessing.mean, self.preprocessing.std).to(world.device),
            forward=forward,
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

    def learning_rate(self, step: int) -> float:
        config = self.config
        return optim.learning_rate(
            step,
            schedule=config.lr_schedule,
            peak=self.peak_lr,
            end=config.end_lr,
            warmup_steps=round(config.warmup_epochs * self.steps_per_epoch),
            total_steps=self.total_steps,
            milestones=tuple(round(epoch * self.steps_per_epoch) for epoch in config.lr_milestones),
        )

    def batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        """The micro-batches of each step of an epoch, from a step within it on."""
        self.train_loader.set_epoch(epoch, start_step * self.accumulation)
        micro: Batch = []
        for images, labels in self.train_loader:
            micro.append((images, labels))
            if len(micro) == self.accumulation:
                yield micro
                micro = []

    def step(self, batch: Batch, mix: float | None) -> Tensor:
        """One optimiser step at the scheduled rate."""
        state = self.state
        optim.set_learning_rate(state.optimizer, self.learning_rate(state.step))
        if self.engine != "graph":
            weight = None if mix is None else torch.tensor(mix, device=self.world.device)
            return train_step(state, batch, weight)
        if self.graphed is None:
            self.graphed = GraphedStep(state, batch, mixes=mix is not None)
        return self.graphed(batch, mix)

    @property
    def evaluated(self) -> nn.Module:
        """The averaged weights if there are any, else the model."""
        return self.state.ema.module if self.state.ema else self.state.model

    def _share_statistics(self) -> None:
        """Give every process the running statistics of rank 0, whose model is the one that is saved."""
        if self.world.backend:
            modules = [self.state.model, *([self.state.ema.module] if self.state.ema else [])]
            for buffer in itertools.chain.from_iterable(module.buffers() for module in modules):
                torch.distributed.broadcast(buffer, 0)

    def validate(self) -> dict[str, Any] | None:
        """Accuracy of the `evaluated` model; None without validation pictures."""
        if self.val_loader is None:
            return None
        self._share_statistics()
        return evaluate(
            self.evaluated,
            self.val_loader,
            normalize=self.state.normalize,
            num_classes=len(self.classes),
            world=self.world,
            precision=self.config.precision,
        )

    def metadata(self) -> dict[str, Any]:
        """What makes a checkpoint usable by itself."""
        return {
            "arch": self.config.arch,
            "classes": self.classes,
            "preprocessing": self.preprocessing.to_dict(),
            "config": configs.to_dict(self.config),
            "world_size": self.world.size,
        }

    def save(self, store: checkpoints.Checkpoints, metric: float | None = None, best: bool = False) -> None:
        """Called on every process, written by the first. Weights that are not finite must not replace good ones."""
        state = self.state
        bad = [name for name, value in state.model.named_parameters() if not torch.isfinite(value).all()]
        if bad:
            raise ArithmeticError(self.divergence(f"{bad[0]} is not finite", store))
        random_states = self.world.gather(checkpoints.rng_state())
        if not self.world.is_main:
            return
        models = {"model": state.model.state_dict()}
        if state.ema:
            models["ema"] = state.ema.module.state_dict()
        rest = {
            "optimizer": state.optimizer.state_dict(),
            "scaler": state.scaler.state_dict(),
            "rng": random_states,
            "best": self.best,
        }
        store.save(state.step, model=models, state=rest, metadata=self.metadata(), metric=metric, best=best)

    def divergence(self, what: str, store: checkpoints.Checkpoints) -> str:
        config = self.config
        return (
            f"{what} at step {self.state.step}; the last good checkpoint is {store.latest() or 'none'}. "
            f"Lower lr ({config.lr}) or lengthen warmup_epochs ({config.warmup_epochs})"
        )

    def restore(self, loaded: checkpoints.Loaded) -> None:
        """Continue from a checkpoint of any number of processes or devices."""
        state = self.state
        if loaded.metadata.get("arch") != self.config.arch:
            raise ValueError(f"{loaded.path} holds a {loaded.metadata.get('arch')}, not a {self.config.arch}")
        if loaded.metadata["classes"] != self.classes:
            known, found = (", ".join(names[:5]) for names in (loaded.metadata["classes"], self.classes))
            raise ValueError(f"{loaded.path} was trained on other classes ({known} ...) than the data's ({found} ...)")
        state.model.load_state_dict(loaded.model["model"])
        if state.ema:
            state.ema.module.load_state_dict(loaded.model.get("ema", loaded.model["model"]))
        rates = [group["lr"] for group in state.optimizer.param_groups]
        state.optimizer.load_state_dict(loaded.state["optimizer"])
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # this run's schedule (a tensor on a GPU, a number on a CPU) sets it anew
        state.scaler.load_state_dict(loaded.state["scaler"])
        state.step, self.best = loaded.step, loaded.state["best"]
        if len(loaded.state["rng"]) == self.world.size:
            checkpoints.set_rng_state(loaded.state["rng"][self.world.rank])

    def close(self) -> None:
        """Stop the loaders' processes."""
        for loader in (self.train_loader, self.val_loader):
            if loader is not None:
                loader.close()


def train(trainer: Trainer, log: RunLog, record: Record, store: checkpoints.Checkpoints) -> str:
    """Go through the remaining epochs; returns "finished" or "stopped" (by SIGTERM or Ctrl-C, after saving)."""
    config, state = trainer.config, trainer.state
    with checkpoints.StopSignal() as stop:
        while state.step < trainer.total_steps:
            epoch, start = divmod(state.step, trainer.steps_per_epoch)
            if not _train_epoch(trainer, epoch, start, stop, log, record, store):
                trainer.save(store)
                log.log((epoch, state.step), {"stopped": stop.signal or "by another process"})
                return "stopped"
            last = state.step >= trainer.total_steps
            if last or (epoch + 1) % config.evaluate_epochs == 0:
                _evaluate_and_save(trainer, epoch, log, record, store)
        return "finished"


def _train_epoch(
    trainer: Trainer,
    epoch: int,
    start: int,
    stop: checkpoints.StopSignal,
    log: RunLog,
    record: Record,
    store: checkpoints.Checkpoints,
) -> bool:
    """The steps of one epoch from `start` on; False when the run was told to stop."""
    config, world, state = trainer.config, trainer.world, trainer.state
    mean, images, clock = dist.Mean(), 0, time.perf_counter()
    steps = trainer.steps_per_epoch - start
    for index, batch in enumerate(log.progress(trainer.batches(epoch, start), steps, f"epoch {epoch}"), start):
        if index >= trainer.steps_per_epoch or state.step >= trainer.total_steps:
            break
        mix = mixup_weight(config.mixup, config.seed, epoch, index) if config.mixup else None
        mean.add(trainer.step(batch, mix), trainer.global_batch)
        images += trainer.global_batch
        if state.step % config.log_every == 0 or state.step == trainer.total_steps:
            loss = mean.value(world)
            now = time.perf_counter()
            rate = learning = trainer.learning_rate(state.step - 1)
            speed = images / (now - clock)
            log.log((epoch, state.step), {"train.loss": loss, "train.throughput": speed, "train.lr": rate})
            record.curve("train.loss", state.step, loss)
            record.curve("train.lr", state.step, learning)
            mean, images, clock = dist.Mean(), 0, time.perf_counter()
            if loss != loss or abs(loss) == float("inf"):
                raise ArithmeticError(trainer.divergence(f"loss is {loss}", store))
        if config.save_steps and state.step % config.save_steps == 0:
            trainer.save(store)
        asked = stop.requested if world.size == 1 else state.step % STOP_CHECK_STEPS == 0 and world.any(stop.requested)
        if asked and state.step < trainer.total_steps:
            return False
    return True


def _evaluate_and_save(
    trainer: Trainer, epoch: int, log: RunLog, record: Record, store: checkpoints.Checkpoints
) -> None:
    result = trainer.validate()
    best = False
    if result is not None:
        best = result["top1"] > trainer.best
        trainer.best = max(trainer.best, result["top1"])
        shown = {f"val.{key}": result[key] for key in ("loss", "top1", "top5")}
        log.log((epoch, trainer.state.step), shown)
        for key in ("loss", "top1", "top5"):
            record.curve(f"val.{key}", trainer.state.step, result[key])
        record_results(record, result, trainer.classes)
        record.metric("val.best_top1", trainer.best, "%", "MAXIMIZE")
    trainer.save(store, None if result is None else result["top1"], best)


def _owes_evaluation(trainer: Trainer, loaded: checkpoints.Loaded, record: Record) -> bool:
    """Whether the checkpoint was saved at the end of an epoch whose evaluation a signal or a kill prevented."""
    step, config = trainer.state.step, trainer.config
    finished = step >= trainer.total_steps
    epoch, within = divmod(step, trainer.steps_per_epoch)
    due = finished or (within == 0 and epoch % config.evaluate_epochs == 0)
    missing = loaded.meta["metric"] is None or (finished and "val.top1" not in record.fields["metrics"])
    return trainer.val_loader is not None and due and missing


def describe_metrics(log: RunLog) -> None:
    log.metadata("train.loss", unit="nats", goal="MINIMIZE", stage="TRAIN", format=":.4f")
    log.metadata("train.throughput", unit="images/s", goal="MAXIMIZE", stage="TRAIN", format=":,.0f")
    log.metadata("train.lr", unit="", stage="TRAIN", format=":.3g")
    log.metadata("val.loss", unit="nats", goal="MINIMIZE", stage="VAL", format=":.4f")
    log.metadata("val.top1", unit="%", goal="MAXIMIZE", stage="VAL", format=":.2f")
    log.metadata("val.top5", unit="%", goal="MAXIMIZE", stage="VAL", format=":.2f")


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields."""
    torch.backends.cudnn.benchmark = True  # batches have one shape, so the search for the fastest kernels pays
    with dist.init(config.device) as world:
        output = Path(config.output_dir)
        store = checkpoints.Checkpoints(output / "checkpoints", keep=config.keep_checkpoints)
        trainer = Trainer(config, world)
        loaded = store.resume(_resume_from(config.resume))
        if loaded is not None:
            trainer.restore(loaded)
        log = RunLog(output, enabled=world.is_main, tensorboard=config.tensorboard)
        record = Record.start(
            TASK, "train", configs.to_dict(config), seed=config.seed, data=config.identity(), run_id=log.run_id
        )
        describe_metrics(log)
        parameters = sum(parameter.numel() for parameter in trainer.state.model.parameters())
        log.parameter(
            configs.to_dict(config)
            | {"parameters": parameters, "world_size": world.size, "global_batch_size": trainer.global_batch}
            | {"device": str(world.device), "engine": trainer.engine, "peak_lr": trainer.peak_lr}
            | {"steps": trainer.total_steps, "train_images": trainer.train_loader.num_samples}
        )
        if loaded is not None:
            log.log((), {"resumed_from": str(loaded.path), "step": loaded.step})
            owes = False
            if world.is_main:  # who alone has the record, and so decides for all
                _continue_record(record, output)
                owes = _owes_evaluation(trainer, loaded, record)
            if world.any(owes):
                _evaluate_and_save(trainer, (loaded.step - 1) // trainer.steps_per_epoch, log, record, store)
        status = train(trainer, log, record, store)
        record.metric("parameters", parameters, "")
        record.metric("steps", trainer.state.step, "")
        record.attach("skipped", trainer.train_loader.skipped)
        record.attach("model", {key: value for key, value in trainer.metadata().items() if key != "config"})
        if world.is_main:
            _finish(trainer, record, output, status, log)
        log.close()
        trainer.close()
        world.barrier()
        return record.fields


def _resume_from(resume: str) -> str | None:
    """What `Checkpoints.resume` takes: a run's folder stands for the checkpoints in it."""
    if resume.lower() in ("", "none"):
        return None
    inside = Path(resume) / "checkpoints"
    return str(inside) if resume != "auto" and inside.is_dir() else resume


def _finish(trainer: Trainer, record: Record, output: Path, status: str, log: RunLog) -> None:
    if trainer.val_loader is not None and status == "finished":
        shown = samples.predict_samples(
            trainer.evaluated, trainer.val_loader, trainer.state.normalize, trainer.classes, output / "samples"
        )
        record.attach("samples", shown)
    record.finish(status).save(output)
    page = report.render(output)
    best = {"val.best_top1": record.value("val.best_top1")} if "val.best_top1" in record.fields["metrics"] else {}
    log.log((), best | {"seconds": record.fields["seconds"], "report": str(page)})


def _continue_record(record: Record, output: Path) -> None:
    """Take over what earlier processes of this run found; the curves from the log, which a kill does not lose."""
    curves: dict[str, dict[int, Any]] = {}
    starts_anew = False
    for entry in runlog.read(output):
        if entry.get("step") == "RUN":
            starts_anew = True
        elif entry.get("step") == [] and "resumed_from" in entry["data"]:
            starts_anew = False
            last = entry["data"]["step"]
            curves = {name: {at: y for at, y in points.items() if at <= last} for name, points in curves.items()}
        elif entry["type"] == "LOG" and isinstance(entry["step"], list) and len(entry["step"]) == 2:
            curves, starts_anew = ({} if starts_anew else curves), False
            for name in (name for name in CURVES if name in entry["data"]):
                curves.setdefault(name, {})[entry["step"][1]] = entry["data"][name]
    record.fields["curve"] = {name: [[at, y] for at, y in sorted(points.items())] for name, points in curves.items()}
    if (output / records.FILE_NAME).is_file():
        earlier = records.load(output).fields
        record.fields["metrics"] = earlier["metrics"] | record.fields["metrics"]
        record.fields["attachments"] = earlier["attachments"] | record.fields["attachments"]


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
