"""The life of a training run: one process or many, stopped and resumed at any step.

    fields = training.run(config, Trainer)

Its folder holds dllogger.json (log), record.json (result), checkpoints/ and report.html.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import checkpoint as checkpoints
from . import config as configs
from . import dist, report, resuming
from .record import Record
from .runlog import RunLog
from .trainer import Trainer, TrainOptions


def run(config: TrainOptions, build: Callable[[Any, dist.World], Trainer]) -> dict[str, Any]:
    """Train by a configuration; returns the run record's fields. Raises Stopped after a signal, when all is saved."""
    torch.backends.cudnn.benchmark = True  # batches have one shape, so the search for the fastest kernels pays
    output = Path(config.output_dir)
    with dist.init(config.device) as world:
        trainer = build(config, world)
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


def _farewell(config: TrainOptions, fields: dict[str, Any], number: int) -> str:
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
        trainer.task,
        "train",
        configs.to_dict(config),
        seed=config.seed,
        data=trainer.data_identity(),
        run_id=log.run_id,
    )
    _describe_metrics(trainer, log)
    parameters = sum(parameter.numel() for parameter in trainer.state.model.parameters())
    log.parameter(
        configs.to_dict(config)
        | {"parameters": parameters, "world_size": world.size, "global_batch_size": trainer.global_batch}
        | {"device": str(world.device), "engine": trainer.engine, "peak_lr": trainer.peak_lr}
        | {"steps": trainer.total_steps, "train_samples": trainer.train_loader.num_samples}
    )
    if loaded is not None:
        _resume(trainer, loaded, output, log, record, store)
    stop = checkpoints.StopSignal(world)
    status = train(trainer, log, record, store, stop)
    record.metric("parameters", parameters, "")
    record.metric("steps", trainer.state.step, "")
    record.attach("skipped", trainer.train_loader.skipped)
    record.attach("model", trainer.identity())
    if world.is_main:
        _finish(trainer, record, output, status, log)
    log.close()
    return record.fields, stop.number()


def _describe_metrics(trainer: Trainer, log: RunLog) -> None:
    log.metadata("train.loss", unit=trainer.loss_unit, goal="MINIMIZE", stage="TRAIN", format=":.4f")
    log.metadata("train.throughput", unit=f"{trainer.items}/s", goal="MAXIMIZE", stage="TRAIN", format=":,.0f")
    log.metadata("train.lr", unit="", stage="TRAIN", format=":.3g")
    for key, description in trainer.metrics.items():
        log.metadata(f"val.{key}", stage="VAL", **description)


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
        names = ["train.loss", "train.lr", *(f"val.{key}" for key in trainer.metrics)]
        resuming.continue_record(record, output, names)
        epoch, within = divmod(step, trainer.steps_per_epoch)
        finished = step >= trainer.total_steps
        due = finished or (within == 0 and epoch % trainer.config.evaluate_epochs == 0)
        unscored = f"val.{trainer.score}" not in record.fields["metrics"]
        missing = loaded.meta["metric"] is None or (finished and unscored)
        owes = trainer.val_loader is not None and due and missing
    if world.any(owes):
        save_and_evaluate(trainer, (step - 1) // trainer.steps_per_epoch, log, record, store)


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
                save_and_evaluate(trainer, epoch, log, record, store)
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
    mean, samples, clock = dist.Mean(), 0, time.perf_counter()
    steps = trainer.steps_per_epoch - start
    for index, batch in enumerate(log.progress(trainer.batches(epoch, start), steps, f"epoch {epoch}"), start):
        if index >= trainer.steps_per_epoch or state.step >= trainer.total_steps:
            break
        mean.add(trainer.step(batch, epoch, index), trainer.global_batch)
        samples += trainer.global_batch
        if state.step % config.log_every == 0 or state.step == trainer.total_steps:
            loss = mean.value(world)
            now = time.perf_counter()
            rate = trainer.learning_rate(state.step - 1)
            speed = samples / (now - clock)
            log.log((epoch, state.step), {"train.loss": loss, "train.throughput": speed, "train.lr": rate})
            record.curve("train.loss", state.step, loss)
            record.curve("train.lr", state.step, rate)
            mean, samples, clock = dist.Mean(), 0, time.perf_counter()
            if not math.isfinite(loss):
                raise ArithmeticError(trainer.divergence(f"loss is {loss}", store))
        if config.save_steps and state.step % config.save_steps == 0:
            trainer.save(store)
        if stop.agreed() and state.step < trainer.total_steps:
            return False
    return True


def save_and_evaluate(
    trainer: Trainer, epoch: int, log: RunLog, record: Record, store: checkpoints.Checkpoints
) -> None:
    """Save, then evaluate what was saved: a kill during a long evaluation costs the evaluation, not the epoch."""
    saved = trainer.save(store)
    result = trainer.validate()
    if result is None:
        return
    score = result[trainer.score]
    best = trainer.is_better(score)
    trainer.best = score if best else trainer.best
    log.log((epoch, trainer.state.step), {f"val.{key}": result[key] for key in trainer.metrics})
    for key in trainer.metrics:
        record.curve(f"val.{key}", trainer.state.step, result[key])
    trainer.record_results(record, result)
    described = trainer.metrics[trainer.score]
    record.metric(f"val.best_{trainer.score}", trainer.best, described.get("unit", ""), described.get("goal"))
    if saved is not None:
        store.mark(saved, score, best)


def _finish(trainer: Trainer, record: Record, output: Path, status: str, log: RunLog) -> None:
    if trainer.val_loader is not None and status == "finished":
        trainer.finish(record, output)
    record.finish(status).save(output)
    page = report.render(output)
    name = f"val.best_{trainer.score}"
    best = {name: record.value(name)} if name in record.fields["metrics"] else {}
    log.log((), best | {"seconds": record.fields["seconds"], "report": str(page)})
