"""int8: calibrate (PTQ), fine-tune with simulated rounding (QAT), export to ONNX, and check it in onnxruntime.

./dlx run rn50_paddle quantize -- --checkpoint runs/paddle-quickstart
./dlx run rn50_paddle quantize -- --checkpoint runs/paddle-quickstart --steps 0      calibration only

Writes model_int8.onnx and record.json. A file more than a point of accuracy away from the simulation is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from dlx import config as configs
from dlx.runlog import RunLog

from . import evaluate, fold, framework, pretrained, quantized_onnx, quantizers
from .data import Order
from .loader import Loader
from .options import CONFIGS, DataOptions, TrainConfig
from .step import TrainState, train_step

WORST_DIFFERENCE = 1.0  # points of top-1 between simulation and onnxruntime


@dataclass
class QuantizeConfig(DataOptions):
    """Make an int8 ONNX file of a classifier."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint or a weights file")
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    percentile: float = configs.field(99.99, help="of activations that have a level of their own", gt=50, le=100)
    calibration_batches: int = configs.field(16, help="of training pictures", ge=1)
    steps: int = configs.field(200, help="of fine-tuning; 0: calibration only", ge=0)
    lr: float = configs.field(0.002, help="of fine-tuning", gt=0)
    evaluation_samples: int | None = configs.field(None, help="first pictures of the split; all by default", ge=1)
    output_dir: str = configs.field("runs/paddle-int8", help="where model_int8.onnx, log and record go")


def calibrate(layers: dict[str, quantizers.Quantised], model: Any, loader: Any, preprocessing: Any, count: int) -> None:
    """Observe the activations on `count` batches, then round."""
    quantizers.set_mode(layers, "observe")
    forward = evaluate.model_forward(model, preprocessing)
    for number, (images, _) in enumerate(loader):
        if number == count:
            break
        forward(images)
    quantizers.set_mode(layers, "quantise")


def fine_tune(model: Any, loader: Loader, preprocessing: Any, steps: int, rate: float) -> list[float]:
    """Train with rounding in the forward pass and a falling rate; the losses. Weights that are exactly zero stay so:
    those of a 2:4 sparse model are its pattern."""
    optimizer = paddle.optimizer.Momentum(rate, 0.9, model.parameters())
    zeros = [(value, value == 0) for value in model.parameters() if value.ndim > 1]
    pattern = [(value, 1 - zero.astype("float32")) for value, zero in zeros if bool(zero.any())]
    state = TrainState(model, model, optimizer, preprocessing)
    losses: list[float] = []
    for epoch in range(1 + steps // len(loader)):
        loader.set_epoch(epoch)
        for batch in loader:
            if len(losses) == steps:
                return losses
            optimizer.set_lr(rate * (1 - len(losses) / steps))
            losses.append(float(train_step(state, [batch])))
            with paddle.no_grad():
                for value, mask in pattern:
                    value.set_value(value * mask)
    return losses


def onnx_forward(path: Path, preprocessing: Any) -> Callable[[Any], np.ndarray]:
    """An ONNX file as `evaluate.evaluate` takes it."""
    session = quantized_onnx.session(path)

    def forward(images: Any) -> np.ndarray:
        normalised = pretrained.normalise(images, preprocessing).numpy()
        return session.run(None, {session.get_inputs()[0].name: normalised})[0]

    return forward


def check_export(simulated: float, exported: float, path: Path) -> None:
    """ValueError, and no file, when the exported model is not the one that was measured."""
    if abs(simulated - exported) > WORST_DIFFERENCE:
        path.unlink(missing_ok=True)
        raise ValueError(
            f"{path} refused and removed: {exported:.2f} % top-1 in onnxruntime, {simulated:.2f} % in the simulation"
        )


def quantize(config: QuantizeConfig) -> dict[str, Any]:
    """All stages; the record's fields."""
    framework.join(config.device)
    paddle.seed(config.seed)
    found = pretrained.load(config.checkpoint, config.arch)
    shape, output = found.preprocessing, Path(config.output_dir)
    train = evaluate.open_split(config, "train", found.classes)
    val = evaluate.open_split(config, "val", found.classes)
    loader = Loader(
        train, Order(len(train), config.batch_size, True, config.seed), size=shape.crop,
        resize=shape.resize or shape.crop, augment=False, workers=config.workers, backend=config.data_backend,
    )  # fmt: skip
    log = RunLog(output)
    record = framework.start_record("quantize", config, data=config.data_identity(), run_id=log.run_id)
    measuring = evaluate.evaluation_loader(config, val, shape)

    def measure(stage: str, forward: Any) -> float:
        taken = config.evaluation_samples
        batches = (
            batch for number, batch in enumerate(measuring) if taken is None or number * config.batch_size < taken
        )
        top1 = evaluate.evaluate(forward, batches, len(found.classes))["top1"]
        record.metric(f"val.top1.{stage}", top1, "%", "MAXIMIZE")
        log.log((), {f"val.top1.{stage}": top1})
        return top1

    model = fold.fold(found.model, found.arch)
    eager = evaluate.model_forward(model, shape)
    measure("float", eager)
    float_path, path = output / "model_float.onnx", output / "model_int8.onnx"
    quantized_onnx.float_onnx(model, shape.channels, shape.crop, float_path)
    layers = quantizers.wrap(model, config.percentile)
    calibrate(layers, model, loader, shape, config.calibration_batches)
    simulated = measure("calibrated", eager)
    if config.steps:
        for step, loss in enumerate(fine_tune(model, loader, shape, config.steps, config.lr)):
            record.curve("train.loss", step, loss)
        simulated = measure("finetuned", eager)
    quantized_onnx.export(model, layers, shape.channels, shape.crop, path)
    check_export(simulated, measure("onnxruntime", onnx_forward(path, shape)), path)
    kernels = quantized_onnx.integer_kernels(path)
    for kind, count in kernels.items():
        record.metric(f"kernels.{kind}", count, "")
    record.metric("size.float", float_path.stat().st_size, "bytes")
    record.metric("size.int8", path.stat().st_size, "bytes", "MINIMIZE")
    record.attach("model", found.describe() | {"source": found.source})
    record.finish().save(output)
    log.log((), {"written": str(path), **{f"kernels.{kind}": count for kind, count in kernels.items()}})
    log.close()
    return record.fields


def main(args: list[str] | None = None) -> dict[str, Any]:
    return quantize(
        configs.parse(
            QuantizeConfig, args, configs_dir=CONFIGS, prog="quantize", recipe=TrainConfig, shared=DataOptions
        )
    )


if __name__ == "__main__":
    main()
