"""A training run: built from its options, carried through epochs, stopped and resumed at any step."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.regularizer import L2Decay

from dlx import config as configs
from dlx import record as records
from dlx import report, runlog
from dlx.files import lock
from dlx.record import Record
from dlx.runlog import RunLog
from dlx.vision import Preprocessing

from . import checkpoint, evaluate, framework, pretrained, samples, sparsity
from .convert import arrays_of, load_into
from .data import Order, open_data
from .loader import Loader
from .model import architecture, build, count_parameters
from .options import TrainConfig
from .step import TrainState, mixup_weight, train_step

VELOCITY = "_velocity_0"  # Paddle's ending for the momentum of a parameter
# Options that make another run of one, besides what `Trainer.conditions` computes.
RECIPE = ("momentum", "nesterov", "weight_decay", "label_smoothing", "mixup", "augmentation", "mask_algo")
CURVES = ("train.loss", "train.lr", "val.loss", "val.top1", "val.top5", "sparsity.density")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """Notes a signal, so that the step in progress ends and is saved; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> Stop:
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


def learning_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Of the step that comes after `step` others: linear to the peak, then a cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class Trainer:
    """Model, optimiser, loaders and what a step is."""

    def __init__(self, config: TrainConfig, world: framework.World):
        self.config, self.world = config, world
        splits = open_data(config.data, config.data_dir, num_classes=config.num_classes, num_samples=config.num_samples)
        if "train" not in splits:
            raise ValueError(f"{config.data_dir or config.data} has no split 'train'")
        train = splits["train"]
        self.splits = tuple(splits)
        self.classes = train.classes
        size = config.image_size or architecture(config.arch).image_size
        resize = config.resize or pretrained.default_resize(size)
        self.preprocessing = Preprocessing(resize, size, "bilinear", train.mean, train.std, train.channels)
        order = Order(len(train), config.batch_size, True, config.seed, world.rank, world.size)
        self.train_loader = Loader(
            train, order, size=size, resize=resize, augment=config.augmentation == "standard",
            workers=config.workers, backend=config.data_backend,
        )  # fmt: skip
        self.val_loader = None
        if "val" in splits and config.run_scope == "train_eval":
            self.val_loader = evaluate.evaluation_loader(config, splits["val"], self.preprocessing, world)
        self.steps_per_epoch = len(self.train_loader) // config.gradient_merge
        if not self.steps_per_epoch:
            raise ValueError(f"gradient_merge {config.gradient_merge}: an epoch has {len(self.train_loader)} batches")
        whole = self.steps_per_epoch * config.epochs
        self.total_steps = min(whole, config.max_steps or whole)
        self.global_batch = config.batch_size * world.size * config.gradient_merge
        self.peak_lr = config.lr * (self.global_batch / config.lr_batch_size if config.lr_batch_size else 1)
        self.warmup_steps = round(config.warmup_epochs * self.steps_per_epoch)
        self.masked: list[str] = []
        self.state = self._build()

    def _build(self) -> TrainState:
        config, world = self.config, self.world
        paddle.seed(config.seed)
        model = build(
            config.arch, len(self.classes), in_channels=self.preprocessing.channels,
            zero_init_residual=config.zero_init_residual, data_format=config.data_layout,
        )  # fmt: skip
        if config.init_from:
            pretrained.start_from(model, config.arch, config.init_from)
        model.train()
        parameters = [value for value in model.parameters() if not value.stop_gradient]
        for value in parameters:
            if value.ndim <= 1:
                value.regularizer = L2Decay(0.0)  # goes before the optimiser's
        optimizer: Any = paddle.optimizer.Momentum(
            self.peak_lr, config.momentum, parameters, config.nesterov, L2Decay(config.weight_decay)
        )
        if config.asp:
            optimizer = sparsity.decorate(optimizer, parameters)
            if config.prune_model:
                sparsity.prune(model, optimizer, config.mask_algo)
            else:
                sparsity.adopt(model, optimizer)
            self.masked = list(sparsity.masks(model, optimizer))
        forward: Any = paddle.jit.to_static(model, full_graph=True) if config.to_static else model
        if world.size > 1:
            forward = paddle.DataParallel(forward)
        dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": None}[self.precision()]
        scaler = None
        if dtype == "float16":
            scaler = paddle.amp.GradScaler(
                init_loss_scaling=config.scale_loss, use_dynamic_loss_scaling=config.use_dynamic_loss_scaling
            )
        return TrainState(model, forward, optimizer, self.preprocessing, config.label_smoothing, dtype, scaler)

    def precision(self) -> str:
        """The one that is used: Paddle has no mixed precision on a CPU."""
        return self.config.precision if self.world.on_gpu else "fp32"

    def micro_batches(self, epoch: int, start: int) -> Iterator[list[Any]]:
        """The optimiser steps of an epoch from step `start` on, each a list of micro-batches."""
        merge = self.config.gradient_merge
        self.train_loader.set_epoch(epoch, start * merge)
        gathered: list[Any] = []
        for batch in self.train_loader:
            gathered.append(batch)
            if len(gathered) == merge:
                yield gathered
                gathered = []

    def step(self, batch: list[Any], epoch: int, index: int) -> Any:
        config, state = self.config, self.state
        rate = learning_rate(state.step, self.peak_lr, self.warmup_steps, self.total_steps)
        state.optimizer.set_lr(rate)
        return train_step(state, batch, mixup_weight(config.mixup, config.seed, epoch, index) if config.mixup else None)

    def share_statistics(self) -> None:
        """The norms' running statistics are each process's own; the mean of them is evaluated and saved."""
        if self.world.size > 1:
            for value in self.state.model.parameters():
                if value.stop_gradient:
                    value.set_value(self.world.sum(value.clone()) / self.world.size)

    def evaluate(self) -> dict[str, Any] | None:
        if self.val_loader is None:
            return None
        model = self.state.model
        model.eval()
        forward = evaluate.model_forward(model, self.preprocessing)
        result = evaluate.evaluate(forward, self.val_loader, len(self.classes), self.world)
        model.train()
        return result

    # Saving

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        """Momentum and masks by the parameter's name in the model: Paddle's own names count up in a process."""
        kept = self.state.optimizer.state_dict()
        found = {}
        for name, value in self.state.model.named_parameters():
            for ending in (VELOCITY, sparsity.MASK):
                if f"{value.name}{ending}" in kept:
                    found[f"{name}{ending}"] = np.asarray(kept[f"{value.name}{ending}"])
        return found

    def conditions(self) -> dict[str, Any]:
        """What a resumed run must share with the checkpoint."""
        config = self.config
        return {
            "arch": config.arch, "classes": self.classes, "global_batch": self.global_batch, "seed": config.seed,
            "total_steps": self.total_steps, "steps_per_epoch": self.steps_per_epoch, "asp": config.asp,
            "image_size": self.preprocessing.crop, "peak_lr": self.peak_lr, "warmup_steps": self.warmup_steps,
        } | {key: getattr(config, key) for key in RECIPE}  # fmt: skip

    def save(self, store: checkpoint.Checkpoints) -> Path | None:
        self.share_statistics()
        if not self.world.is_main:
            return None
        described = pretrained.describe(
            self.config.arch, self.classes, self.preprocessing, self.state.model.data_format
        )
        meta = {
            "model": described, "conditions": self.conditions(),
            "config": configs.to_dict(self.config),
            "scaler": self.state.scaler.state_dict() if self.state.scaler else None,
        }  # fmt: skip
        return store.save(self.state.step, arrays_of(self.state.model), self.optimizer_arrays(), meta)

    def restore(self, loaded: checkpoint.Loaded) -> None:
        """Go on where a checkpoint was. ValueError where this run would be another."""
        before, now = loaded.meta["conditions"], self.conditions()
        changed = [
            f"{key} was {before[key]!r:.60} and is {value!r:.60}"
            for key, value in now.items()
            if key in before and before[key] != value
        ]
        if changed:
            raise ValueError(
                f"{loaded.path} is of another run: {'; '.join(changed)} (another --output_dir begins anew)"
            )
        load_into(self.state.model, loaded.model, str(loaded.path))
        names = {name: value.name for name, value in self.state.model.named_parameters()}
        state = {}
        for key, value in loaded.optimizer.items():
            ending = VELOCITY if key.endswith(VELOCITY) else sparsity.MASK
            state[names[key.removesuffix(ending)] + ending] = paddle.to_tensor(value)
        self.state.optimizer.set_state_dict(state)
        if self.config.asp:
            self.masked = list(sparsity.masks(self.state.model, self.state.optimizer))
        if self.state.scaler and loaded.meta["scaler"]:
            self.state.scaler.load_state_dict(loaded.meta["scaler"])
        self.state.step = loaded.step


def run(config: TrainConfig) -> dict[str, Any]:
    """Train by a configuration; the record's fields. SystemExit with 128 + signal after a signal, when all is saved."""
    world = framework.join(config.device)
    output = Path(config.output_dir)
    if config.precision != "fp32" and not world.on_gpu and world.is_main:
        print(f"precision {config.precision}: Paddle has no AMP on a CPU (it is a no-op there), so this runs in fp32")
    trainer = Trainer(config, world)
    if world.is_main and "val" not in trainer.splits and config.run_scope == "train_eval":
        print(f"{config.data_dir or config.data} has no split val, so nothing is evaluated")
    if world.is_main and config.asp and config.prune_model and not config.init_from:
        print("asp without --init_from: fresh weights are pruned, and not those of a dense run")
    output.mkdir(parents=True, exist_ok=True)
    with Stop() as stop:
        if world.is_main:
            with lock(output / ".lock", timeout=1, message=f"{output} is in use by another run"):
                fields = _run(trainer, output, stop)
        else:
            fields = _run(trainer, output, stop)
    if fields["status"] == "stopped":
        number = stop.number or signal.SIGTERM
        print(f"stopped after step {trainer.state.step}; the same command continues {output}", flush=True)
        raise SystemExit(128 + number)
    return fields


def _run(trainer: Trainer, output: Path, stop: Stop) -> dict[str, Any]:
    config, world = trainer.config, trainer.world
    store = checkpoint.Checkpoints(output / "checkpoints", config.keep_checkpoints)
    if config.resume == "none" and store.list():
        raise ValueError(f"{store.directory} holds a run already; --resume none needs another --output_dir")
    loaded = store.newest() if config.resume == "auto" else None
    log = RunLog(output, enabled=world.is_main, tensorboard=config.tensorboard)
    record = framework.start_record("train", config, data=config.data_identity(), run_id=log.run_id)
    for name, unit, goal, stage, shown in (
        ("train.loss", "nats", "MINIMIZE", "TRAIN", ":.4f"),
        ("train.throughput", "images/s", "MAXIMIZE", "TRAIN", ":,.0f"),
        ("train.lr", "", None, "TRAIN", ":.3g"), ("val.top1", "%", "MAXIMIZE", "VAL", ":.2f"),
        ("val.top5", "%", "MAXIMIZE", "VAL", ":.2f"), ("val.loss", "nats", "MINIMIZE", "VAL", ":.4f"),
        ("sparsity.density", "", None, "TRAIN", ":.4f"),
    ):  # fmt: skip
        log.metadata(name, unit=unit, goal=goal, stage=stage, format=shown)
    earlier = 0.0  # seconds
    parameters = count_parameters(trainer.state.model)
    log.parameter(
        configs.to_dict(config)
        | {"parameters": parameters, "world_size": world.size, "global_batch_size": trainer.global_batch}
        | {"effective_precision": trainer.precision(), "peak_lr": trainer.peak_lr, "steps": trainer.total_steps}
    )
    if loaded is not None:
        trainer.restore(loaded)
        log.log((), {"resumed_from": str(loaded.path), "step": loaded.step})
        if world.is_main:
            earlier = _take_over(record, output)
    status = _epochs(trainer, log, record, store, stop)
    record.metric("parameters", parameters, "")
    record.metric("steps", trainer.state.step, "")
    if world.is_main:
        if status == "finished" and trainer.val_loader is not None:
            trainer.state.model.eval()
            record.attach("samples", samples.predict(trainer, output / "samples"))
        record.finish(status).fields["seconds"] += earlier
        record.save(output)
        log.log((), {"seconds": record.fields["seconds"], "report": str(report.render(output))})
    log.close()
    return record.fields


def _take_over(record: Record, output: Path) -> float:
    """Into the record of a run that goes on: the results so far from the last record, and the curves from the log,
    which a kill leaves whole. The seconds that the last record counts."""
    curves: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    fresh = False
    for entry in runlog.read(output):
        place, data = entry.get("step"), entry.get("data")
        if place == "RUN":
            fresh = True
        elif place == [] and "resumed_from" in data:
            fresh = False
            for points in curves.values():
                for late in [at for at in points if at > data["step"]]:
                    del points[late]
        elif entry["type"] == "LOG" and isinstance(place, list) and len(place) == 2:
            for name in CURVES:
                if fresh:
                    curves[name].clear()
                if name in data:
                    curves[name][place[1]] = data[name]
            fresh = False
    record.fields["curve"] = {
        name: [[at, y] for at, y in sorted(found.items())] for name, found in curves.items() if found
    }
    if not (output / records.FILE_NAME).is_file():
        return 0.0
    before = records.load(output).fields
    record.fields["metrics"].update(before["metrics"])
    record.fields["attachments"].update(before["attachments"])
    return before["seconds"] or 0.0


def _epochs(trainer: Trainer, log: RunLog, record: Record, store: checkpoint.Checkpoints, stop: Stop) -> str:
    state, config, world = trainer.state, trainer.config, trainer.world
    if config.asp and config.prune_model and config.init_from and state.step == 0:
        pruned = trainer.evaluate()
        if pruned is not None:
            record.metric("val.top1.pruned", pruned["top1"], "%", "MAXIMIZE")
            log.log((0, 0), {"val.top1.pruned": pruned["top1"]})
    whole = state.step % trainer.steps_per_epoch == 0 or state.step >= trainer.total_steps
    if whole and state.step and world.any(world.is_main and store.owes_evaluation(state.step)):
        _evaluate(trainer, log, record, store)
    while state.step < trainer.total_steps:
        epoch, start = divmod(state.step, trainer.steps_per_epoch)
        if not _epoch(trainer, epoch, start, log, record, store, stop):
            trainer.save(store)
            return "stopped"
        if config.asp:
            found = sparsity.check(state.model, trainer.masked)
            record.attach("density", found)
            record.curve("sparsity.density", state.step, max(found.values()))
            log.log((epoch, state.step), {"sparsity.density": max(found.values()), "sparsity.layers": len(found)})
        trainer.save(store)  # before the evaluation: a kill in it costs the evaluation only
        _evaluate(trainer, log, record, store)
    return "finished"


def _evaluate(trainer: Trainer, log: RunLog, record: Record, store: checkpoint.Checkpoints) -> None:
    """Measure the checkpoint that was saved last, and note its score."""
    result, step = trainer.evaluate(), trainer.state.step
    if result is None:
        return
    shown = {f"val.{key}": result[key] for key in ("loss", "top1", "top5")}
    log.log(((step - 1) // trainer.steps_per_epoch, step), shown)
    evaluate.record_results(record, result, trainer.classes)
    for key, value in shown.items():
        record.curve(key, step, value)
    if trainer.world.is_main:
        store.score(store.list()[-1], step, result["top1"])
        record.metric("val.best_top1", store.best_score(), "%", "MAXIMIZE")
        record.save(log.path.parent)  # what a kill must not take


def _epoch(
    trainer: Trainer, epoch: int, start: int, log: RunLog, record: Record, store: checkpoint.Checkpoints, stop: Stop
) -> bool:
    """The steps of one epoch from `start` on; False when the run was told to stop."""
    state, config, world = trainer.state, trainer.config, trainer.world
    losses: list[Any] = []
    clock = time.perf_counter()
    for index, batch in enumerate(trainer.micro_batches(epoch, start), start):
        if index >= trainer.steps_per_epoch or state.step >= trainer.total_steps:
            break
        losses.append(trainer.step(batch, epoch, index))
        if state.step % config.log_every == 0 or state.step == trainer.total_steps:
            loss = float(world.sum(paddle.stack(losses).mean())) / world.size
            speed = trainer.global_batch * len(losses) / (time.perf_counter() - clock)
            rate = state.optimizer.get_lr()
            log.log((epoch, state.step), {"train.loss": loss, "train.throughput": speed, "train.lr": rate})
            record.curve("train.loss", state.step, loss)
            record.curve("train.lr", state.step, rate)
            if not math.isfinite(loss):
                raise ArithmeticError(
                    f"the loss is {loss} at step {state.step}; the last good state is in {store.directory}"
                )
            losses, clock = [], time.perf_counter()
        if config.save_steps and state.step % config.save_steps == 0:
            trainer.save(store)
        # All processes have to leave at the same step; asking costs an exchange, so it is done now and then.
        due = world.size == 1 or state.step % 5 == 0
        if due and state.step < trainer.total_steps and world.any(stop.number is not None):
            return False
    return True
