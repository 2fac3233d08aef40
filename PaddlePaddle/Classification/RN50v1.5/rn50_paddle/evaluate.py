"""Top-1 and top-5 accuracy of a model on a split; every sample counts once on any number of processes.

./dlx run rn50_paddle evaluate -- --checkpoint runs/paddle-quickstart
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from dlx import config as configs
from dlx.record import Record
from dlx.runlog import RunLog

from . import framework, pretrained
from .data import Order, Split, open_data
from .loader import Loader
from .options import CONFIGS, DataOptions, TrainConfig

CONFUSION_CLASSES = 100


@dataclass
class EvaluateConfig(DataOptions):
    """Measure a model's accuracy."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint or a weights file")
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    split: str = configs.field("val", help="train or val", choices=("train", "val"), group="data")
    batch_size: int = configs.field(256, help="images per device", ge=1, group="data")
    output_dir: str = configs.field("runs/paddle-evaluate", help="where log and record go")


class Tally:
    """Sums of an evaluation: loss, hits, confusion (truth by prediction)."""

    def __init__(self, num_classes: int):
        self.num_classes = num_classes
        self.sums = np.zeros(4)
        self.confusion = np.zeros((num_classes, num_classes), np.int64) if num_classes <= CONFUSION_CLASSES else None

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Logits (N, K) and labels (N,); -1 does not count."""
        logits, labels = logits[labels >= 0].astype(np.float64), labels[labels >= 0]
        rows = np.arange(len(labels))
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[rows, labels]
        # How many classes are ahead of the truth; of equal ones the first is, as argmax has it.
        own = logits[rows, labels][:, None]
        ahead = (logits > own).sum(1) + ((logits == own) & (np.arange(logits.shape[1]) < labels[:, None])).sum(1)
        self.sums += losses.sum(), (ahead == 0).sum(), (ahead < 5).sum(), len(labels)
        if self.confusion is not None:
            np.add.at(self.confusion, (labels, logits.argmax(1)), 1)

    def result(self, world: framework.World | None = None) -> dict[str, Any]:
        """loss in nats, top1 and top5 in percent, samples; over all processes."""
        cells = self.confusion.ravel() if self.confusion is not None else np.zeros(0)
        values = np.concatenate([self.sums, cells])
        if world is not None and world.size > 1:
            values = world.sum(paddle.to_tensor(values, "float64")).numpy()
        loss, top1, top5, count = values[:4].tolist()
        found = {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count, "samples": int(count)}
        if self.confusion is not None:
            found["confusion"] = values[4:].astype(np.int64).reshape(self.confusion.shape).tolist()
        return found


def evaluate(
    forward: Callable[[np.ndarray], np.ndarray],
    batches: Iterable[tuple[Any, Any]],
    num_classes: int,
    world: framework.World | None = None,
) -> dict[str, Any]:
    """`forward` takes uint8 pictures (N, C, H, W) and gives logits (arrays or tensors)."""
    tally = Tally(num_classes)
    for images, labels in batches:
        tally.add(np.asarray(forward(images)), np.asarray(labels))
    return tally.result(world)


def model_forward(model: paddle.nn.Layer, preprocessing: Any) -> Callable[[Any], np.ndarray]:
    """A model as `evaluate` takes it."""

    def forward(images: Any) -> np.ndarray:
        with paddle.no_grad():
            return model(pretrained.normalise(images, preprocessing)).numpy()

    return forward


RESULTS = (
    ("top1", "%", "MAXIMIZE"),
    ("top5", "%", "MAXIMIZE"),
    ("loss", "nats", "MINIMIZE"),
    ("samples", "images", None),
)


def record_results(record: Record, result: dict[str, Any], classes: list[str]) -> None:
    """Write an evaluation into a run record."""
    for name, unit, goal in RESULTS:
        record.metric(f"val.{name}", result[name], unit, goal)
    if "confusion" in result:
        record.attach("confusion", {"labels": classes, "matrix": result["confusion"]})


def open_split(config: DataOptions, name: str, classes: list[str]) -> Split:
    """A split whose classes are the model's; ValueError otherwise, since an accuracy would mean nothing."""
    splits = open_data(config.data, config.data_dir, num_classes=len(classes), num_samples=config.num_samples)
    if name not in splits:
        raise ValueError(f"{config.data_dir or config.data} has no split {name!r}, only {', '.join(splits)}")
    found = splits[name].classes
    generic = all(label.startswith("class_") for label in classes)
    if len(found) != len(classes) or (not generic and found != classes):
        raise ValueError(f"the model knows {len(classes)} classes {classes[:3]}..., the data {len(found)} {found[:3]}")
    return splits[name]


def evaluation_loader(
    config: DataOptions, split: Split, preprocessing: Any, world: framework.World | None = None
) -> Loader:
    """The split's pictures as the model wants them, every one once."""
    world = world or framework.World()
    size = config.image_size or preprocessing.crop
    resize = config.resize or (preprocessing.resize if size == preprocessing.crop else None)
    order = Order(len(split), config.batch_size, False, config.seed, world.rank, world.size)
    return Loader(
        split, order, size=size, resize=resize or pretrained.default_resize(size), augment=False,
        workers=config.workers, backend=config.data_backend,
    )  # fmt: skip


def measure(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate by a configuration and write log and record."""
    world = framework.join(config.device)
    found = pretrained.load(config.checkpoint, config.arch)
    split = open_split(config, config.split, found.classes)
    loader = evaluation_loader(config, split, found.preprocessing, world)
    log = RunLog(config.output_dir, enabled=world.is_main)
    record = framework.start_record("evaluate", config, data=config.data_identity(), run_id=log.run_id)
    forward = model_forward(found.model, found.preprocessing)
    result = evaluate(forward, log.progress(iter(loader), len(loader)), len(found.classes), world)
    log.log((), {f"val.{key}": value for key, value in result.items() if key != "confusion"})
    if world.is_main:
        record_results(record, result, found.classes)
        record.attach("model", found.describe() | {"source": found.source})
        record.finish().save(Path(config.output_dir))
    log.close()
    return result


def main(args: list[str] | None = None) -> dict[str, Any]:
    return measure(
        configs.parse(
            EvaluateConfig, args, configs_dir=CONFIGS, prog="evaluate", recipe=TrainConfig, shared=DataOptions
        )
    )


if __name__ == "__main__":
    main()
