"""A picture whose pixels say which object and keypoint they belong to, so that labels can be checked against it."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest

from tf_ssd.preprocessing import fields

# id: rows and columns of a rectangle, in a picture of 48 x 64
RECTANGLES = {1: (4, 16, 6, 26), 2: (22, 46, 10, 30), 3: (8, 30, 40, 62), 4: (36, 44, 44, 58)}
CLASSES = 6


class Scene:
    """An example of 48 x 64 times `factor`. Channel 0 holds ids, channel 1 keypoints, channel 2 noise."""

    def __init__(self, factor: int = 1, ids=(1, 2, 3, 4)) -> None:
        height, width = 48, 64
        image = np.zeros((height, width, 3), np.float32)
        image[..., 2] = np.random.default_rng(0).integers(0, 256, (height, width))
        masks, boxes, points = [], [], []
        for number in ids:
            top, bottom, left, right = RECTANGLES[number]
            image[top:bottom, left:right, 0] = 20 * number
            mask = np.zeros((height, width), np.uint8)
            mask[top:bottom, left:right] = 1
            corners = [(top, left), (top, right - 1), (bottom - 1, left), (bottom - 1, right - 1)]
            for place, (row, column) in enumerate(corners):
                image[row, column, 1] = 10 * number + place
            masks.append(mask)
            boxes.append([top / height, left / width, bottom / height, right / width])
            points.append([[(row + 0.5) / height, (column + 0.5) / width] for row, column in corners])
        count = len(ids)
        enlarge = np.ones((factor, factor, 1), np.float32)
        self.image = np.kron(image, enlarge)
        self.boxes = np.array(boxes, np.float32).reshape(count, 4)
        self.labels = np.array(ids, np.int64)
        self.label_weights = np.array(ids, np.float32) / 10
        self.label_confidences = np.array(ids, np.float32) / 20
        self.multiclass_scores = np.eye(CLASSES, dtype=np.float32)[np.array(ids, int)]
        self.masks = np.kron(
            np.array(masks, np.uint8).reshape(count, height, width), np.ones((factor, factor), np.uint8)
        )
        self.keypoints = np.array(points, np.float32).reshape(count, 4, 2)

    def tensors(self, *names: str) -> dict[str, np.ndarray]:
        """The named tensors, by the names of arguments."""
        return {name: getattr(self, name) for name in names}

    def example(self) -> dict[str, np.ndarray]:
        """All tensors by the names of fields, the picture with its leading 1."""
        found = {field: getattr(self, name) for name, field in fields.ARGUMENTS.items()}
        return found | {fields.IMAGE: self.image[None]}


def check_objects(found: dict[str, np.ndarray], permutation=(0, 1, 2, 3), clipped: bool = True) -> None:
    """That boxes, masks, keypoints and values of `found` (by argument) are those of the objects in its picture."""
    found = {name: np.asarray(value) for name, value in found.items()}
    image = found["image"]
    height, width = image.shape[:2]
    labels = found["labels"]
    assert len(found["boxes"]) == len(labels)
    for row, number in enumerate(labels):
        shown = image[..., 0] == 20 * number
        rows, columns = np.nonzero(shown)
        assert len(rows), f"object {number} was kept, but none of it is in the picture"
        box = found["boxes"][row] * [height, width, height, width]
        seen = np.array([rows.min(), columns.min(), rows.max() + 1, columns.max() + 1])
        inside = box if clipped else np.clip(box, 0, [height, width, height, width])
        np.testing.assert_allclose(inside, seen, atol=2e-3, err_msg=f"box of object {number}")
        if "masks" in found:
            assert found["masks"].shape == (len(labels), height, width)
            np.testing.assert_array_equal(found["masks"][row].astype(bool), shown, err_msg=f"mask of object {number}")
        for place, point in enumerate(found["keypoints"][row] if "keypoints" in found else []):
            marked = image[..., 1] == 10 * number + permutation[place]
            outside = not ((0 <= point).all() and (point < 1).all())
            assert np.isnan(point).all() or not np.isnan(point).any()
            assert marked.any() != (np.isnan(point[0]) or outside), f"keypoint {place} of object {number}: {point}"
            assert not clipped or np.isnan(point[0]) or not outside
            if marked.any():
                assert marked[int(point[0] * height), int(point[1] * width)]
    for name, expected in (("label_weights", labels / 10), ("label_confidences", labels / 20)):
        if name in found:
            np.testing.assert_allclose(found[name], expected, rtol=1e-6)
    if "multiclass_scores" in found:
        np.testing.assert_array_equal(found["multiclass_scores"], np.eye(CLASSES)[labels])


@pytest.fixture
def scene():
    """Makes scenes: `scene(factor=1, ids=...)`."""
    return Scene


@pytest.fixture
def on_objects():
    """The check that labels still belong to the objects."""
    return check_objects
