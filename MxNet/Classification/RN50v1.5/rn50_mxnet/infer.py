"""Classify pictures: prints the most probable classes, writes annotated pictures and a JSON file.

./dlx run rn50_mxnet infer -- --checkpoint runs/quickstart --image photo.jpg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from PIL import Image

from dlx import config as configs
from dlx import vision
from dlx.files import atomic_path, atomic_write
from dlx.picture_files import PictureFiles

from . import checkpoint
from .options import CHECKPOINT_HELP, CONFIGS, context
from .step import normalize


@dataclass
class InferConfig:
    """Classify one picture or every picture below a folder."""

    checkpoint: str = configs.field(help=CHECKPOINT_HELP)
    image: str = configs.field(help="a picture, or a folder of pictures")
    arch: str | None = configs.field(None, help="of a bare weights file")
    topk: int = configs.field(5, help="classes to name", ge=1)
    batch_size: int = configs.field(16, help="pictures at a time", ge=1)
    tolerant: bool = configs.field(False, help="report unreadable pictures and go on")
    device: str = configs.field("auto", help="auto, cpu or gpu")
    output_dir: str = configs.field("runs/infer", help="predictions.json and the annotated pictures")


def classify(
    found: checkpoint.Classifier, images: Sequence[Image.Image], topk: int, ctx: mx.Context
) -> list[list[tuple[str, float]]]:
    """For each picture its ``topk`` classes with their probabilities."""
    shape = found.preprocessing
    pixels = np.stack([np.asarray(shape.crop_image(image), np.float32) for image in images])
    pixels = pixels[:, None] if shape.channels == 1 else pixels.transpose(0, 3, 1, 2)
    logits = found.network(normalize(mx.nd.array(pixels, ctx=ctx), shape.mean, shape.std))
    shares = mx.nd.softmax(logits).asnumpy()
    best = np.argsort(-shares, axis=1, kind="stable")[:, :topk]
    return [[(found.classes[i], float(row[i])) for i in chosen] for chosen, row in zip(best, shares, strict=True)]


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(InferConfig, args, configs_dir=CONFIGS, prog="infer")
    files = PictureFiles(config.image, config.output_dir, config.tolerant)
    ctx = context(config.device)
    found = checkpoint.load(config.checkpoint, config.arch, ctx)
    found.network.hybridize()
    results = []
    for names, images in files.batches(config.batch_size):
        for path, image, top in zip(names, images, classify(found, images, config.topk, ctx), strict=True):
            lines = [f"{probability:6.1%}  {name}" for name, probability in top]
            print(path, *lines, sep="\n  ")
            target = files.targets[path]
            with atomic_path(target) as temporary:
                vision.annotate(image, lines).save(temporary, format="PNG")
            ranked = [{"class": name, "probability": probability} for name, probability in top]
            results.append({"image": str(path), "annotated": str(target), "top": ranked})
    content = {"checkpoint": found.source, "arch": found.arch, "predictions": results, "skipped": files.skipped}
    target = Path(config.output_dir) / "predictions.json"
    atomic_write(target, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for _, reason in files.skipped:
        print(f"skipped {reason}", file=sys.stderr)
    files.require_some()
    print(f"{len(results)} classified, {len(files.skipped)} skipped; {target}")
    return content


if __name__ == "__main__":
    main()
