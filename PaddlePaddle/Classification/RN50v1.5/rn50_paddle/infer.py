"""Classify pictures with an exported model (`paddle.inference`) or a checkpoint.

./dlx run rn50_paddle infer -- --checkpoint runs/paddle-quickstart --image photo.jpg
./dlx run rn50_paddle infer -- --exported runs/paddle-exported/paddle --image folder_of_photos
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle

from dlx import config as configs
from dlx.files import atomic_write
from dlx.picture_files import PictureFiles
from dlx.vision import Preprocessing

from . import pretrained
from .options import CONFIGS
from .predictor import Predictor
from .samples import softmax


@dataclass
class InferConfig:
    """Classify one picture or every picture below a folder."""

    image: str = configs.field(help="a picture, or a folder of pictures")
    checkpoint: str | None = configs.field(None, help="a run's folder, a checkpoint or a weights file")
    exported: str | None = configs.field(None, help="the folder `paddle` that the verb export wrote")
    engine: Literal["paddle", "onednn", "gpu", "tensorrt"] = configs.field("onednn", help="of an exported model")
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    topk: int = configs.field(5, help="classes to name", ge=1)
    batch_size: int = configs.field(16, help="pictures at a time", ge=1)
    output_dir: str = configs.field("runs/paddle-infer", help="where predictions.json goes")

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.exported is None):
            raise ValueError("give one of --checkpoint and --exported")


def classify(
    run: Callable[[np.ndarray], np.ndarray],
    preprocessing: Preprocessing,
    classes: list[str],
    images: list[Any],
    topk: int,
) -> list[list[tuple[str, float]]]:
    """Of each picture (path, PIL image or array) its likeliest classes with their probabilities."""
    rows = softmax(run(pretrained.normalised_array(images, preprocessing)))
    return [[(classes[i], float(row[i])) for i in np.argsort(-row, kind="stable")[:topk]] for row in rows]


def main(args: list[str] | None = None) -> list[dict[str, Any]]:
    config = configs.parse(InferConfig, args, configs_dir=CONFIGS, prog="infer")
    run: Callable[[np.ndarray], np.ndarray]
    if config.exported is not None:
        run = model = Predictor(config.exported, config.engine)
    else:
        model = pretrained.load(config.checkpoint, config.arch)

        def run(images: np.ndarray) -> np.ndarray:
            with paddle.no_grad():
                return model.model(paddle.to_tensor(images)).numpy()

    files = PictureFiles(config.image, config.output_dir)
    results = []
    for paths, images in files.batches(config.batch_size):
        for path, top in zip(
            paths, classify(run, model.preprocessing, model.classes, list(images), config.topk), strict=True
        ):
            print(path, *(f"{probability:6.1%}  {name}" for name, probability in top), sep="\n  ")
            results.append({"image": str(path), "top": [{"class": name, "probability": p} for name, p in top]})
    files.require_some()
    target = Path(config.output_dir) / "predictions.json"
    atomic_write(target, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(results)} classified; {target}")
    return results


if __name__ == "__main__":
    main()
