"""Classify pictures: prints the most probable classes, writes annotated pictures and a JSON file.

./dlx run ConvNets infer -- --checkpoint runs/quickstart --image photo.jpg
./dlx run ConvNets infer -- --checkpoint mobilenet_v2.imagenet --image folder_of_photos
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dlx import config as configs
from dlx import dist, inference, vision
from dlx.files import atomic_path, atomic_write
from dlx.precision import DTYPES

from . import pretrained
from .options import CONFIGS


@dataclass
class InferConfig:
    """Classify one picture or every picture below a folder."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    image: str = configs.field(help="a picture, or a folder of pictures")
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    topk: int = configs.field(5, help="classes to name", ge=1)
    batch_size: int = configs.field(16, help="pictures at a time", ge=1)
    precision: Literal["fp32", "bf16", "fp16"] = configs.field("fp32", help="of weights and activations")
    tolerant: bool = configs.field(False, help="report unreadable pictures and go on")
    output_dir: str = configs.field("runs/infer", help="predictions.json and the annotated pictures")
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")


@torch.inference_mode()
def classify(
    found: pretrained.Classifier,
    images: list[Any],
    *,
    topk: int = 5,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    model: torch.nn.Module | None = None,
) -> list[list[tuple[str, float]]]:
    """For each picture (path, bytes, PIL image or array) its ``topk`` classes with their probabilities.

    ``model`` is an already optimised form of ``found.model``.
    """
    model = inference.optimize(found.model, dtype).to(device) if model is None else model
    batch = torch.stack([found.preprocessing(image) for image in images])
    batch = batch.to(device, dtype).contiguous(memory_format=torch.channels_last)
    top = model(batch).float().softmax(1).topk(min(topk, len(found.classes)), dim=1)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [[(found.classes[i], p) for i, p in zip(*row, strict=True)] for row in rows]


def list_pictures(image: str) -> list[Path]:
    """The picture, or all pictures of a folder. ValueError when there is none."""
    path = Path(image)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{image}: no such file or folder")
    found = vision.find_images(path)
    if not found:
        raise ValueError(f"{image}: no picture in this folder")
    return found


def name_annotated(paths: list[Path], base: Path, output: Path) -> dict[Path, Path]:
    """Where the annotated form of each picture goes. ValueError where that would overwrite a picture."""
    targets: dict[Path, Path] = {}
    for path in paths:
        target = output / path.relative_to(base).with_suffix(".png")
        if target in targets.values():  # a.jpg beside a.png
            target = target.with_name(f"{path.name}.png")
        targets[path] = target
    given = {path.resolve() for path in paths}
    for path, target in targets.items():
        if target.resolve() in given:
            raise ValueError(f"the annotated {path} would overwrite {target}; choose another output_dir")
    return targets


def read_batches(
    paths: list[Path], batch_size: int, tolerant: bool, skipped: list[tuple[str, str]]
) -> Iterator[tuple[list[Path], list[Any]]]:
    """Decoded pictures in batches. Unreadable ones raise, or are noted in ``skipped``."""
    names, images = [], []
    for path in paths:
        try:
            images.append(vision.decode_image(path))
            names.append(path)
        except (ValueError, OSError) as error:
            if not tolerant:
                raise
            skipped.append((str(path), str(error)))
        if len(images) == batch_size:
            yield names, images
            names, images = [], []
    if images:
        yield names, images


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(InferConfig, args, configs_dir=CONFIGS, prog="infer")
    paths = list_pictures(config.image)
    base = paths[0].parent if Path(config.image).is_file() else Path(config.image)
    output = Path(config.output_dir)
    targets = name_annotated(paths, base, output)
    with dist.init(config.device) as world:
        found = pretrained.load(config.checkpoint, arch=config.arch)
        dtype = DTYPES[config.precision]
        model = inference.optimize(found.model, dtype).to(world.device)
        output.mkdir(parents=True, exist_ok=True)
        skipped: list[tuple[str, str]] = []
        results = []
        for names, images in read_batches(paths, config.batch_size, config.tolerant, skipped):
            predictions = classify(found, images, topk=config.topk, device=world.device, dtype=dtype, model=model)
            for path, image, top in zip(names, images, predictions, strict=True):
                lines = [f"{probability:6.1%}  {name}" for name, probability in top]
                print(path, *lines, sep="\n  ")
                target = targets[path]
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(target) as temporary:
                    vision.annotate(image, lines).save(temporary, format="PNG")
                results.append(
                    {
                        "image": str(path),
                        "annotated": str(target),
                        "top": [{"class": name, "probability": probability} for name, probability in top],
                    }
                )
    content = {"checkpoint": found.source, "arch": found.arch, "predictions": results, "skipped": skipped}
    atomic_write(output / "predictions.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for _, reason in skipped:  # it begins with the path
        print(f"skipped {reason}", file=sys.stderr)
    print(f"{len(results)} classified, {len(skipped)} skipped; {output / 'predictions.json'}")
    if not results:
        raise ValueError(f"none of {len(paths)} pictures could be read; {skipped[0][1]}")
    return content


if __name__ == "__main__":
    main()
