"""Measure training and inference on made-up pictures; percentiles and images per second in one record.

./dlx bench rn50_paddle -- --mode training --arch resnet50 --batch_sizes "[8]" --iterations 5 --warmup 1
./dlx bench rn50_paddle -- --mode inference --arch resnet8_small --batch_sizes "[1, 64]"
./dlx bench rn50_paddle -- --mode inference --engines "[eager, onednn, onnxruntime]" --checkpoint RUN

Other frameworks live in environments of their own: run the PyTorch task's benchmark with the same architecture and
batch beside this one, and compare the records.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle

from dlx import bench
from dlx import config as configs
from dlx.vision import Preprocessing

from . import fold, framework, predictor, pretrained, quantized_onnx
from .model import architecture, build
from .options import CONFIGS
from .step import TrainState, train_step

ENGINES = ("eager", *predictor.ENGINES, "onnxruntime", "onnxruntime-int8")


@dataclass
class BenchmarkConfig:
    """Throughput and latency of this process."""

    mode: Literal["training", "inference"] = configs.field("inference", help="what is timed")
    arch: str = configs.field("resnet50", help="a name of rn50_paddle.model")
    checkpoint: str | None = configs.field(None, help="measure this classifier instead of fresh weights")
    int8: str | None = configs.field(None, help="model_int8.onnx of the verb quantize, for onnxruntime-int8")
    engines: list[str] = configs.field(["eager", "onednn", "onnxruntime"], help="of inference", choices=ENGINES)
    data_layout: Literal["NCHW", "NHWC"] = configs.field("NCHW", help="of activations")
    batch_sizes: list[int] = configs.field([1, 16], help="images per call", ge=1)
    image_size: int | None = configs.field(None, help="side in pixels; the architecture's own by default", ge=8)
    threads: int = configs.field(1, help="of the inference engines", ge=1)
    warmup: int = configs.field(2, help="calls that do not count", ge=1)
    iterations: int = configs.field(20, help="timed calls", ge=2)
    seed: int = configs.field(1, ge=0)
    device: Literal["auto", "cpu", "gpu"] = configs.field("auto", help="of eager runs and training")
    output: str = configs.field("runs/paddle-benchmark.json", help="the record")


def training_step(config: BenchmarkConfig, size: int, batch: int) -> Callable[[], Any]:
    """A step on a fixed batch that waits for its loss."""
    shape = Preprocessing(size, size)
    model = build(config.arch, data_format=config.data_layout)
    model.train()
    trained = [value for value in model.parameters() if not value.stop_gradient]
    state = TrainState(model, model, paddle.optimizer.Momentum(0.01, 0.875, trained), shape, 0.1)
    generator = np.random.default_rng(config.seed)
    images = paddle.to_tensor(generator.integers(0, 256, (batch, 3, size, size), np.uint8))
    labels = paddle.to_tensor(generator.integers(0, 1000, batch))
    return lambda: float(train_step(state, [(images, labels)]))


def inference_calls(config: BenchmarkConfig, found: pretrained.Classifier, folder: Path) -> dict[str, Any]:
    """Of each engine a function of float32 pictures."""
    shape = found.preprocessing
    model = fold.fold(found.model, found.arch)
    calls: dict[str, Any] = {}
    for engine in config.engines:
        if engine == "eager":
            eager_model = fold.fold(found.model, found.arch, found.model.data_format)

            def eager(images: np.ndarray, model: Any = eager_model) -> np.ndarray:
                with paddle.no_grad():
                    return model(paddle.to_tensor(images)).numpy()

            calls[engine] = eager
        elif engine.startswith("onnxruntime"):
            path = folder / "model.onnx"
            if engine.endswith("int8"):
                if config.int8 is None:
                    raise ValueError("engine onnxruntime-int8 needs --int8 FILE")
                path = Path(config.int8)
            else:
                quantized_onnx.float_onnx(model, shape.channels, shape.crop, path)
            session = quantized_onnx.session(path, config.threads)
            calls[engine] = lambda images, s=session: s.run(None, {s.get_inputs()[0].name: images})[0]
        else:
            if not (folder / "paddle").is_dir():
                predictor.save(model, found.describe(), folder / "paddle")
            calls[engine] = predictor.Predictor(folder / "paddle", engine, threads=config.threads)
    return calls


def fresh(config: BenchmarkConfig) -> pretrained.Classifier:
    """A classifier with random weights; its speed is that of a trained one."""
    size = config.image_size or architecture(config.arch).image_size
    shape = Preprocessing(size, size)
    model = build(config.arch, data_format=config.data_layout)
    model.eval()
    return pretrained.Classifier(model, config.arch, [f"class_{n}" for n in range(1000)], shape, "fresh weights")


def measure(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """The rows of the record, which is written."""
    if config.mode == "training" and config.checkpoint:
        raise ValueError("mode training measures fresh weights of --arch; --checkpoint is for inference")
    world = framework.join(config.device)
    paddle.seed(config.seed)
    record = framework.start_record("benchmark", config)
    rows: list[dict[str, Any]] = []
    options = {"unit": "images/s", "warmup": config.warmup, "iterations": config.iterations, "mode": "latency"}

    def add(engine: str, call: Callable[[], Any], batch: int, shape: tuple[int, ...]) -> None:
        found = bench.measure(call, items=batch, batch=batch, shape=shape, **options)
        rows.append({"engine": engine, "arch": config.arch, "placed_on": world.device, **found.to_json()})
        print(f"{engine:18s} batch {batch:4d}  {found}", flush=True)

    if config.mode == "training":
        size = config.image_size or architecture(config.arch).image_size
        for batch in config.batch_sizes:
            add("training", training_step(config, size, batch), batch, (batch, size, size))
    else:
        found = pretrained.load(config.checkpoint, config.arch) if config.checkpoint else fresh(config)
        config.arch = found.arch
        with tempfile.TemporaryDirectory() as folder:
            calls = inference_calls(config, found, Path(folder))
            for batch in config.batch_sizes:
                size = found.preprocessing.crop
                pictures = np.random.default_rng(config.seed).normal(
                    size=(batch, found.preprocessing.channels, size, size)
                )
                images = pictures.astype(np.float32)
                for engine, call in calls.items():
                    add(engine, lambda call=call, images=images: call(images), batch, images.shape)
    record.attach("rows", rows)
    record.finish().save(config.output)
    return rows


def main(args: list[str] | None = None) -> list[dict[str, Any]]:
    return measure(configs.parse(BenchmarkConfig, args, configs_dir=CONFIGS, prog="benchmark"))


if __name__ == "__main__":
    main()
