"""Train a detector, and measure it after epochs.

    python -m tf_ssd.train --config full --data /data/coco --output_dir runs/ssd320
    python -m tf_ssd.train --config quickstart

A run that was stopped goes on where it was when the same command is given again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from dlx import config as configs
from dlx import files, report
from dlx.record import Record
from dlx.runlog import RunLog

from . import checkpoint, evaluate
from .anchors import grid_sides
from .data import batches_of, make_dataset
from .model import ARCHITECTURES, build_model
from .options import CONFIGS, TASK, DataOptions, identity
from .schedule import WarmupCosine
from .step import POLICIES, make_optimizer, make_train_step

# What may differ between a checkpoint and the run that goes on with it.
FREE = {
    "output_dir", "resume", "max_steps", "save_steps", "evaluate_epochs", "log_every", "tensorboard", "cache",
    "workers", "records_dir", "shards", "strategy",
}  # fmt: skip


@dataclass
class TrainConfig(DataOptions):
    """Train a detector and measure its mean average precision on the validation pictures."""

    arch: str = configs.field("full", help="a name of tf_ssd.model", choices=tuple(ARCHITECTURES))
    image_size: int = configs.field(320, help="side of the network's input, a multiple of 32", ge=32)
    epochs: int = configs.field(28, help="passes over the training pictures", ge=1, group="training")
    max_steps: int | None = configs.field(None, help="stop after so many steps", ge=1, group="training")
    lr: float = configs.field(0.02, help="highest learning rate", gt=0, group="training")
    warmup_steps: int = configs.field(8000, help="of linear warm-up", ge=0, group="training")
    warmup_lr: float = configs.field(0.0086664, help="the rate that warm-up starts at", ge=0, group="training")
    momentum: float = configs.field(0.9, help="of SGD", ge=0, lt=1, group="training")
    weight_decay: float = configs.field(4e-4, help="of the convolutions' kernels", ge=0, group="training")
    clip_norm: float | None = configs.field(10.0, help="largest norm of all gradients", gt=0, group="training")
    precision: Literal["fp32", "bf16", "fp16"] = configs.field("fp32", help="arithmetic", group="training")
    jit: bool = configs.field(False, help="compile forward and backward by XLA (one replica)", group="training")
    strategy: Literal["one", "mirrored", "multiworker"] = configs.field(
        "one", help="one device, all GPUs of this machine, or those that TF_CONFIG names", group="training"
    )
    resume: Literal["auto", "never"] = configs.field("auto", help="go on from output_dir's last checkpoint")
    save_steps: int | None = configs.field(None, help="save every so many steps, besides every epoch", ge=1)
    evaluate_epochs: int = configs.field(1, help="measure after every so many epochs, and at the end", ge=1)
    log_every: int = configs.field(20, help="steps between lines of the log", ge=1)
    tensorboard: bool = configs.field(False, help="write event files, too")
    output_dir: str = configs.field("runs/ssd320", help="where log, record and checkpoints go")

    def __post_init__(self) -> None:
        grid_sides(self.image_size)
        self.steps()


class Stopped(SystemExit):
    """Training left because of a signal, after saving; the exit status is 128 + signal."""


def make_strategy(name: str) -> tf.distribute.Strategy:
    """The strategy of an option `strategy`."""
    if name == "mirrored":
        return tf.distribute.MirroredStrategy()
    if name == "multiworker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


class Trainer:
    """One training: builds what it needs, goes through the epochs, saves. `progress` is where it is: `batch` batches of
    `epoch` are done; `best` is the best mAP so far."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        keras.utils.set_random_seed(config.seed)
        self.strategy = make_strategy(config.strategy)
        if config.batch_size % self.strategy.num_replicas_in_sync:
            raise ValueError(f"batch_size {config.batch_size} is not for {self.strategy.num_replicas_in_sync} replicas")
        self.splits = config.open("train", "val")
        self.source = config.source(self.splits["train"])
        self.validation = config.source(self.splits["val"])
        self.classes = self.splits["train"].classes
        self.batches = batches_of(len(self.source), config.batch_size, True)
        total = self.batches * config.epochs
        self.schedule = WarmupCosine(config.lr, total, config.warmup_steps, config.warmup_lr)
        self.stop_at = min(total, config.max_steps or total)
        with self.strategy.scope():
            self.model = build_model(config.arch, len(self.classes), config.image_size, POLICIES[config.precision])
            self.optimizer = make_optimizer(
                self.schedule, config.momentum, config.clip_norm, config.precision, self.strategy.num_replicas_in_sync
            )
            self.optimizer.build(self.model.trainable_variables)
        self.train_step = make_train_step(
            self.model, self.optimizer, self.strategy, weight_decay=config.weight_decay, jit=config.jit
        )
        self.folder = Path(config.output_dir) / "checkpoints"
        self.progress: dict[str, Any] = {"step": 0, "epoch": 0, "batch": 0, "best": -1.0}
        self.resumed = config.resume == "auto" and self._restore()
        self.signal = 0

    def _restore(self) -> bool:
        last = self.folder / "last"
        if not (last / checkpoint.STATE).is_file():
            return False
        state = checkpoint.read_state(last)
        now = configs.to_dict(self.config)
        changed = [
            f"{key}: {value!r} -> {now.get(key)!r}"
            for key, value in state["config"].items()
            if key not in FREE and now.get(key) != value
        ]
        if changed or state["classes"] != self.classes:
            changes = "; ".join(changed) or "classes"
            raise ValueError(f"{last}: was trained otherwise ({changes}); give --resume never or another --output_dir")
        checkpoint.restore(last, model=self.model, optimizer=self.optimizer)
        self.progress = state["progress"]
        return True

    def save(self, name: str) -> None:
        """Write checkpoint `name`; only `last` can be gone on with."""
        state = {
            "arch": self.config.arch, "classes": self.classes, "image_size": self.config.image_size,
            "progress": self.progress, "config": configs.to_dict(self.config),
        }  # fmt: skip
        parts = {"optimizer": self.optimizer} if name == "last" else {}
        checkpoint.save(self.folder / name, state, model=self.model, **parts)

    def _batches(self) -> Iterator[Any]:
        config = self.config
        dataset = make_dataset(
            self.source, batch_size=config.batch_size, train=True, image_size=config.image_size, steps=config.steps(),
            seed=config.seed, epoch=self.progress["epoch"], start_batch=self.progress["batch"], workers=config.workers,
        ).map(lambda batch: {name: batch[name] for name in ("image", "boxes", "labels")})  # fmt: skip
        return iter(self.strategy.experimental_distribute_dataset(dataset))

    def _epoch(self, log: RunLog, record: Record) -> None:
        """The steps that are left of this epoch. ArithmeticError for a loss that is not a number."""
        config, progress = self.config, self.progress
        before, done = time.perf_counter(), 0
        for batch in self._batches():
            losses = self.train_step(batch)
            done += 1
            progress["step"] += 1
            progress["batch"] += 1
            step = progress["step"]
            if step % config.log_every == 0 or step == self.stop_at:
                values = {f"train.{name}": float(value) for name, value in losses._asdict().items()}
                if not all(value == value and abs(value) != float("inf") for value in values.values()):
                    raise ArithmeticError(f"the loss is not a number at step {step}: {values}")
                now = time.perf_counter()
                speed = done * config.batch_size / (now - before)
                before, done = now, 0
                rate = float(self.schedule(step - 1))
                log.log((progress["epoch"], step), values | {"train.lr": rate, "train.ips": speed})
                for name, value in values.items():
                    record.curve(name, step, value)
            if self.signal:
                self.save("last")
                raise Stopped(128 + self.signal)
            if step >= self.stop_at:
                return
            if config.save_steps and step % config.save_steps == 0:
                self.save("last")

    def train(self, log: RunLog, record: Record) -> dict[str, Any] | None:
        """All epochs that are left; the last evaluation's result, None if nothing was left to do."""
        result, progress = None, self.progress
        while progress["step"] < self.stop_at:
            self._epoch(log, record)
            if progress["batch"] == self.batches:
                progress["epoch"], progress["batch"] = progress["epoch"] + 1, 0
            at_end = progress["step"] >= self.stop_at
            if at_end or progress["epoch"] % self.config.evaluate_epochs == 0:
                result, _ = evaluate.measure(self.model, self.validation, self.config.batch_size)
                log.log((progress["epoch"],), evaluate.shown(result))
                record.curve("val.map", progress["step"], result["map"])
                if result["map"] > progress["best"]:
                    progress["best"] = result["map"]
                    self.save("best")
            self.save("last")
        return result


@contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and SIGINT end the step that is running first."""

    def remember(number: int, _: Any) -> None:
        trainer.signal = number

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(config: TrainConfig) -> dict[str, Any] | None:
    """Train as configured; the result of the last evaluation."""
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with files.lock(output / ".lock", 5.0), RunLog(output, tensorboard=config.tensorboard) as log:
        trainer = Trainer(config)
        log.parameter(configs.to_dict(config))
        record = Record.start(
            TASK, "train", configs.to_dict(config), seed=config.seed, data=identity(trainer.splits), run_id=log.run_id
        )
        if trainer.resumed:
            log.log((), {"resumed_at_step": trainer.progress["step"]})
        status = "failed"
        try:
            with _signals(trainer):
                result = trainer.train(log, record)
            status = "finished"
        except Stopped:
            status = "stopped"
            raise
        finally:
            if status == "finished" and result is not None:
                evaluate.record_results(record, result)
            record.metric("parameters", trainer.model.count_params(), "parameters")
            record.finish(status).save(output)
    if result is not None:
        report.render(output)
    return result


def main(args: list[str] | None = None) -> dict[str, Any] | None:
    return run(configs.parse(TrainConfig, args, configs_dir=CONFIGS, prog="train"))


if __name__ == "__main__":
    main()
