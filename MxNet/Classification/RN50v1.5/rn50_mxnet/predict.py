"""`train --mode pred`: the class of every picture of the validation split, and how fast they were classified.

On synthetic pictures, where there is nothing to be right about, it measures speed alone and needs no weights.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import mxnet as mx

from dlx.files import atomic_write
from dlx.runlog import RunLog

from . import checkpoint, evaluate, registry
from .options import TrainConfig, context
from .step import normalize
from .workers import Workers

LONGEST = 1_000_000  # predictions in one file


def run(config: TrainConfig) -> dict[str, Any]:
    """Write predictions.json into output_dir, in the order of val.rec; log images/s at every `log_every` batches."""
    workers = Workers(config.kvstore)
    ctx = context(config.device, workers.rank)
    dataset = config.open()
    if dataset.folder is None and config.checkpoint is None:
        network = registry.build(config.arch, len(dataset.classes), dataset.channels, seed=config.seed, ctx=ctx)
        shape = checkpoint.preprocessing_for(config.arch, dataset.channels, config.image_size, config.resize)
        classes = dataset.classes
    else:
        source = evaluate.require_weights(config.checkpoint)
        found = checkpoint.load(source, config.arch if Path(source).is_file() else None, ctx)
        evaluate.check_classes(found, dataset, config.source())
        network, shape, classes = found.network, found.preprocessing, found.classes
    network.hybridize(static_alloc=True, static_shape=dataset.folder is None)
    loader = config.loader(dataset, "val", config.arch, False, workers, image_size=shape.crop, resize=shape.resize)
    log = RunLog(config.output_dir, enabled=workers.is_main)
    log.metadata("pred.ips", unit="images/s", goal="MAXIMIZE", stage="VAL", format=":.1f")
    chosen: list[list[Any]] = []
    before, count = time.perf_counter(), 0
    for step, (images, _) in enumerate(loader.epoch(0), 1):
        scores = mx.nd.softmax(network(normalize(images.as_in_context(ctx), shape.mean, shape.std)))
        best, share = scores.argmax(axis=1).asnumpy().astype(int), scores.max(axis=1).asnumpy()
        if len(chosen) < LONGEST and dataset.folder is not None:
            chosen += [[classes[index], float(value)] for index, value in zip(best, share, strict=True)]
        count += len(best)
        if step % config.log_every == 0 or step == len(loader):
            now = time.perf_counter()
            log.log((0, step), {"pred.ips": count * workers.size / (now - before)})
            before, count = now, 0
        if step == config.max_steps:
            break
    log.close()
    name = "predictions.json" if workers.size == 1 else f"predictions.{workers.rank}.json"
    content = {"checkpoint": config.checkpoint, "data": config.source(), "predictions": chosen}
    atomic_write(Path(config.output_dir) / name, json.dumps(content, ensure_ascii=False) + "\n")
    return content
