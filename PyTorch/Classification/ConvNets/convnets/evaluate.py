"""Top-1 and top-5 accuracy of a model on a split, exact for any number of processes.

    ./dlx run ConvNets evaluate -- --checkpoint runs/quickstart
    ./dlx run ConvNets evaluate -- --checkpoint mobilenet_v2.imagenet --data foolbox-images

N batch, K classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlx import config as configs
from dlx import dist
from dlx.inputs import Normalize
from dlx.precision import autocast
from dlx.record import Record
from dlx.runlog import RunLog

from . import pretrained
from .data import split_of
from .options import CONFIGS, TASK, DataOptions

MAX_CONFUSION_CLASSES = 100


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a model's accuracy on the validation pictures."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    split: str = configs.field("val", help="train or val", group="data")
    batch_size: int = configs.field(256, help="images per device", ge=1, group="data")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("fp32", help="arithmetic of the products")
    output_dir: str = configs.field("runs/evaluate", help="where log and record go")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    normalize: Normalize,
    num_classes: int,
    world: dist.World,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Mean loss, top1 and top5 in percent, the number of samples, and the confusion matrix (truth by prediction).

    Labels of -1 (padding of the last batch) do not count. Sums stay on the device until the end; over several
    processes they are added, so every sample counts once.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    cells = num_classes * num_classes
    confusion = torch.zeros(cells + 1, dtype=torch.int64, device=world.device)  # the last cell takes the padding
    keeps_confusion = num_classes <= MAX_CONFUSION_CLASSES
    for images, labels in batches:
        images = normalize(images).contiguous(memory_format=torch.channels_last)
        with autocast(precision, world.device):
            logits = model(images)
        logits = logits.float()
        counted = labels >= 0
        target = labels.clamp_min(0)
        losses = F.cross_entropy(logits, target, reduction="none") * counted
        best = logits.topk(min(5, num_classes), dim=1).indices
        hits = (best == target[:, None]) & counted[:, None]
        sums += torch.stack([losses.sum(), hits[:, 0].sum(), hits.sum(), counted.sum()]).double()
        if keeps_confusion:
            # Not bincount, which waits for the device to learn how many cells it needs.
            cell = torch.where(counted, target * num_classes + best[:, 0], cells)
            confusion.scatter_add_(0, cell, torch.ones_like(cell))
    model.train(training)
    loss, top1, top5, count = world.sum(sums).tolist()
    if not count:
        raise ValueError("not one of the pictures to evaluate can be read (tolerant is set, which passes over them)")
    result = {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count, "samples": int(count)}
    if keeps_confusion:
        result["confusion"] = world.sum(confusion)[:cells].view(num_classes, num_classes).tolist()
    return result


def record_results(record: Record, result: dict[str, Any], classes: list[str], prefix: str = "val") -> None:
    """Write an evaluation into a run record."""
    record.metric(f"{prefix}.top1", result["top1"], "%", "MAXIMIZE")
    record.metric(f"{prefix}.top5", result["top5"], "%", "MAXIMIZE")
    record.metric(f"{prefix}.loss", result["loss"], "nats", "MINIMIZE")
    record.metric(f"{prefix}.samples", result["samples"], "images")
    if "confusion" in result:
        record.attach("confusion", {"labels": classes, "matrix": result["confusion"]})


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate")
    with dist.init(config.device) as world:
        found = pretrained.load(config.checkpoint, arch=config.arch, device=world.device)
        found.model.to(memory_format=torch.channels_last)
        splits = config.open(num_classes=len(found.classes))
        split = split_of(splits, config.split)
        check_classes(found, split.classes, config.checkpoint)
        shape = found.preprocessing
        size, config.interpolation = config.image_size or shape.crop, shape.interpolation
        if config.resize is None and size == shape.crop:  # at another size the stored resize would mean another crop
            config.resize = shape.resize
        # A batch is filled up with pictures that do not count: not more of them than there are pictures.
        config.batch_size = min(config.batch_size, math.ceil(len(split) / world.size))
        loader = config.loader(config.split, splits, False, world, image_size=size, channels=shape.channels)
        log = RunLog(config.output_dir, enabled=world.is_main)
        record = Record.start(
            TASK,
            "evaluate",
            configs.to_dict(config),
            seed=config.seed,
            data=config.identity(),
            run_id=log.run_id,
        )
        result = evaluate(
            found.model,
            log.progress(iter(loader), len(loader), "evaluate"),
            normalize=Normalize(shape.mean, shape.std).to(world.device),
            num_classes=len(found.classes),
            world=world,
            precision=config.precision,
        )
        loader.close()
        result["skipped"] = len(loader.skipped)
        shown = {f"val.{key}": value for key, value in itertools.islice(result.items(), 4)}
        log.log((), shown)
        if world.is_main:
            record_results(record, result, found.classes)
            record.attach("model", found.describe() | {"source": found.source})
            record.finish().save(Path(config.output_dir))
        log.close()
    return result


def check_classes(found: pretrained.Classifier, classes: list[str], source: str) -> None:
    """ValueError where a model and a data set cannot belong together: an accuracy would mean nothing."""
    if len(classes) != len(found.classes):
        raise ValueError(f"{source} knows {len(found.classes)} classes, the data has {len(classes)}")
    generic = all(name.startswith("class_") for name in found.classes)
    if not generic and list(classes) != list(found.classes):
        index = next(i for i, (a, b) in enumerate(zip(found.classes, classes, strict=True)) if a != b)
        raise ValueError(f"{source} calls class {index} {found.classes[index]!r}, the data {classes[index]!r}")


if __name__ == "__main__":
    main()
