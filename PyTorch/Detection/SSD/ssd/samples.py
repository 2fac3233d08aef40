"""Pictures with their objects and what was detected, for a run's report: the worst, the best, and some between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dlx.coco import Annotations
from dlx.cocoeval import Found
from dlx.files import atomic_path

from .drawing import draw

COUNT = 8  # of each kind
THRESHOLD = 0.3  # score from which a detection is drawn, that of `cocoeval.confusion`
HEIGHT = 320


def choose(pictures: np.ndarray, agreement: np.ndarray, count: int = COUNT) -> list[tuple[str, int]]:
    """(kind, row) of ``count`` pictures each: worst, best, and evenly spread ones; no picture twice."""
    order = pictures[np.argsort(agreement[pictures], kind="stable")]
    kinds = {
        "worst": order[:count],
        "best": order[::-1][:count],
        "typical": order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)],
    }
    chosen: dict[int, str] = {}
    for kind, rows in kinds.items():
        for row in rows.tolist():
            chosen.setdefault(row, kind)
    return [(kind, row) for row, kind in chosen.items()]


def draw_samples(
    annotations: Annotations, found: Found, pictures: np.ndarray, result: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Write each chosen picture twice, side by side: with its objects, with the detections. Entries of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for index, (kind, row) in enumerate(choose(pictures, np.asarray(result["agreement"], float))):
        image = annotations.decode(row)
        span = annotations.rows(row)
        labels = annotations.labels[span].tolist()
        truth = draw(image, annotations.boxes[span], labels, [annotations.classes[label - 1] for label in labels])
        mine = np.flatnonzero((found.picture == row) & (found.scores >= THRESHOLD))
        mine = mine[np.argsort(-found.scores[mine], kind="stable")]
        captions = [f"{annotations.classes[found.labels[i] - 1]} {found.scores[i]:.0%}" for i in mine]
        detected = draw(image, found.boxes[mine], found.labels[mine].tolist(), captions)
        name = f"{index:02d}_{kind}.jpg"
        with atomic_path(folder / name) as path:
            _beside(truth, detected).save(path, format="JPEG", quality=88)
        share = result["agreement"][row]
        caption = f"{kind}: objects on the left, detections on the right ({share:.0%} agree), {annotations.files[row]}"
        shown.append({"image": f"{folder.name}/{name}", "caption": caption})
    return shown


def _beside(*images: Image.Image) -> Image.Image:
    scaled = [image.resize((max(1, round(image.width * HEIGHT / image.height)), HEIGHT)) for image in images]
    gap = 6
    sheet = Image.new("RGB", (sum(image.width + gap for image in scaled) - gap, HEIGHT), "white")
    left = 0
    for image in scaled:
        sheet.paste(image, (left, 0))
        left += image.width + gap
    return sheet
