"""Train, validate or predict. Several workers are started by `runner`.

    ./dlx run rn50_mxnet train -- --config quickstart
    ./dlx run rn50_mxnet train -- --config resnet50 --data_dir /data/imagenet-recordio --output_dir runs/resnet50
    ./dlx run rn50_mxnet train -- --mode val --checkpoint runs/quickstart

A run that was stopped goes on where it was when the same command is given again: to the bit on a CPU.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet.contrib import amp

from dlx import config as configs
from dlx import record as records
from dlx import report
from dlx.files import lock
from dlx.record import Record
from dlx.runlog import RunLog

from . import checkpoint, evaluate, predict, registry
from .blocks import get_weights, set_weights
from .data import Dataset, Loader
from .options import CONFIGS, TASK, TrainConfig, context
from .step import (
    TrainState,
    average_statistics,
    build_trainer,
    get_trainer_states,
    learning_rate,
    mix_weight,
    set_trainer_states,
    train_step,
)  # fmt: skip
from .workers import Workers

# What may differ between a checkpoint and the run that goes on with it.
FREE = {
    "output_dir",
    "resume",
    "epochs",
    "max_steps",
    "log_every",
    "workers",
    "mode",
    "checkpoint",
    "device",
    "kvstore",
}


class Stopped(SystemExit):
    """Training left because of a signal, after saving; the exit status is 128 + signal."""


class Run:
    """One training: builds what it needs, goes through the epochs, saves."""

    def __init__(self, config: TrainConfig, workers: Workers) -> None:
        self.config, self.workers = config, workers
        self.ctx = context(config.device, workers.rank)
        check_precision(config.precision, self.ctx)
        self.dataset: Dataset = config.open()
        self.loader: Loader = config.loader(self.dataset, "train", config.arch, True, workers)
        if config.precision != "fp32":
            amp.init("bfloat16" if config.precision == "bf16" else "float16")
        channels = self.dataset.channels
        self.network = registry.build(
            config.arch, len(self.dataset.classes), channels, seed=config.seed, ctx=self.ctx,
            fused=config.fused and self.ctx.device_type == "cpu" and config.precision == "fp32",
        )  # fmt: skip
        self.shape = checkpoint.preprocessing_for(config.arch, channels, config.image_size, config.resize)
        self.described = {
            "arch": config.arch, "classes": self.dataset.classes, "preprocessing": self.shape.to_dict()
        }  # fmt: skip
        self.progress = checkpoint.Progress(config=configs.to_dict(config))
        self.folder = Path(config.output_dir) / "checkpoints"
        self.total = len(self.loader) * config.epochs
        self.stop_at = min(self.total, config.max_steps or self.total)
        self.global_batch = config.batch_size * workers.size
        self.base_lr = config.lr * (self.global_batch / config.lr_batch_size if config.lr_batch_size else 1)
        trainer = build_trainer(
            self.network, workers, lr=self.base_lr, momentum=config.momentum, weight_decay=config.weight_decay,
            nesterov=config.nesterov,
        )  # fmt: skip
        self.state = TrainState(
            self.network, trainer, len(self.dataset.classes), self.shape.mean, self.shape.std, config.label_smoothing,
            config.precision, workers.size,
        )  # fmt: skip
        self.resumed = False
        self.signal = 0

    def begin(self) -> None:
        """Take the state that output_dir or ``checkpoint`` has; then all is ready for a step."""
        self.resumed = self.restore()
        if self.config.precision == "fp16":
            amp.init_trainer(self.state.trainer)
        self.network.hybridize(static_alloc=True, static_shape=True)

    def restore(self) -> bool:
        """Go on from `last` if it is there and wanted, else take the weights of ``checkpoint``."""
        last = checkpoint.whole(self.folder / "last")
        if self.config.resume == "auto" and last is not None:
            content = checkpoint.read_state(last)
            progress = checkpoint.Progress(**content["progress"])
            check_resumable(progress.config, configs.to_dict(self.config), str(last))
            if content["classes"] != self.dataset.classes:
                raise ValueError(f"{last}: was trained on other classes than {self.config.source()} has")
            set_weights(self.network, checkpoint.read_tensors(last / checkpoint.WEIGHTS), str(last))
            states = checkpoint.read_tensors(last / checkpoint.TRAINER)
            set_trainer_states(self.network, self.state.trainer, states, str(last))
            progress.config = self.progress.config
            self.progress, self.state.step = progress, progress.step
            return True
        if self.config.checkpoint is not None:
            found = checkpoint.load(self.config.checkpoint, self.config.arch)
            set_weights(self.network, found.weights, found.source)
        return False

    def save(self, name: str, epoch: int, batch: int) -> None:
        """Write checkpoint ``name``; only `last` can be gone on with."""
        average_statistics(self.network, self.workers)
        if not self.workers.is_main:
            return
        self.progress.step, self.progress.epoch, self.progress.batch = self.state.step, epoch, batch
        states = get_trainer_states(self.network, self.state.trainer) if name == "last" else None
        checkpoint.save(self.folder / name, get_weights(self.network), self.described, self.progress, states)

    def rate(self) -> float:
        """The learning rate of the coming step."""
        warmup = round(self.config.warmup_epochs * len(self.loader))
        return learning_rate(
            self.state.step, base=self.base_lr, total=self.total, warmup=warmup, schedule=self.config.lr_schedule
        )  # fmt: skip

    def must_stop(self) -> int:
        """The signal that came, to any worker; several workers ask each other when they log."""
        if self.workers.size > 1:
            if self.state.step % self.config.log_every:
                return 0
            told = self.workers.sum([self.signal]).max()  # another worker's, maybe
            return int(self.signal or signal.SIGTERM) if told else 0
        return self.signal

    def train_epoch(self, epoch: int, start: int, log: RunLog, record: Record) -> None:
        """The steps of an epoch from batch ``start`` on."""
        config = self.config
        before, count = time.perf_counter(), 0
        for batch, (images, labels) in enumerate(self.loader.epoch(epoch, start), start + 1):
            self.state.trainer.set_learning_rate(self.rate())
            mix = mix_weight(config.mixup, config.seed, self.state.step)
            images, labels = images.as_in_context(self.ctx), labels.as_in_context(self.ctx)
            loss = train_step(self.state, images, labels, mix)
            count += 1
            step = self.state.step
            if step % config.log_every == 0 or step == self.stop_at:
                value = float(loss.asscalar())
                mx.nd.waitall()
                now = time.perf_counter()
                speed = count * self.global_batch / (now - before)
                before, count = now, 0
                log.log(
                    (epoch, step),
                    {"train.loss": value, "train.lr": self.state.trainer.learning_rate, "train.ips": speed},
                )
                record.curve("train.loss", step, value)
                if not math.isfinite(value):
                    raise ValueError(f"the loss is {value} at step {step} (lr {self.state.trainer.learning_rate:g})")
            if config.save_steps and step % config.save_steps == 0 and batch < len(self.loader):
                self.save("last", epoch, batch)
            number = self.must_stop()
            if number and batch < len(self.loader):
                self.save("last", epoch, batch)
                raise Stopped(128 + number)
            if step >= self.stop_at:
                return

    def train(self, log: RunLog, record: Record) -> dict[str, Any] | None:
        """All epochs that are left; the last evaluation's result."""
        result = None
        start = self.progress.batch
        for epoch in range(self.progress.epoch, self.config.epochs):
            if self.state.step >= self.stop_at:
                break
            self.train_epoch(epoch, start, log, record)
            batch = self.state.step - epoch * len(self.loader)
            average_statistics(self.network, self.workers)
            if self.config.mode == "train_val" and "val" in self.dataset.counts and self.dataset.folder is not None:
                result = self.validate(epoch, log, record)
            done = batch >= len(self.loader)
            self.save("last", epoch + done, 0 if done else batch)
            if self.workers.is_main:
                record.save(Path(self.config.output_dir))  # what a kill must not take
            start = 0
            number = self.must_stop()
            if number:
                raise Stopped(128 + number)
        return result

    def validate(self, epoch: int, log: RunLog, record: Record) -> dict[str, Any]:
        """Evaluate; what is the best so far is kept as `best`."""
        loader = self.config.loader(self.dataset, "val", self.config.arch, False, self.workers)
        result = evaluate.evaluate(
            self.network, loader.epoch(0), mean=self.shape.mean, std=self.shape.std, workers=self.workers, ctx=self.ctx,
            num_classes=len(self.dataset.classes),
        )  # fmt: skip
        log.log((epoch,), {f"val.{key}": result[key] for key in ("loss", "top1", "top5")})
        record.curve("val.loss", self.state.step, result["loss"])
        record.curve("val.top1", self.state.step, result["top1"])
        if result["top1"] > self.progress.best:
            self.progress.best = result["top1"]
            self.save("best", epoch + 1, 0)
        return result


def check_precision(precision: str, ctx: mx.Context) -> None:
    """ValueError for fp16 on a CPU, which MXNet has no products for."""
    if precision == "fp16" and ctx.device_type == "cpu":
        raise ValueError("precision fp16 needs a GPU: MXNet has no fp16 products for CPUs; use fp32 or bf16")


def check_resumable(then: dict[str, Any], now: dict[str, Any], source: str) -> None:
    """ValueError where the command differs from the checkpoint's in what decides the result."""
    changed = [key for key in now if key not in FREE and key in then and then[key] != now[key]]
    if changed:
        words = ", ".join(f"{key} {then[key]!r} -> {now[key]!r}" for key in changed)
        raise ValueError(f"{source} was made with other settings ({words}); --resume none or another output_dir")


def run(config: TrainConfig) -> dict[str, Any] | None:
    """Do what ``mode`` says; the result of the last evaluation, if there was one."""
    if config.mode == "val":
        names = set(vars(evaluate.EvaluateConfig)) | set(evaluate.EvaluateConfig.__dataclass_fields__)
        values = {key: value for key, value in configs.to_dict(config).items() if key in names}
        evaluate.require_weights(config.checkpoint)
        if not Path(config.checkpoint).is_file():
            values["arch"] = None  # a checkpoint says it itself
        return evaluate.run(evaluate.EvaluateConfig(**values))
    if config.mode == "pred":
        return predict.run(config)
    workers = Workers(config.kvstore)
    run_ = Run(config, workers)
    output = Path(config.output_dir)
    alone: Any = contextlib.nullcontext()
    if workers.is_main:
        alone = lock(output / ".lock", timeout=1, message=f"{output} is in use by another run")
    with alone:
        run_.begin()
        return carry_out(run_)


def carry_out(run_: Run) -> dict[str, Any] | None:
    """Train, with log, record and signals; the result of the last evaluation."""
    config, workers = run_.config, run_.workers
    record = Record.start(
        TASK, "train", configs.to_dict(config), seed=config.seed, data=config.identity(run_.dataset)
    )  # fmt: skip
    if run_.resumed and workers.is_main:
        continue_record(record, Path(config.output_dir), run_.state.step)
    log = RunLog(config.output_dir, enabled=workers.is_main, run_id=record.run_id)
    describe(log, config, run_)
    previous = {
        number: signal.signal(number, lambda received, frame: setattr(run_, "signal", received))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    status = "failed"
    try:
        result = run_.train(log, record)
        status = "finished"
    except Stopped:
        status = "stopped"
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        record.finish(status)
        log.close()
        if workers.is_main:
            finish(config, record, result if status == "finished" else None, run_)
    return result


def continue_record(record: Record, output: Path, step: int) -> None:
    """Take over the curves and results of the run so far, up to the step that goes on."""
    if not (output / records.FILE_NAME).is_file():
        return
    before = records.load(output).fields
    record.fields["metrics"].update(before["metrics"])
    record.fields["attachments"].update(before["attachments"])
    for name, points in before["curve"].items():
        record.fields["curve"][name] = [point for point in points if point[0] <= step]


def describe(log: RunLog, config: TrainConfig, run_: Run) -> None:
    """Parameters and the meaning of the metrics, once."""
    log.parameter(configs.to_dict(config) | {"global_batch_size": run_.global_batch, "lr_scaled": run_.base_lr})
    log.metadata("train.loss", unit="nats", goal="MINIMIZE", stage="TRAIN", format=":.4f")
    log.metadata("train.lr", stage="TRAIN", format=":.5f")
    log.metadata("train.ips", unit="images/s", goal="MAXIMIZE", stage="TRAIN", format=":.1f")
    log.metadata("val.loss", unit="nats", goal="MINIMIZE", stage="VAL", format=":.4f")
    for name in ("val.top1", "val.top5"):
        log.metadata(name, unit="%", goal="MAXIMIZE", stage="VAL", format=":.2f")
    if run_.resumed and run_.workers.is_main:
        print(f"resumed at step {run_.state.step} from {run_.folder / 'last'}", file=sys.stderr)


def finish(config: TrainConfig, record: Record, result: dict[str, Any] | None, run_: Run) -> None:
    """The run's record and its page."""
    if result is not None:
        evaluate.record_results(record, result, run_.dataset.classes)
    record.metric("train.steps", run_.state.step, "steps")
    record.metric("workers", run_.workers.size, "")
    record.save(Path(config.output_dir))
    report.render(config.output_dir)


def main(args: list[str] | None = None) -> dict[str, Any] | None:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
