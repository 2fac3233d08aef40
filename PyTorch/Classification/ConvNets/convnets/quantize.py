"""Quantisation-aware training to int8: calibrate, fine-tune with simulated rounding, export, compare in onnxruntime.

    ./dlx run ConvNets quantize -- --checkpoint runs/quickstart --output_dir runs/int8
    ./dlx run ConvNets quantize -- --checkpoint runs/rn50 --data_dir /data/imagenet --epochs 10 --device cuda
    ./dlx run ConvNets quantize -- --checkpoint runs/quickstart --epochs 0          (calibration only)

Starts from a trained classifier. The output folder holds model_int8.onnx, model.onnx (the one in floating point that
it is compared with), checkpoints/ (which `evaluate` and `infer` read), dllogger.json and record.json with the accuracy
in floating point, after calibration, after training, and of the file in onnxruntime. One process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dlx import bench, dist, optim
from dlx import checkpoint as checkpoints
from dlx import config as configs
from dlx import record as records
from dlx.inputs import Normalize
from dlx.loading import Loader
from dlx.record import Record
from dlx.runlog import RunLog

from . import export, pretrained, quantized_onnx, quantizers
from .evaluate import check_classes, evaluate, record_results
from .options import CONFIGS, TASK, DataOptions
from .step import TrainState, train_step


@dataclass
class QuantizeConfig(DataOptions):
    """Turn a trained classifier into an int8 one, fine-tune it and export it."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    calibration: Literal["percentile", "max", "mse"] = configs.field(
        "percentile", help="how the range of activations is chosen", group="quantisation"
    )
    percentile: float = configs.field(99.99, help="of calibration percentile", gt=50, le=100, group="quantisation")
    calibration_batches: int = configs.field(10, help="batches that are looked at", ge=1, group="quantisation")
    calibration_split: Literal["train", "val"] = configs.field(
        "train", help="pictures to calibrate with, without augmentation or labels", group="quantisation"
    )
    weight_bits: int = configs.field(
        8, help="7 for x86 processors without VNNI, whose 16-bit sums overflow", choices=(7, 8), group="quantisation"
    )
    keep_first_last_float: bool = configs.field(
        False, help="leave the first convolution and the classifier in floating point", group="quantisation"
    )
    epochs: int = configs.field(1, help="passes over the training pictures; 0: calibrate only", ge=0, group="recipe")
    max_steps: int | None = configs.field(None, help="stop after this many optimiser steps", ge=1, group="recipe")
    lr: float = configs.field(1e-3, help="peak learning rate; falls to zero as a cosine", gt=0, group="recipe")
    momentum: float = configs.field(0.89, ge=0, lt=1, group="recipe")
    weight_decay: float = configs.field(4.5e-5, help="of weights; biases are free", ge=0, group="recipe")
    label_smoothing: float = configs.field(0.0, ge=0, lt=1, group="recipe")
    augmentation: Literal["none", "standard", "autoaugment", "erase"] = configs.field("standard", group="recipe")
    precision: Literal["fp32", "tf32"] = configs.field("fp32", help="of the matrix products while training")
    output_dir: str = configs.field("runs/quantize", help="folder of this run")
    resume: str = configs.field("auto", help="auto: continue what output_dir holds; a folder; or none")
    save_steps: int | None = configs.field(None, help="also save every so many steps", ge=1)
    log_every: int = configs.field(20, help="steps between log lines", ge=1)
    latency_batch_size: int = configs.field(1, help="images per call when the two files are timed", ge=1)
    latency_iterations: int = configs.field(50, help="timed calls per turn", ge=6)


class Quantizer:
    """Everything of a run: the float classifier, its quantised copy, loaders, optimiser."""

    def __init__(self, config: QuantizeConfig, world: dist.World):
        self.config, self.world = config, world
        if world.size > 1:
            raise ValueError(f"quantize runs in one process, got {world.size}")
        self.source = pretrained.load(config.checkpoint, arch=config.arch, device=world.device)
        self.source.model.to(memory_format=torch.channels_last)
        splits = config.open(num_classes=len(self.source.classes))
        for split in {"val", config.calibration_split} | ({"train"} if config.epochs else set()):
            if split not in splits:
                raise ValueError(f"{config.data_dir or config.data} has no split {split!r}, only {', '.join(splits)}")
            check_classes(self.source, splits[split].classes, config.checkpoint)
        shape = self.source.preprocessing
        config.resize, config.interpolation = config.resize or shape.resize, shape.interpolation
        size = config.image_size or shape.crop
        if size != shape.crop:
            raise ValueError(f"{config.checkpoint} was trained for {shape.crop} pixels, image_size asks for {size}")
        options = {"image_size": size, "channels": shape.channels}
        self.val_loader = config.loader("val", splits, False, world, **options)
        # In an order drawn by the seed, where there is enough: a folder's own order would show the first class only.
        shuffled = len(splits[config.calibration_split]) >= config.batch_size
        self.calibration_loader = config.loader(
            config.calibration_split, splits, shuffled, world, augmentation="none", **options
        )
        self.train_loader: Loader | None = None
        if config.epochs:
            self.train_loader = config.loader("train", splits, True, world, augmentation=config.augmentation, **options)
        self.steps_per_epoch = len(self.train_loader) if self.train_loader else 0
        self.total_steps = min(self.steps_per_epoch * config.epochs, config.max_steps or 2**62)
        self.normalize = Normalize(shape.mean, shape.std).to(world.device)
        dist.seed_everything(config.seed)
        self.scheme = quantizers.Scheme(
            config.calibration, config.percentile, config.weight_bits, config.keep_first_last_float
        )
        model = quantizers.quantize(self.source.model, self.scheme).to(memory_format=torch.channels_last)
        optimizer = optim.build_optimizer(
            model, "sgd", lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self.state = TrainState(
            model,
            optimizer,
            normalize=self.normalize,
            precision=config.precision,
            label_smoothing=config.label_smoothing,
        )
        self.calibrated: dict[str, float] = {}

    @property
    def classifier(self) -> pretrained.Classifier:
        """The quantised model with what is needed to use it."""
        found = self.source
        return pretrained.Classifier(self.state.model, found.arch, found.preprocessing, found.classes, found.source)

    def calibrate(self) -> int:
        """Fix the ranges of activations. Returns the number of images."""
        batches = itertools.islice(self.calibration_loader, self.config.calibration_batches)
        images = (self._images(images[labels >= 0]) for images, labels in batches)
        return quantizers.calibrate(self.state.model, images)

    def _images(self, images: Tensor) -> Tensor:
        return self.normalize(images).contiguous(memory_format=torch.channels_last)

    def validate(self, model: torch.nn.Module) -> dict[str, Any]:
        return evaluate(
            model,
            self.val_loader,
            normalize=self.normalize,
            num_classes=len(self.source.classes),
            world=self.world,
            precision=self.config.precision,
        )

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.train_loader.set_epoch(epoch, start)
        return iter(self.train_loader)

    def learning_rate(self, step: int) -> float:
        return optim.learning_rate(
            step, schedule="cosine", peak=self.config.lr, end=0.0, warmup_steps=0, total_steps=self.total_steps
        )

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        optim.set_learning_rate(self.state.optimizer, self.learning_rate(self.state.step))
        return train_step(self.state, [batch])

    def metadata(self) -> dict[str, Any]:
        return self.source.describe() | {"quantization": asdict(self.scheme), "config": configs.to_dict(self.config)}

    def save(self, store: checkpoints.Checkpoints, metric: float | None = None) -> None:
        rest = {
            "optimizer": self.state.optimizer.state_dict(),
            "calibrated": self.calibrated,
            "rng": checkpoints.rng_state(),
        }
        models = {"model": self.state.model.state_dict()}
        store.save(self.state.step, model=models, state=rest, metadata=self.metadata(), metric=metric)

    def restore(self, loaded: checkpoints.Loaded) -> None:
        """Continue from a checkpoint of this verb. ValueError if it was quantised otherwise."""
        metadata = loaded.metadata
        if metadata.get("arch") != self.source.arch or metadata.get("quantization") != asdict(self.scheme):
            raise ValueError(
                f"{loaded.path} holds {metadata.get('arch')} quantised as {metadata.get('quantization')}, "
                f"this run wants {self.source.arch} as {asdict(self.scheme)}; give another output_dir or resume none"
            )
        self.state.model.load_state_dict(loaded.model["model"])
        self.state.optimizer.load_state_dict(loaded.state["optimizer"])
        self.calibrated = loaded.state["calibrated"]
        self.state.step = loaded.step
        checkpoints.set_rng_state(loaded.state["rng"])


def tune(run: Quantizer, log: RunLog, record: Record, store: checkpoints.Checkpoints) -> str:
    """Go through the remaining steps; returns "finished" or "stopped" (by a signal, after saving)."""
    config, state = run.config, run.state
    state.model.train()
    with checkpoints.StopSignal() as stop:
        while state.step < run.total_steps:
            epoch, start = divmod(state.step, run.steps_per_epoch)
            mean = dist.Mean()
            steps = min(run.steps_per_epoch - start, run.total_steps - state.step)
            batches = itertools.islice(run.batches(epoch, start), steps)
            for batch in log.progress(batches, steps, f"epoch {epoch}"):
                mean.add(run.step(batch), len(batch[0]))
                if state.step % config.log_every == 0 or state.step == run.total_steps:
                    loss = mean.value(run.world)
                    log.log((epoch, state.step), {"train.loss": loss, "train.lr": run.learning_rate(state.step - 1)})
                    record.curve("train.loss", state.step, loss)
                    mean = dist.Mean()
                    if not math.isfinite(loss):
                        raise ArithmeticError(f"loss is {loss} at step {state.step}; lower lr ({config.lr})")
                if stop.requested and state.step < run.total_steps:
                    run.save(store)
                    log.log((epoch, state.step), {"stopped": stop.signal or ""})
                    return "stopped"
                if config.save_steps and state.step % config.save_steps == 0:
                    run.save(store)
            if state.step < run.total_steps:
                result = run.validate(state.model)
                log.log((epoch, state.step), {"val.top1": result["top1"], "val.loss": result["loss"]})
                record.curve("val.top1", state.step, result["top1"])
                run.save(store, result["top1"])
    return "finished"


def compare_files(run: Quantizer, float_path: Path, int8_path: Path, log: RunLog, record: Record) -> None:
    """Accuracy of the int8 file on the whole split, agreement with the simulation, sizes and latencies of both."""
    config = run.config
    found = quantized_onnx.compare(
        int8_path,
        run.state.model,
        log.progress(iter(run.val_loader), len(run.val_loader), "onnxruntime"),
        normalize=run.normalize,
    )
    record.metric("val.top1.onnxruntime", found["top1"], "%", "MAXIMIZE")
    record.metric("val.agreement", found["agreement"], "%", "MAXIMIZE")
    record.metric("val.logit_difference", found["difference"], "", "MINIMIZE")
    record.attach("operators", quantized_onnx.executed_operators(int8_path))
    shape = run.source.preprocessing
    images = torch.randn(config.latency_batch_size, shape.channels, shape.crop, shape.crop).numpy()
    sessions = {"int8": quantized_onnx.session(int8_path), "float": quantized_onnx.session(float_path)}
    timing = bench.compare(
        {name: lambda session=session: session.run(None, {"images": images}) for name, session in sessions.items()},
        items=len(images),
        unit="images/s",
        warmup=5,
        iterations=config.latency_iterations,
        batch=len(images),
        shape=list(images.shape),
        precision="int8 and fp32",
        mode="latency",
    )
    for name, path in (("int8", int8_path), ("float", float_path)):
        record.metric(f"size.{name}", path.stat().st_size, "bytes", "MINIMIZE")
        record.metric(f"latency.{name}", timing.measurements[name].p50_ms, "ms", "MINIMIZE")
    record.metric("latency.speedup", timing.median("int8"), "", "MAXIMIZE")
    record.attach("latency", timing.to_json())


def run(config: QuantizeConfig) -> dict[str, Any]:
    """Quantise by a configuration; returns the run record's fields."""
    with dist.init(config.device) as world:
        output = Path(config.output_dir)
        work = Quantizer(config, world)
        store = checkpoints.Checkpoints(output / "checkpoints", keep=2)
        loaded = store.resume(None if config.resume.lower() in ("", "none") else config.resume)
        if loaded is not None:
            work.restore(loaded)
        log = RunLog(output)
        record = Record.start(
            TASK, "quantize", configs.to_dict(config), seed=config.seed, data=config.identity(), run_id=log.run_id
        )
        if loaded is not None and (output / records.FILE_NAME).is_file():
            record.fields["curve"] = records.load(output).fields["curve"]  # of the part done earlier
        log.metadata("val.top1", unit="%", goal="MAXIMIZE", stage="VAL", format=":.2f")
        log.parameter(configs.to_dict(config) | {"arch": work.source.arch, "steps": work.total_steps})
        result = work.validate(work.source.model)
        record.metric("val.top1.float", result["top1"], "%", "MAXIMIZE")
        log.log((), {"val.top1.float": result["top1"]})
        if loaded is None:
            images = work.calibrate()
            work.calibrated = {"images": images, "top1": work.validate(work.state.model)["top1"]}
            work.save(store, work.calibrated["top1"])
        record.metric("calibration.images", work.calibrated["images"], "images")
        record.metric("val.top1.calibrated", work.calibrated["top1"], "%", "MAXIMIZE")
        log.log((), {"val.top1.calibrated": work.calibrated["top1"]})
        status = tune(work, log, record, store)
        if status == "finished":
            _finish(work, output, log, record, store)
        record.metric("steps", work.state.step, "")
        record.attach(
            "model", work.source.describe() | {"source": work.source.source} | {"scheme": asdict(work.scheme)}
        )
        record.finish(status).save(output)
        log.close()
        return record.fields


def _finish(work: Quantizer, output: Path, log: RunLog, record: Record, store: checkpoints.Checkpoints) -> None:
    result = work.validate(work.state.model)
    record_results(record, result, work.source.classes)
    record.curve("val.top1", work.state.step, result["top1"])
    work.save(store, result["top1"])
    float_path, int8_path = output / "model.onnx", output / "model_int8.onnx"
    work.source.model.cpu()
    export.export(work.source, float_path)
    quantized_onnx.export(work.classifier, int8_path)
    compare_files(work, float_path, int8_path, log, record)
    metrics = {name: metric["value"] for name, metric in record.fields["metrics"].items()}
    log.log(
        (), {name: metrics[name] for name in metrics if name.startswith(("val.top1", "val.agree", "size", "latency"))}
    )


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(configs.parse(QuantizeConfig, args, configs_dir=CONFIGS, prog="quantize"))


if __name__ == "__main__":
    main()
