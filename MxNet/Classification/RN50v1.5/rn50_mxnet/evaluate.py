"""Top-1 and top-5 accuracy of a trained model on a split, exact for any number of workers.

    ./dlx run rn50_mxnet evaluate -- --checkpoint runs/quickstart

The same as `train --mode val`. Without weights it refuses: the accuracy of random numbers tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from dlx import config as configs
from dlx.record import Record
from dlx.runlog import RunLog

from . import checkpoint
from .data import Batch, Dataset
from .options import CHECKPOINT_HELP, CONFIGS, TASK, DataOptions, TrainConfig, context
from .step import normalize
from .workers import Workers

MAX_CONFUSION_CLASSES = 100
METRICS = (
    ("top1", "%", "MAXIMIZE"),
    ("top5", "%", "MAXIMIZE"),
    ("loss", "nats", "MINIMIZE"),
    ("samples", "images", None),
)


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a model's accuracy."""

    checkpoint: str | None = configs.field(None, help=CHECKPOINT_HELP)
    arch: str | None = configs.field(None, help="of a bare weights file")
    split: str = configs.field("val", help="train or val", group="data")
    batch_size: int = configs.field(250, help="images per worker", ge=1, group="data")
    kvstore: str = configs.field("local", help="local, or dist_sync under runner", choices=("local", "dist_sync"))
    output_dir: str = configs.field("runs/evaluate", help="where log and record go")


def evaluate(
    network: HybridBlock,
    batches: Iterable[Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    num_classes: int,
    workers: Workers,
    ctx: mx.Context,
) -> dict[str, Any]:
    """Mean loss, top1 and top5 in percent, number of samples, and the confusion matrix (truth by prediction)."""
    sums = np.zeros(4)
    keeps = num_classes <= MAX_CONFUSION_CLASSES
    confusion = np.zeros(num_classes * num_classes if keeps else 0)
    for images, labels in batches:
        logits = network(normalize(images.as_in_context(ctx), mean, std)).astype("float32")
        scores = mx.nd.log_softmax(logits).asnumpy().astype(np.float64)
        truth = labels.asnumpy().astype(np.int64)
        if len(truth) and truth.max() >= num_classes:
            raise ValueError(f"label {truth.max()} is none of the model's {num_classes} classes")
        best = np.argsort(-scores, axis=1, kind="stable")[:, : min(5, num_classes)]
        hits = best == truth[:, None]
        sums += [-scores[np.arange(len(truth)), truth].sum(), hits[:, 0].sum(), hits.sum(), len(truth)]
        if keeps:
            confusion += np.bincount(truth * num_classes + best[:, 0], minlength=len(confusion))
    loss, top1, top5, count = workers.sum(sums).tolist()
    if not count:
        raise ValueError("there was no picture to evaluate")
    result = {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count, "samples": int(count)}
    if keeps:
        matrix = workers.sum(confusion).reshape(num_classes, num_classes)
        result["confusion"] = matrix.astype(int).tolist()
    return result


def record_results(record: Record, result: dict[str, Any], classes: list[str], prefix: str = "val") -> None:
    """Write an evaluation into a run's record."""
    for key, unit, goal in METRICS:
        record.metric(f"{prefix}.{key}", result[key], unit, goal)
    if "confusion" in result:
        record.attach("confusion", {"labels": classes, "matrix": result["confusion"]})


def require_weights(source: str | None) -> str:
    """ValueError where there are none."""
    if source is None:
        raise ValueError("validation needs trained weights: give --checkpoint (a run's folder, a checkpoint or a file)")
    return source


def check_classes(found: checkpoint.Classifier, dataset: Dataset, source: str) -> None:
    """ValueError where model and data cannot belong together: the accuracy would mean nothing."""
    if len(found.classes) != len(dataset.classes):
        raise ValueError(f"{found.source} knows {len(found.classes)} classes, {source} has {len(dataset.classes)}")
    generic = all(name.startswith("class_") for name in found.classes)
    if not generic and found.classes != dataset.classes:
        pairs = enumerate(zip(found.classes, dataset.classes, strict=True))
        index, (ours, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        raise ValueError(f"{found.source} calls class {index} {ours!r}, {source} calls it {theirs!r}")
    if found.preprocessing.channels != dataset.channels:
        raise ValueError(
            f"{found.source} takes pictures of {found.preprocessing.channels} channels, {source} has {dataset.channels}"
        )


def evaluate_split(
    found: checkpoint.Classifier, network: HybridBlock, config: DataOptions, dataset: Dataset, split: str,
    workers: Workers, ctx: mx.Context,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate ``network`` (of ``found``, or made from it) on a split as the stored preprocessing says."""
    shape = found.preprocessing
    loader = config.loader(dataset, split, found.arch, False, workers, image_size=shape.crop, resize=shape.resize)
    return evaluate(
        network,
        loader.epoch(0),
        mean=shape.mean,
        std=shape.std,
        num_classes=len(found.classes),
        workers=workers,
        ctx=ctx,
    )


def run(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate, write log and record."""
    source = require_weights(config.checkpoint)
    if config.data == "synthetic" and config.data_dir is None:
        raise ValueError("synthetic pictures have no truth to compare with; give data or data_dir")
    workers = Workers(config.kvstore)
    ctx = context(config.device)
    dataset = config.open()
    found = checkpoint.load(source, config.arch, ctx)
    check_classes(found, dataset, config.source())
    found.network.hybridize(static_alloc=True)
    record = Record.start(
        TASK, "evaluate", configs.to_dict(config), seed=config.seed, data=config.identity(dataset)
    )  # fmt: skip
    log = RunLog(config.output_dir, enabled=workers.is_main, run_id=record.run_id)
    result = evaluate_split(found, found.network, config, dataset, config.split, workers, ctx)
    log.log((), {f"{config.split}.{key}": value for key, value in result.items() if key != "confusion"})
    log.close()
    record_results(record, result, found.classes, config.split)
    if workers.is_main:
        record.finish().save(Path(config.output_dir))
    return result


def main(args: list[str] | None = None) -> dict[str, Any]:
    return run(
        configs.parse(
            EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate", recipe=TrainConfig, shared=DataOptions
        )
    )


if __name__ == "__main__":
    main()
