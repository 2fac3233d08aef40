"""COCO's measures of detection, computed by pycocotools: mean average precision by overlap, size and class, curves.

    found = Found(picture, boxes, scores, labels)       # of all pictures together
    result = evaluate(annotations, found)               # map, map_50, ..., per_class, curves
    json.dump(to_json(annotations, found), ...)         # COCO's results file, with the data set's own category ids

A picture is its row in `coco.Annotations`, a label 1..C the place of its class there. D detections, C classes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .coco import Annotations

AREAS = ("all", "small", "medium", "large")  # up to 32 x 32 pixels, up to 96 x 96, above
MOST = 100  # detections of a picture that count
SCALARS = (
    "map", "map_50", "map_75", "map_small", "map_medium", "map_large",
    "recall_1", "recall_10", "recall_100", "recall_small", "recall_medium", "recall_large",
)  # fmt: skip


class Found(NamedTuple):
    """Detections: `picture` (D,) int64, `boxes` (D, 4) corners in pixels of it, `scores` (D,), `labels` (D,) int64."""

    picture: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray

    @classmethod
    def none(cls) -> Found:
        return cls(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))

    @classmethod
    def join(cls, parts: Sequence[Found]) -> Found:
        """All parts as one."""
        return cls(*(np.concatenate(arrays) for arrays in zip(cls.none(), *parts, strict=True)))


def _sized(corners: np.ndarray) -> np.ndarray:
    """Corners as (left, top, width, height), which COCO files hold."""
    corners = np.asarray(corners, np.float64)
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)


def _check(annotations: Annotations, found: Found) -> None:
    lengths = {len(array) for array in found}
    if len(lengths) != 1 or found.boxes.shape[1:] != (4,):
        raise ValueError(f"detections of different lengths: {[list(array.shape) for array in found]}")
    for name, values, low, high in (
        ("picture", found.picture, 0, len(annotations) - 1),
        ("label", found.labels, 1, len(annotations.classes)),
    ):
        wrong = np.flatnonzero((values < low) | (values > high))
        if len(wrong):
            raise ValueError(f"detection {wrong[0]}: {name} {values[wrong[0]]} is not within {low} to {high}")


def to_json(annotations: Annotations, found: Found) -> list[dict[str, Any]]:
    """COCO's results format with the annotation file's image and category ids; boxes are left, top, width, height."""
    _check(annotations, found)
    image_ids, category_ids = np.asarray(annotations.image_ids), np.asarray(annotations.category_ids)
    columns = (
        image_ids[found.picture].tolist(),
        category_ids[found.labels - 1].tolist(),
        np.round(_sized(found.boxes), 3).tolist(),
        np.asarray(found.scores, np.float64).tolist(),
    )
    return [
        {"image_id": image, "category_id": category, "bbox": box, "score": score}
        for image, category, box, score in zip(*columns, strict=True)
    ]


def _index(annotations: Annotations, pictures: np.ndarray, entries: list[dict[str, Any]]) -> Any:
    """pycocotools' object for these entries, whose images are rows of `annotations`."""
    from pycocotools.coco import COCO

    index = COCO()
    index.dataset = {
        "images": [{"id": int(row)} for row in pictures],
        "categories": [{"id": label, "name": name} for label, name in enumerate(annotations.classes, start=1)],
        "annotations": entries,
    }
    index.createIndex()
    return index


def _truth(annotations: Annotations, pictures: np.ndarray) -> list[dict[str, Any]]:
    rows = np.repeat(np.arange(len(annotations)), np.diff(annotations.starts))
    boxes = _sized(annotations.boxes).tolist()
    wanted = np.zeros(len(annotations), bool)
    wanted[pictures] = True
    return [
        {
            "id": index + 1,
            "image_id": int(rows[index]),
            "category_id": int(annotations.labels[index]),
            "bbox": boxes[index],
            "area": float(annotations.areas[index]),
            "iscrowd": int(annotations.iscrowd[index]),
        }
        for index in np.flatnonzero(wanted[rows]).tolist()
    ]


def _guess(found: Found) -> list[dict[str, Any]]:
    boxes = _sized(found.boxes)
    columns = (found.picture.tolist(), found.labels.tolist(), boxes.tolist(), np.asarray(found.scores, float).tolist())
    return [
        {
            "id": index,
            "image_id": picture,
            "category_id": label,
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": 0,
            "score": score,
        }
        for index, (picture, label, box, score) in enumerate(zip(*columns, strict=True), start=1)
    ]


def evaluate(
    annotations: Annotations, found: Found, pictures: Sequence[int] | np.ndarray | None = None
) -> dict[str, Any]:
    """The measures of SCALARS (0..1; NaN where there is no object of that kind), and

    `per_class`: for each class its name, `ap`, `ap_50` and its number of `objects`; `curves`: for each class the
    precision at an overlap of 0.5 for each `recall` of 0, 0.01 ... 1; the numbers of `images` and `objects`.
    `pictures`: the rows that were looked at, by default all; others do not count as missed.
    """
    from pycocotools.cocoeval import COCOeval

    _check(annotations, found)
    rows = np.arange(len(annotations)) if pictures is None else np.unique(np.asarray(pictures, np.int64))
    with contextlib.redirect_stdout(io.StringIO()):  # it reports each of its steps
        truth = _truth(annotations, rows)
        run = COCOeval(_index(annotations, rows, truth), _index(annotations, rows, _guess(found)), "bbox")
        run.params.maxDets = [1, 10, MOST]
        run.evaluate()
        run.accumulate()
    precision, recall = run.eval["precision"], run.eval["recall"]  # overlap, recall, class, area, most; no recall axis
    overlaps = run.params.iouThrs
    at_50, at_75 = int(np.argmin(abs(overlaps - 0.5))), int(np.argmin(abs(overlaps - 0.75)))
    result: dict[str, Any] = {
        "map": _mean(precision[..., 0, 2]),
        "map_50": _mean(precision[at_50, ..., 0, 2]),
        "map_75": _mean(precision[at_75, ..., 0, 2]),
    }
    for area, name in enumerate(AREAS[1:], start=1):
        result[f"map_{name}"] = _mean(precision[..., area, 2])
        result[f"recall_{name}"] = _mean(recall[..., area, 2])
    for place, most in enumerate((1, 10, MOST)):
        result[f"recall_{most}"] = _mean(recall[..., 0, place])
    result = {key: result[key] for key in SCALARS}
    objects = np.bincount([entry["category_id"] for entry in truth], minlength=len(annotations.classes) + 1)[1:]
    result["per_class"] = [
        {
            "name": name,
            "ap": _mean(precision[:, :, index, 0, 2]),
            "ap_50": _mean(precision[at_50, :, index, 0, 2]),
            "objects": int(objects[index]),
        }
        for index, name in enumerate(annotations.classes)
    ]
    result["curves"] = {
        "recall": np.round(run.params.recThrs, 2).tolist(),
        "precision": {
            name: precision[at_50, :, index, 0, 2].tolist()
            for index, name in enumerate(annotations.classes)
            if objects[index]
        },
    }
    return result | {"images": len(rows), "objects": len(truth)}


def _mean(values: np.ndarray) -> float:
    """COCO marks what has no object with -1."""
    values = values[values > -1]
    return float(values.mean()) if values.size else float("nan")


# ------------------------------------------------------------------------------------------- what was confused


def _overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Intersection over union of corners (a, 4) and (b, 4)."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(2)
    areas = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(1) for boxes in (first, second)]
    return both / np.maximum(areas[0][:, None] + areas[1][None, :] - both, 1e-12)


def confusion(
    annotations: Annotations,
    found: Found,
    pictures: Sequence[int] | np.ndarray | None = None,
    *,
    score: float = 0.3,
    overlap: float = 0.5,
) -> tuple[np.ndarray, np.ndarray]:
    """(C + 1, C + 1) counts, truth by detection, and (N,) per picture the share of objects and detections that agree.

    Detections above `score` take, best first, the free object that they overlap most, by `overlap` at least, whatever
    its class. The last row counts detections of nothing, the last column missed objects. Crowds are left out. A
    picture's share is 2 x right / (objects + detections); 1 where there is neither, NaN where it was not looked at.
    """
    _check(annotations, found)
    classes = len(annotations.classes)
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    share = np.full(len(annotations), np.nan)
    sure = np.flatnonzero(np.asarray(found.scores) >= score)
    sure = sure[np.lexsort((-np.asarray(found.scores)[sure], found.picture[sure]))]
    starts = np.searchsorted(found.picture[sure], np.arange(len(annotations) + 1))
    for row in range(len(annotations)) if pictures is None else np.unique(pictures).tolist():
        span = annotations.rows(row)
        solid = np.flatnonzero(annotations.iscrowd[span] == 0) + span.start
        mine = sure[starts[row] : starts[row + 1]]
        table = _overlaps(np.asarray(found.boxes, float)[mine], annotations.boxes[solid])
        right, free = 0, np.ones(len(solid), bool)
        for line, detection in zip(table, mine, strict=True):
            chances = np.where(free, line, -1.0)
            best = int(chances.argmax()) if len(solid) else -1
            truth = classes
            if best >= 0 and chances[best] >= overlap:
                free[best] = False
                truth = int(annotations.labels[solid[best]]) - 1
            guess = int(found.labels[detection]) - 1
            matrix[truth, guess] += 1
            right += truth == guess
        np.add.at(matrix, (annotations.labels[solid][free] - 1, classes), 1)
        total = len(solid) + len(mine)
        share[row] = 2 * right / total if total else 1.0
    return matrix, share
