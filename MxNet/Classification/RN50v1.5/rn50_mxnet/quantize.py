"""int8 for CPUs by MXNet's `quantize_net`: calibrate on training pictures, compare accuracy and speed before and after.

    ./dlx run rn50_mxnet quantize -- --checkpoint runs/quickstart

Writes `model_int8-symbol.json` and `.params`, which `SymbolBlock.imports` loads, and a record. The
file keeps float weights: oneDNN makes int8 of them when the network is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.contrib.quantization import quantize_net
from mxnet.gluon import HybridBlock, SymbolBlock

from dlx import bench, report
from dlx import config as configs
from dlx.record import Record

from . import checkpoint, evaluate
from .data import Loader
from .options import CHECKPOINT_HELP, CONFIGS, TASK, DataOptions, TrainConfig
from .step import normalize
from .workers import Workers

NAME = "model_int8"


@dataclass
class QuantizeConfig(DataOptions):
    """Make an int8 model of a trained one."""

    checkpoint: str = configs.field(help=CHECKPOINT_HELP)
    arch: str | None = configs.field(None, help="of a bare weights file")
    calibration_batches: int = configs.field(10, help="batches of training pictures", ge=1)
    batch_size: int = configs.field(64, help="images per batch", ge=1, group="data")
    latency_iterations: int = configs.field(50, help="timed calls", ge=2)
    output_dir: str = configs.field("runs/int8", help="where model and record go")


class Calibration(mx.io.DataIter):
    """Normalised batches for `quantize_net`, always the same ones."""

    def __init__(self, loader: Loader, batches: int, shape: Any) -> None:
        super().__init__(loader.batch_size)
        self.images = []
        for images, _ in loader.epoch(0):
            if len(self.images) == batches:
                break
            self.images.append(normalize(images, shape.mean, shape.std))
        self.provide_data = [mx.io.DataDesc("data", self.images[0].shape)]
        self.provide_label = []
        self.position = 0

    def reset(self) -> None:
        self.position = 0

    def next(self) -> mx.io.DataBatch:
        if self.position == len(self.images):
            raise StopIteration
        self.position += 1
        return mx.io.DataBatch([self.images[self.position - 1]], [], pad=0)

    def __iter__(self) -> Iterator[mx.io.DataBatch]:
        return self


def quantize(found: checkpoint.Classifier, data: Calibration) -> HybridBlock:
    """The int8 network; its ranges are the smallest and largest values that ``data`` gives."""
    network = found.rebuild()
    network.hybridize()
    network(data.images[0])
    return quantize_net(
        network, quantized_dtype="auto", calib_data=data, calib_mode="naive", ctx=mx.cpu(),
        num_calib_examples=len(data.images) * data.batch_size,
    )  # fmt: skip


def load_quantized(folder: str | Path) -> HybridBlock:
    """The network that `main` wrote into ``folder``."""
    path = Path(folder) / NAME
    if not Path(f"{path}-symbol.json").is_file():
        raise ValueError(f"{folder}: no {NAME}-symbol.json here")
    return SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params", ctx=mx.cpu())


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(
        QuantizeConfig, args, configs_dir=CONFIGS, prog="quantize", recipe=TrainConfig, shared=DataOptions
    )
    dataset = config.open()
    found = checkpoint.load(config.checkpoint, config.arch)
    evaluate.check_classes(found, dataset, config.source())
    if dataset.folder is None:
        raise ValueError("synthetic pictures calibrate nothing; give data or data_dir")
    workers, ctx, shape = Workers(), mx.cpu(), found.preprocessing
    record = Record.start(TASK, "quantize", configs.to_dict(config), seed=config.seed, data=config.identity(dataset))
    loader = config.loader(
        dataset, "train", found.arch, True, workers, image_size=shape.crop, resize=shape.resize, augmentation="none"
    )
    data = Calibration(loader, config.calibration_batches, shape)
    record.metric("calibration.images", len(data.images) * data.batch_size, "images")
    network = quantize(found, data)
    network.hybridize(static_alloc=True, static_shape=True)
    found.network.hybridize(static_alloc=True, static_shape=True)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    result = {}
    example = data.images[0][:1]
    calls = {name: (lambda n=n: n(example).wait_to_read()) for name, n in (("int8", network), ("float", found.network))}
    for name, candidate in (("float", found.network), ("int8", network)):
        scores = evaluate.evaluate_split(found, candidate, config, dataset, "val", workers, ctx)
        result[name] = scores["top1"]
        record.metric(f"val.top1.{name}", scores["top1"], "%", "MAXIMIZE")
        print(f"{name}: {scores['top1']:.2f} % top-1 on {scores['samples']:,} pictures")
    network.export(str(folder / NAME))
    iterations = config.latency_iterations
    pair = bench.compare(
        calls, items=1, unit="images/s", warmup=max(1, iterations // 5), iterations=iterations, batch=1
    )
    for name, measured in pair.measurements.items():
        record.metric(f"latency.{name}", measured.p50_ms, "ms", "MINIMIZE")
    record.metric("latency.speedup", pair.median("int8"), "", "MAXIMIZE")
    reloaded = load_quantized(folder)
    if not np.array_equal(reloaded(data.images[0]).asnumpy(), network(data.images[0]).asnumpy()):
        raise ValueError(f"{folder / NAME}: what was written computes something else than what was measured")
    record.finish().save(folder)
    report.render(folder)
    print(f"{folder / NAME}-symbol.json; {pair.median('int8'):.2f} times as fast as float at batch 1")
    return result


if __name__ == "__main__":
    main()
