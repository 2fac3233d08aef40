"""COCO's mean average precision of a detector on a split.

python -m tf_ssd.evaluate --checkpoint runs/ssd320 --data /data/coco
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dlx import cocoeval
from dlx import config as configs
from dlx.cocoeval import Found
from dlx.files import atomic_write
from dlx.record import Record
from dlx.runlog import RunLog

from . import checkpoint
from .anchors import make_anchors
from .data import Source, make_dataset
from .nms import Detections, detect
from .options import CONFIGS, TASK, DataOptions, identity

SHOWN = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a detector's mean average precision."""

    checkpoint: str = configs.field(help="a run's folder, or a checkpoint in it: RUN/checkpoints/best")
    split: str = configs.field("val", help="train or val", choices=("train", "val"), group="data")
    jit: bool = configs.field(False, help="compile by XLA")
    output_dir: str = configs.field("runs/evaluate", help="where log, record and detections go")


def make_detect(model: keras.Model, jit: bool = False) -> Callable[[tf.Tensor], Detections]:
    """A compiled function: pictures [N, S, S, 3] of 0 to 255 -> detections, boxes as fractions of the picture."""
    anchors = tf.constant(make_anchors(model.input_shape[1]))

    @tf.function(jit_compile=jit, reduce_retracing=True)
    def run(images: tf.Tensor) -> Detections:
        outputs = model(images, training=False)
        return detect(outputs["offsets"], outputs["logits"], anchors)

    return run


def collect(run: Callable[[tf.Tensor], Detections], dataset: tf.data.Dataset, sizes: np.ndarray) -> Found:
    """Detections of an evaluation dataset in the pixels of its pictures; `sizes` [N, 2]: their width and height."""
    parts = []
    for batch in dataset:
        boxes, scores, labels, counts = (value.numpy() for value in run(batch["image"]))
        for row, number in enumerate(batch["number"].numpy().tolist()):
            if number < 0:
                continue
            count = counts[row]
            width, height = sizes[number]
            corners = boxes[row, :count][:, [1, 0, 3, 2]] * [width, height, width, height]
            shown = np.full(count, number, np.int64)
            parts.append(Found(shown, corners, scores[row, :count], labels[row, :count].astype(np.int64)))
    return Found.join(parts)


def measure(model: keras.Model, source: Source, batch_size: int, jit: bool = False) -> tuple[dict[str, Any], Found]:
    """`cocoeval.evaluate`'s result with the number of `detections`, and the detections."""
    annotations = source.records.annotations()
    size = model.input_shape[1]
    dataset = make_dataset(source, batch_size=min(batch_size, len(source)), train=False, image_size=size)
    found = collect(make_detect(model, jit), dataset, annotations.sizes)
    return cocoeval.evaluate(annotations, found) | {"detections": len(found.scores)}, found


def shown(result: dict[str, Any]) -> dict[str, float]:
    """What goes to the log: not the measures of sizes that no object has."""
    return {f"val.{name}": result[name] for name in SHOWN if not math.isnan(result[name])}


def record_results(record: Record, result: dict[str, Any]) -> None:
    """Write an evaluation into a run record."""
    for name in cocoeval.SCALARS:
        record.metric(f"val.{name}", result[name], "", "MAXIMIZE" if name in ("map", "map_50") else None)
    for name in ("images", "objects", "detections"):
        record.metric(f"val.{name}", result[name], name)
    record.attach("per_class", result["per_class"])


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate")
    found = checkpoint.load(config.checkpoint)
    splits = config.open(config.split)
    records = splits[config.split]
    if records.classes != found.classes:
        raise ValueError(f"{found.source} knows the classes {found.classes}, {records.folder} has {records.classes}")
    with RunLog(config.output_dir) as log:
        record = Record.start(
            TASK, "evaluate", configs.to_dict(config), seed=config.seed, data=identity(splits), run_id=log.run_id
        )
        result, detections = measure(found.model, config.source(records), config.batch_size, config.jit)
        log.log((), shown(result))
        output = Path(config.output_dir)
        entries = cocoeval.to_json(records.annotations(), detections)
        atomic_write(output / "detections.json", json.dumps(entries) + "\n")
        record_results(record, result)
        record.attach("model", found.describe() | {"source": found.source})
        record.finish().save(output)
    return result


if __name__ == "__main__":
    main()
