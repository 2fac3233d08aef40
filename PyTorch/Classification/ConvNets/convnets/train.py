"""Train an image classifier: one process or many, CPU or GPU, stopped and resumed at any step.

    ./dlx run ConvNets train -- --config quickstart
    ./dlx run ConvNets train -- --config resnet50 --data_dir /data/imagenet --output_dir runs/rn50
    ./dlx run ConvNets train --nproc gpu -- --config resnet50 --data_dir /data/imagenet

Recipes: configs/*.yaml. A run's folder holds dllogger.json (log), record.json (result), checkpoints/, report.html.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import dist, report, weights
from dlx.precision import LossScaler
from dlx.record import Record
from dlx.runlog import RunLog

from . import optim, pretrained, registry, resuming, samples
from .augment import mixup_weight
from .evaluate import evaluate, record_results
from .options import CONFIGS, TASK
from .recipe import TrainConfig
from .resnet import ResNet
from .step import Batch, GraphedStep, Normalize, TrainState, train_step


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
                f"global_batch_size {global_batch} is more than the {self.train_loader.num_samples} training pictures: "
                "lower --global_batch_size"
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
            weight = None if mix is None else torch.full((), mix, device=self.world.device)  # without a wait
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
            "conditions": self.conditions(),
            "world_size": self.world.size,
        }

    def conditions(self) -> dict[str, Any]:
        """What continuing with another value of makes another run."""
        config = self.config
        named = {key: value for key, value in configs.to_dict(config).items() if key not in resuming.FREE_OPTIONS}
        return named | {
            "data": str(Path(config.data_dir).resolve()) if config.data_dir else config.data,
            "image_size": self.image_size,
            "global_batch_size": self.global_batch,
            "training pictures": self.train_loader.num_samples,
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
        rest = {
            "optimizer": state.optimizer.state_dict(),
            "scaler": state.scaler.state_dict(),
            "rng": random_states,
            "best": self.best,
        }
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
        if loaded.metadata.get("arch") != self.config.arch:
            raise ValueError(
                f"{loaded.path} holds a {loaded.metadata.get('arch')}, not a {self.config.arch}; {resuming.ADVICE}"
            )
        if loaded.metadata["classes"] != self.classes:
            known, found = (", ".join(names[:5]) for names in (loaded.metadata["classes"], self.classes))
            raise ValueError(
                f"{loaded.path} was trained on other classes ({known} ...) than the data's ({found} ...); "
                f"{resuming.ADVICE}"
            )
        state.model.load_state_dict(loaded.model["model"])
        if state.ema:
            state.ema.module.load_state_dict(loaded.model.get("ema", loaded.model["model"]))
        rates = [group["lr"] for group in state.optimizer.param_groups]
        state.optimizer.load_state_dict(loaded.state["optimizer"])
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # this run's schedule (a tensor on a GPU, a number on a CPU) sets it anew
        state.scaler.load_state_dict(loaded.state["scaler"])
        # A checkpoint is evaluated after it is saved, so what it scored stands beside its state.
        score = loaded.meta["metric"]
        state.step, self.best = loaded.step, max(loaded.state["best"], float("-inf") if score is None else score)
        if len(loaded.state["rng"]) == self.world.size:
            checkpoints.set_rng_state(loaded.state["rng"][self.world.rank])

    def close(self) -> None:
        """Stop the loaders' processes."""
        for loader in (self.train_loader, self.val_loader):
            if loader is not None:
                loader.close()


def train(
    trainer: Trainer, log: RunLog, record: Record, store: checkpoints.Checkpoints, stop: checkpoints.StopSignal
) -> str:
    """Go through the remaining epochs; returns "finished" or "stopped" (by a signal, after saving)."""
    config, state = trainer.config, trainer.state
    with stop:
        while state.step < trainer.total_steps:
            epoch, start = divmod(state.step, trainer.steps_per_epoch)
            if not _train_epoch(trainer, epoch, start, stop, log, record, store):
                trainer.save(store)
                log.log((epoch, state.step), {"stopped": stop.signal or "by another process"})
                return "stopped"
            last = state.step >= trainer.total_steps
            if last or (epoch + 1) % config.evaluate_epochs == 0:
                _save_and_evaluate(trainer, epoch, log, record, store)
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
            rate = trainer.learning_rate(state.step - 1)
            speed = images / (now - clock)
            log.log((epoch, state.step), {"train.loss": loss, "train.throughput": speed, "train.lr": rate})
            record.curve("train.loss", state.step, loss)
            record.curve("train.lr", state.step, rate)
            mean, images, clock = dist.Mean(), 0, time.perf_counter()
            if loss != loss or abs(loss) == float("inf"):
                raise ArithmeticError(trainer.divergence(f"loss is {loss}", store))
        if config.save_steps and state.step % config.save_steps == 0:
            trainer.save(store)
        if stop.agreed() and state.step < trainer.total_steps:
            return False
    return True


def _save_and_evaluate(
    trainer: Trainer, epoch: int, log: RunLog, record: Record, store: checkpoints.Checkpoints
) -> None:
    """Save, then evaluate what was saved: a kill during a long evaluation costs the evaluation, not the epoch."""
    saved = trainer.save(store)
    result = trainer.validate()
    if result is None:
        return
    best = result["top1"] > trainer.best
    trainer.best = max(trainer.best, result["top1"])
    shown = {f"val.{key}": result[key] for key in ("loss", "top1", "top5")}
    log.log((epoch, trainer.state.step), shown)
    for key in ("loss", "top1", "top5"):
        record.curve(f"val.{key}", trainer.state.step, result[key])
    record_results(record, result, trainer.classes)
    record.metric("val.best_top1", trainer.best, "%", "MAXIMIZE")
    if saved is not None:
        store.mark(saved, result["top1"], best)


def describe_metrics(log: RunLog) -> None:
    log.metadata("train.loss", unit="nats", goal="MINIMIZE", stage="TRAIN", format=":.4f")
    log.metadata("train.throughput", unit="images/s", goal="MAXIMIZE", stage="TRAIN", format=":,.0f")
    log.metadata("train.lr", unit="", stage="TRAIN", format=":.3g")
    log.metadata("val.loss", unit="nats", goal="MINIMIZE", stage="VAL", format=":.4f")
    log.metadata("val.top1", unit="%", goal="MAXIMIZE", stage="VAL", format=":.2f")
    log.metadata("val.top5", unit="%", goal="MAXIMIZE", stage="VAL", format=":.2f")


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    torch.backends.cudnn.benchmark = True  # batches have one shape, so the search for the fastest kernels pays
    output = Path(config.output_dir)
    with dist.init(config.device) as world:
        trainer = Trainer(config, world)
        try:
            with resuming.only_run(output, world):
                fields, number = _run(trainer, output)
        finally:
            trainer.close()
        world.barrier()
    if number is not None:
        if world.is_main:
            print(_farewell(config, fields, number), file=sys.stderr, flush=True)
        raise checkpoints.Stopped(number)
    return fields


def _farewell(config: TrainConfig, fields: dict[str, Any], number: int) -> str:
    name, step = signal.Signals(number).name, fields["metrics"]["steps"]["value"]
    if fields["status"] == "finished":
        return f"{name}: the training had its last step, {step}, and is complete in {config.output_dir}"
    again = "" if config.resume == "auto" else " with --resume auto"
    return f"{name}: stopped after step {step}, saved in {config.output_dir}; the same command{again} continues there"


def _run(trainer: Trainer, output: Path) -> tuple[dict[str, Any], int | None]:
    """The record's fields, and the number of the signal that stopped the run."""
    config, world = trainer.config, trainer.world
    store = checkpoints.Checkpoints(output / "checkpoints", keep=config.keep_checkpoints)
    loaded = store.resume(resuming.source(config.resume))
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
        _resume(trainer, loaded, output, log, record, store)
    stop = checkpoints.StopSignal(world)
    status = train(trainer, log, record, store, stop)
    record.metric("parameters", parameters, "")
    record.metric("steps", trainer.state.step, "")
    record.attach("skipped", trainer.train_loader.skipped)
    described = {key: value for key, value in trainer.metadata().items() if key not in ("config", "conditions")}
    record.attach("model", described)
    if world.is_main:
        _finish(trainer, record, output, status, log)
    log.close()
    return record.fields, stop.number()


def _resume(
    trainer: Trainer,
    loaded: checkpoints.Loaded,
    output: Path,
    log: RunLog,
    record: Record,
    store: checkpoints.Checkpoints,
) -> None:
    """Say what the run goes on with, and make up for an evaluation that a signal or a kill prevented."""
    world, step = trainer.world, loaded.step
    log.log((), {"resumed_from": str(loaded.path), "step": step})
    owes = False
    if world.is_main:  # who alone has the record, and so decides for all
        resuming.warn_of_changes(loaded, trainer.conditions())
        if step >= trainer.total_steps:
            print(f"nothing left to train: step {step} of {trainer.total_steps}", file=sys.stderr, flush=True)
        resuming.continue_record(record, output)
        epoch, within = divmod(step, trainer.steps_per_epoch)
        finished = step >= trainer.total_steps
        due = finished or (within == 0 and epoch % trainer.config.evaluate_epochs == 0)
        missing = loaded.meta["metric"] is None or (finished and "val.top1" not in record.fields["metrics"])
        owes = trainer.val_loader is not None and due and missing
    if world.any(owes):
        _save_and_evaluate(trainer, (step - 1) // trainer.steps_per_epoch, log, record, store)


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


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
