"""COCO's measures on cases computed by hand, and what they do with ids, crowds, sizes and nothing at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pycocotools", reason="the tools' own environment has no pycocotools")

from dlx.coco import Annotations
from dlx.cocoeval import SCALARS, Found, confusion, evaluate, to_json


def annotate(pictures: list[list[tuple]], classes: int = 2) -> Annotations:
    """`pictures`: for each its objects (left, top, right, bottom, label[, crowd])."""
    flat = [entry for objects in pictures for entry in objects]
    boxes = np.array([entry[:4] for entry in flat], float).reshape(-1, 4)
    count = len(pictures)
    return Annotations(
        path=Path("a.json"),
        folder=Path("."),
        classes=["ant", "bee", "cat"][:classes],
        category_ids=[3, 17, 44][:classes],
        files=[f"{index}.png" for index in range(count)],
        image_ids=np.arange(count) * 10 + 7,
        sizes=np.full((count, 2), 200),
        starts=np.cumsum([0, *map(len, pictures)]),
        boxes=boxes,
        labels=np.array([entry[4] for entry in flat], np.int64),
        areas=(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]),
        iscrowd=np.array([entry[5] if len(entry) > 5 else 0 for entry in flat]),
        annotation_ids=np.arange(len(flat)),
        orientations=np.ones(count, int),
        turned=np.zeros(count, bool),
        plain=np.ones(count, bool),
    )


def detections(*rows: tuple) -> Found:
    """(picture, left, top, right, bottom, label, score)."""
    table = np.array(rows, float).reshape(-1, 7)
    return Found(table[:, 0].astype(np.int64), table[:, 1:5], table[:, 6], table[:, 5].astype(np.int64))


TRUTH = annotate([[(0, 0, 100, 100, 1), (100, 100, 200, 200, 1)], [(0, 0, 50, 50, 1)]])


def test_a_case_computed_by_hand():
    """Three objects of one class; found by falling score: a hit, a miss, a hit whose overlap is 0.8, one never.

    Precision after each detection: 1/1, 1/2, 2/3; recall 1/3, 1/3, 2/3. Of the 101 recalls 0, 0.01 ... 1, the 34 up to
    1/3 have precision 1, the next 33 up to 2/3 have 2/3, the others 0. Beyond an overlap of 0.8 the third is a miss,
    too: 34 recalls with 1.
    """
    found = detections(
        (0, 0, 0, 100, 100, 1, 0.9),
        (1, 120, 120, 180, 180, 1, 0.8),
        (0, 100, 100, 200, 180, 1, 0.7),  # 80 x 100 of 100 x 100
    )
    result = evaluate(TRUTH, found)
    low, high = (34 + 33 * 2 / 3) / 101, 34 / 101
    assert result["map_50"] == pytest.approx(low, abs=1e-9)
    assert result["map_75"] == pytest.approx(low, abs=1e-9)
    assert result["map"] == pytest.approx((7 * low + 3 * high) / 10, abs=1e-9)  # 0.50 ... 0.80 and 0.85, 0.90, 0.95
    assert result["per_class"][0] == {"name": "ant", "ap": result["map"], "ap_50": result["map_50"], "objects": 3}
    assert math.isnan(result["per_class"][1]["ap"]) and result["per_class"][1]["objects"] == 0
    assert result["recall_100"] == pytest.approx((7 * 2 / 3 + 3 * 1 / 3) / 10)
    assert result["recall_1"] == pytest.approx(1 / 3)
    curve = result["curves"]["precision"]["ant"]
    assert result["curves"]["recall"][34] == 0.34
    assert [curve[33], curve[34], curve[66], curve[67]] == pytest.approx([1, 2 / 3, 2 / 3, 0])
    assert (result["images"], result["objects"]) == (2, 3)


def test_sizes():
    """Objects of 20, 60 and 100 pixels; only the medium one is found."""
    truth = annotate([[(0, 0, 20, 20, 1), (40, 40, 100, 100, 1), (100, 100, 200, 200, 1)]])
    result = evaluate(truth, detections((0, 40, 40, 100, 100, 1, 0.5)))
    sizes = [result[f"map_{size}"] for size in ("small", "medium", "large")]
    assert sizes == pytest.approx([0.0, 1.0, 0.0])
    assert list(result)[: len(SCALARS)] == list(SCALARS)


def test_perfect_nothing_and_no_objects():
    perfect = detections((0, 0, 0, 100, 100, 1, 0.9), (0, 100, 100, 200, 200, 1, 0.5), (1, 0, 0, 50, 50, 1, 0.2))
    assert evaluate(TRUTH, perfect)["map"] == pytest.approx(1)
    result = evaluate(TRUTH, Found.none())
    assert result["map"] == 0.0 and result["recall_100"] == 0.0
    assert math.isnan(evaluate(annotate([[], []]), perfect)["map"])


@pytest.mark.parametrize(("misses", "recall"), [(99, 1.0), (100, 0.0)])
def test_a_hundred_detections_of_a_picture_count(misses, recall):
    truth = annotate([[(0, 0, 100, 100, 1)]])
    rows = [(0, 150, 150, 160, 160, 1, 0.9)] * misses
    assert evaluate(truth, detections(*rows, (0, 0, 0, 100, 100, 1, 0.5)))["recall_100"] == recall


def test_a_crowd_is_neither_hit_nor_miss():
    truth = annotate([[(0, 0, 100, 100, 1), (100, 0, 200, 200, 1, 1)]])
    found = detections((0, 110, 10, 150, 60, 1, 0.9), (0, 0, 0, 100, 100, 1, 0.8))
    assert evaluate(truth, found)["map"] == pytest.approx(1)


def test_pictures_not_looked_at_do_not_count():
    found = detections((0, 0, 0, 100, 100, 1, 0.9), (0, 100, 100, 200, 200, 1, 0.5))
    assert evaluate(TRUTH, found)["recall_100"] == pytest.approx(2 / 3)
    result = evaluate(TRUTH, found, pictures=[0])
    assert result["map"] == pytest.approx(1) and result["images"] == 1 and result["objects"] == 2


def test_category_and_image_ids_survive(tmp_path):
    """User case O12: ids 3, 17 and 44 are in the file, labels 1, 2 and 3 in the network."""
    truth = annotate([[(0, 0, 10, 10, 1)], [(0, 0, 10, 10, 3)]], classes=3)
    entries = to_json(truth, detections((1, 1, 2, 11, 22, 3, 0.5), (0, 0, 0, 5, 5, 1, 0.25)))
    assert json.loads(json.dumps(entries)) == [
        {"image_id": 17, "category_id": 44, "bbox": [1.0, 2.0, 10.0, 20.0], "score": 0.5},
        {"image_id": 7, "category_id": 3, "bbox": [0.0, 0.0, 5.0, 5.0], "score": 0.25},
    ]
    assert to_json(truth, Found.none()) == []


def test_the_results_file_is_read_by_pycocotools(tmp_path, capsys):
    """The same numbers from pycocotools' own reader, with the ids of the files."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(12):
        corner = generator.uniform(0, 100, (4, 2))
        pictures.append([(*c, *(c + generator.uniform(10, 100, 2)), generator.integers(1, 4)) for c in corner])
    truth = annotate(pictures, classes=3)
    rows = np.repeat(np.arange(12), 4)
    noise = generator.normal(0, 6, truth.boxes.shape)
    labels = np.where(generator.random(48) < 0.8, truth.labels, generator.integers(1, 4, 48))
    found = Found(rows, truth.boxes + noise, generator.random(48), labels)
    content = {
        "images": [{"id": int(i), "width": 200, "height": 200} for i in truth.image_ids],
        "categories": [{"id": i, "name": n} for i, n in zip(truth.category_ids, truth.classes, strict=True)],
        "annotations": [
            {
                "id": i + 1,
                "image_id": int(truth.image_ids[rows[i]]),
                "category_id": truth.category_ids[truth.labels[i] - 1],
                "bbox": [b[0], b[1], b[2] - b[0], b[3] - b[1]],
                "area": float(truth.areas[i]),
                "iscrowd": 0,
            }
            for i, b in enumerate(truth.boxes.tolist())
        ],
    }
    (tmp_path / "truth.json").write_text(json.dumps(content))
    (tmp_path / "found.json").write_text(json.dumps(to_json(truth, found)))
    theirs = COCO(str(tmp_path / "truth.json"))
    run = COCOeval(theirs, theirs.loadRes(str(tmp_path / "found.json")), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    capsys.readouterr()
    ours = evaluate(truth, found)
    assert 0.1 < ours["map"] < 0.9
    for name, value in zip(SCALARS, run.stats, strict=True):
        assert (math.isnan(ours[name]) and value == -1) or ours[name] == pytest.approx(value, abs=2e-3), name
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((2, 0, 0, 1, 1, 1, 0.5), "detection 1: picture 2 is not within 0 to 1"),
        ((0, 0, 0, 1, 1, 3, 0.5), "detection 1: label 3 is not within 1 to 2"),
        ((0, 0, 0, 1, 1, 0, 0.5), "detection 1: label 0"),
    ],
)
def test_impossible_detections_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        evaluate(TRUTH, detections((0, 0, 0, 1, 1, 1, 0.9), row))


def test_confusion_by_hand():
    truth = annotate([[(0, 0, 100, 100, 1), (100, 100, 200, 200, 2)], [(0, 0, 50, 50, 2)], [], []])
    found = detections(
        (0, 0, 0, 100, 100, 1, 0.9),  # right
        (0, 0, 0, 100, 95, 1, 0.8),  # a second time: of nothing
        (0, 100, 100, 200, 200, 1, 0.7),  # the wrong class
        (1, 0, 0, 50, 50, 2, 0.2),  # not sure enough: missed
        (2, 0, 0, 50, 50, 2, 0.5),  # nothing there
    )
    matrix, share = confusion(truth, found)
    assert matrix.tolist() == [[1, 0, 0], [1, 0, 1], [1, 1, 0]]
    np.testing.assert_allclose(share, [2 / 5, 0, 0, 1])
    _, share = confusion(truth, found, pictures=[0])
    assert np.isnan(share[1:]).all() and share[0] == pytest.approx(2 / 5)
