"""COCO's mean average precision of a detector on a split, exact for any number of processes.

    ./dlx run SSD evaluate -- --checkpoint runs/ssd_quickstart
    ./dlx run SSD evaluate -- --checkpoint runs/coco --data_dir /data/coco

Pictures are scaled as a whole, detections are mapped back to their pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from dlx import cocoeval, dist
from dlx import config as configs
from dlx.coco import Annotations
from dlx.cocoeval import Found
from dlx.files import atomic_write
from dlx.inputs import Normalize
from dlx.precision import autocast
from dlx.record import Record
from dlx.runlog import RunLog

from . import pretrained
from .anchors import default_boxes
from .data import split_of
from .detect import Detect, unpad
from .options import CONFIGS, TASK, DataOptions
from .preprocessing import Frame

MAX_CURVES = 8  # classes with a curve of their own in the report
SHOWN = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a detector's mean average precision on the validation pictures."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    split: str = configs.field("val", help="train or val", group="data")
    batch_size: int = configs.field(32, help="images per device", ge=1, group="data")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="arithmetic of the products")
    output_dir: str = configs.field("runs/evaluate", help="where log, record and detections go")


@torch.no_grad()
def collect(
    model: nn.Module,
    batches: Iterable[Any],
    annotations: Annotations,
    *,
    normalize: Normalize,
    world: dist.World,
    precision: str = "fp32",
) -> tuple[Found, np.ndarray]:
    """Detections on all processes' pictures, and the rows of those pictures, sorted; the same on every process.

    ``batches`` are EvalBatches (images uint8 N 3 S S, index N). Raises ValueError when a picture comes twice.
    """
    training = model.training
    model.eval()
    detect: Detect | None = None
    parts, rows = [], []
    for images, index in batches:
        if detect is None:
            detect = Detect(default_boxes(images.shape[-1])).to(world.device)
        inputs = normalize(images).contiguous(memory_format=torch.channels_last)
        with autocast(precision, world.device):
            outputs = model(inputs)
        for row, one in zip(index.tolist(), unpad(detect(*outputs)), strict=True):
            if row >= 0:
                boxes = Frame.of(tuple(annotations.sizes[row].tolist())).to_pixels(one["boxes"])
                parts.append(Found(np.full(len(boxes), row), boxes, one["scores"], one["labels"]))
                rows.append(row)
    model.train(training)
    everything = world.gather((Found.join(parts), rows))
    found = Found.join([part for part, _ in everything])
    seen = np.sort(np.array([row for _, some in everything for row in some], np.int64))
    twice = seen[1:][np.diff(seen) == 0]
    if len(twice):
        raise ValueError(f"{annotations.picture_path(int(twice[0]))} was evaluated twice")
    if not len(seen):
        raise ValueError("not one of the pictures to evaluate can be read (tolerant is set, which passes over them)")
    order = np.argsort(found.picture, kind="stable")
    return Found(*(array[order] for array in found)), seen


def measure(annotations: Annotations, found: Found, pictures: np.ndarray, world: dist.World) -> dict[str, Any]:
    """`cocoeval.evaluate`'s result with `confusion` and `agreement` (of `cocoeval.confusion`) and `detections` (count).

    The main process computes, all receive.
    """
    result: dict[str, Any] | None = None
    if world.is_main:
        result = cocoeval.evaluate(annotations, found, pictures)
        matrix, agreement = cocoeval.confusion(annotations, found, pictures)
        result |= {"confusion": matrix.tolist(), "agreement": agreement.tolist(), "detections": len(found.scores)}
    return world.gather(result)[0]


def evaluate(
    model: nn.Module, loader: Any, *, normalize: Normalize, world: dist.World, precision: str = "fp32"
) -> dict[str, Any]:
    """The measures of ``model`` on the loader's split; see ``measure``. The same on every process."""
    annotations = loader.split.annotations
    found, pictures = collect(model, loader, annotations, normalize=normalize, world=world, precision=precision)
    return measure(annotations, found, pictures, world)


def record_results(record: Record, result: dict[str, Any], classes: list[str], prefix: str = "val") -> None:
    """Write an evaluation into a run record: measures, precision over recall, classes, confusion."""
    for name in cocoeval.SCALARS:
        record.metric(f"{prefix}.{name}", result[name], "", "MAXIMIZE" if name in ("map", "map_50") else None)
    for name in ("images", "objects", "detections"):
        record.metric(f"{prefix}.{name}", result[name], name)
    curves = result["curves"]["precision"]
    frequent = sorted(result["per_class"], key=lambda entry: -entry["objects"])[:MAX_CURVES]
    chosen = {entry["name"]: curves[entry["name"]] for entry in frequent if entry["name"] in curves}
    if curves:
        chosen = {"all classes": np.mean(list(curves.values()), 0).tolist()} | chosen
    for name, precision in chosen.items():
        record.fields["curve"].pop(f"{name}.precision at recall %", None)  # that of an earlier evaluation
        for recall, value in zip(result["curves"]["recall"], precision, strict=True):
            record.curve(f"{name}.precision at recall %", 100 * recall, value)
    record.attach("per_class", result["per_class"])
    record.attach("confusion", {"labels": [*classes, "nothing"], "matrix": result["confusion"]})


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate")
    with dist.init(config.device) as world:
        found = pretrained.load(config.checkpoint, arch=config.arch, device=world.device)
        found.model.to(memory_format=torch.channels_last)
        splits = config.open(num_classes=len(found.classes))
        split = split_of(splits, config.split)
        check_classes(found, split.classes, config.checkpoint)
        if not hasattr(split, "annotations"):
            raise ValueError(f"data {config.data} has no annotations to compare with")
        # A batch is filled up with pictures that do not count: not more of them than there are pictures.
        config.batch_size = min(config.batch_size, math.ceil(len(split) / world.size))
        config.image_size = found.preprocessing.size
        loader = config.loader(config.split, splits, False, world)
        log = RunLog(config.output_dir, enabled=world.is_main)
        record = Record.start(
            TASK, "evaluate", configs.to_dict(config), seed=config.seed, data=config.identity(splits), run_id=log.run_id
        )
        detections, pictures = collect(
            found.model,
            log.progress(iter(loader), len(loader), "evaluate"),
            split.annotations,
            normalize=found.preprocessing.normalize().to(world.device),
            world=world,
            precision=config.precision,
        )
        loader.close()
        result = measure(split.annotations, detections, pictures, world) | {"skipped": len(loader.skipped)}
        # Of a size that no object has there is nothing to show.
        log.log((), {f"val.{name}": result[name] for name in SHOWN if not math.isnan(result[name])})
        if world.is_main:
            output = Path(config.output_dir)
            entries = cocoeval.to_json(split.annotations, detections)
            atomic_write(output / "detections.json", json.dumps(entries) + "\n")
            record_results(record, result, found.classes)
            record.attach("model", found.describe() | {"source": found.source})
            record.finish().save(output)
        log.close()
    return result


def check_classes(found: pretrained.Detector, classes: list[str], source: str) -> None:
    """ValueError where a model and a data set cannot belong together: a precision would mean nothing."""
    if len(classes) != len(found.classes):
        raise ValueError(f"{source} knows {len(found.classes)} classes, the data has {len(classes)}")
    named = any(not name.startswith("class_") for name in found.classes)
    wrong = [pair for pair in zip(found.classes, classes, strict=True) if pair[0] != pair[1]]
    if named and wrong:
        raise ValueError(f"{source} calls a class {wrong[0][0]!r} that the data calls {wrong[0][1]!r}")


if __name__ == "__main__":
    main()
