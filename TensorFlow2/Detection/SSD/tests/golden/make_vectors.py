"""Matching by brute force, offsets and suppression by `dlx.boxes` (which the PyTorch SSD uses), stored in vectors.json.

The rows of the matching were compared once with the PyTorch SSD's `matching.assign`, and are the same. Needs PyTorch:
PYTHONPATH=../../../Tools python tests/golden/make_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from dlx import boxes as torch_boxes
from dlx.files import atomic_write

FILE = Path(__file__).with_name("vectors.json")
# That code orders coordinates x before y.
SWAP = [1, 0, 3, 2]


def random_boxes(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Corners with three digits, sides 0.05 to 0.5."""
    low, size = generator.uniform(0, 0.6, (*shape, 2)), generator.uniform(0.05, 0.5, (*shape, 2))
    return np.round(np.concatenate([low, low + size], -1), 3)


def overlap(a: list[float], b: list[float]) -> float:
    height, width = (max(min(a[i + 2], b[i + 2]) - max(a[i], b[i]), 0) for i in (0, 1))
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - height * width
    return height * width / union


def assign(boxes: list, labels: list, anchors: list) -> list[int]:
    """For each anchor the row of its object in one picture, or -1."""
    real = [row for row, label in enumerate(labels) if label > 0]
    rows = []
    table = {row: [overlap(boxes[row], anchor) for anchor in anchors] for row in real}
    claimed: dict[int, list[int]] = {}
    for row in real:
        claimed.setdefault(table[row].index(max(table[row])), []).append(row)
    for place in range(len(anchors)):
        rivals = claimed.get(place) or [row for row in real if table[row][place] > 0.5]
        rows.append(max(rivals, key=lambda row: (table[row][place], -row)) if rivals else -1)
    return rows


def matching(generator: np.random.Generator) -> dict:
    boxes, anchors = random_boxes(generator, 3, 6), random_boxes(generator, 60)
    boxes[0, 1] = boxes[0, 0]  # two objects want the same anchor
    labels = generator.integers(1, 4, (3, 6))
    labels[1, 2:], labels[2] = 0, 0
    boxes[labels == 0] = 0
    rows = [assign(one, known, anchors.tolist()) for one, known in zip(boxes.tolist(), labels.tolist(), strict=True)]
    first = _torch(np.broadcast_to(boxes[0], (60, 6, 4)).reshape(-1, 4))
    places = torch_boxes.to_centres(_torch(np.repeat(anchors, 6, 0)))
    offsets = torch_boxes.encode(first, places)
    return {
        "boxes": boxes.tolist(), "labels": labels.tolist(), "anchors": anchors.tolist(), "rows": rows,
        "offsets": np.round(offsets[:, SWAP].double().numpy(), 5).reshape(60, 6, 4)[:10].tolist(),
    }  # fmt: skip


def suppression(generator: np.random.Generator) -> dict:
    boxes = random_boxes(generator, 2, 40)
    boxes[:, 10:20] = np.round(boxes[:, :10] + generator.uniform(-0.03, 0.03, (2, 10, 4)), 3)
    scores = np.round(generator.uniform(0, 1, (2, 40, 3)), 3)
    scores[0, 5], scores[0, 6, 1] = 0, scores[0, 7, 1]  # none at all, and two that are equal
    every = np.repeat(boxes, 3, 1)
    labels = np.tile(np.arange(1, 4), (2, 40))
    kept = torch_boxes.batched_nms(
        _torch(every), _torch(scores.reshape(2, -1)), torch.tensor(labels), iou_threshold=0.4, max_output=60
    )
    return {
        "boxes": boxes.tolist(), "scores": scores.tolist(), "iou_threshold": 0.4, "detections": 60,
        "found_boxes": np.round(kept.boxes[..., SWAP].double().numpy(), 3).tolist(),
        "found_scores": np.round(kept.scores.double().numpy(), 3).tolist(),
        "found_labels": kept.labels.tolist(), "found_count": kept.count.tolist(),
    }  # fmt: skip


def _torch(corners: np.ndarray) -> torch.Tensor:
    corners = corners[..., SWAP] if corners.shape[-1] == 4 else corners
    return torch.tensor(np.ascontiguousarray(corners), dtype=torch.float32)


if __name__ == "__main__":
    source = np.random.default_rng(2026)
    atomic_write(FILE, json.dumps({"matching": matching(source), "suppression": suppression(source)}) + "\n")
