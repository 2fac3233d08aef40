"""Detect objects in pictures: writes them annotated, and a JSON file with boxes in pixels of the original pictures.

./dlx run SSD infer -- --checkpoint runs/ssd_quickstart --image photo.jpg
./dlx run SSD infer -- --checkpoint runs/ssd_quickstart --image folder_of_video_frames --threshold 0.5
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from dlx import config as configs
from dlx import dist, inference
from dlx.files import atomic_path, atomic_write
from dlx.picture_files import PictureFiles
from dlx.precision import DTYPES
from dlx.vision import decode_image

from . import pretrained
from .detect import DetectionModel, to_pixels, unpad
from .drawing import draw
from .options import CONFIGS

LISTED = 10  # detections of a picture that are printed; all are drawn and written


@dataclass
class InferConfig:
    """Detect objects in one picture, in every picture below a folder, or in the frames of a video (name order)."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    image: str = configs.field(help="a picture, or a folder of pictures or video frames")
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    threshold: float = configs.field(0.4, help="score from which a detection is shown", ge=0.01, lt=1)
    batch_size: int = configs.field(8, help="pictures at a time", ge=1)
    precision: Literal["fp32", "bf16", "fp16"] = configs.field("fp32", help="of weights and activations")
    tolerant: bool = configs.field(False, help="report unreadable pictures and go on")
    output_dir: str = configs.field("runs/infer", help="detections.json and the annotated pictures")
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")


class Predictor:
    """A detector made ready for pictures: weights folded and cast, everything on one device."""

    def __init__(
        self,
        found: pretrained.Detector,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        threshold: float = 0.05,
    ):
        self.found, self.device, self.dtype = found, torch.device(device), dtype
        model = inference.optimize(found.model, dtype)
        self.model = DetectionModel(model, found.preprocessing.size, score_threshold=threshold).to(self.device)
        self.normalize = found.preprocessing.normalize().to(self.device)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """For each picture (path, bytes, PIL image or array) boxes in its pixels, scores and labels, best first."""
        pictures = [decode_image(image) for image in images]
        batch = torch.stack([self.found.preprocessing.pixels(picture) for picture in pictures])
        batch = self.normalize(batch.to(self.device)).to(self.dtype).contiguous(memory_format=torch.channels_last)
        frames = [self.found.preprocessing.frame(picture.size) for picture in pictures]
        return [to_pixels(one, frame) for one, frame in zip(unpad(self.model(batch)), frames, strict=True)]


def as_entries(detections: dict[str, np.ndarray], found: pretrained.Detector) -> list[dict[str, Any]]:
    """Detections of a picture as JSON: category id and name, score, box as left, top, right, bottom in pixels."""
    return [
        {
            "category_id": found.category_ids[label - 1],
            "category": found.classes[label - 1],
            "score": round(float(score), 4),
            "box": [round(float(value), 2) for value in box],
        }
        for box, score, label in zip(*(detections[key] for key in ("boxes", "scores", "labels")), strict=True)
    ]


def annotate(image: Image.Image, detections: dict[str, np.ndarray], classes: Sequence[str]) -> Image.Image:
    """The picture with its detections drawn into it."""
    pairs = zip(detections["labels"].tolist(), detections["scores"].tolist(), strict=True)
    captions = [f"{classes[label - 1]} {score:.0%}" for label, score in pairs]
    return draw(image, detections["boxes"], detections["labels"].tolist(), captions)


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(InferConfig, args, configs_dir=CONFIGS, prog="infer")
    output = Path(config.output_dir)
    pictures = PictureFiles(config.image, output, config.tolerant)
    results = []
    with dist.init(config.device) as world:
        world.require_alone("infer")
        found = pretrained.load(config.checkpoint, arch=config.arch)
        predict = Predictor(found, world.device, DTYPES[config.precision], config.threshold)
        for paths, images in pictures.batches(config.batch_size):
            for path, image, detections in zip(paths, images, predict(images), strict=True):
                entries = as_entries(detections, found)
                print(f"{path}: {_summary(entries)}")
                target = pictures.targets[path]
                with atomic_path(target) as temporary:
                    annotate(image, detections, found.classes).save(temporary, format="PNG")
                results.append(
                    {
                        "image": str(path),
                        "width": image.width,
                        "height": image.height,
                        "annotated": str(target),
                        "detections": entries,
                    }
                )
    content = {
        "checkpoint": found.source,
        "box_format": "left, top, right, bottom in pixels",
        "arch": found.arch,
        "threshold": config.threshold,
        "pictures": results,
        "skipped": pictures.skipped,
    }
    atomic_write(output / "detections.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for _, reason in pictures.skipped:  # it begins with the path
        print(f"skipped {reason}", file=sys.stderr)
    count = sum(len(result["detections"]) for result in results)
    print(f"{count} detections in {len(results)} pictures, {len(pictures.skipped)} skipped; {output}/detections.json")
    pictures.require_some()
    return content


def _summary(entries: list[dict[str, Any]]) -> str:
    named = [f"{entry['category']} {entry['score']:.0%}" for entry in entries[:LISTED]]
    more = [f"and {len(entries) - LISTED} more"] if len(entries) > LISTED else []
    return ", ".join(named + more) or "nothing"


if __name__ == "__main__":
    main()
