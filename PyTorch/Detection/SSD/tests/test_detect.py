"""From outputs to detections: against loops in double precision, nothing found (O09), pixels of the picture (O08)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from dlx.boxes import Kept, encode
from ssd.anchors import default_boxes
from ssd.detect import Detect, DetectionModel, to_pixels, unpad
from ssd.preprocessing import Frame, Preprocessing

ANCHORS = default_boxes(300)


def plain_detect(offsets, logits, anchors, *, score=0.05, overlap=0.5, limit=200) -> list[tuple[int, float, tuple]]:
    """One image: (label, score, corners) by the definition, float64, without limits before the suppression."""
    found = []
    probabilities = logits.double().softmax(1)
    for label in range(1, logits.shape[1]):
        boxes = []
        for index in (probabilities[:, label] > score).nonzero().flatten().tolist():
            cx, cy, w, h = anchors[index].double().tolist()
            dx, dy, dw, dh = offsets[index].double().tolist()
            x, y, w, h = cx + dx * 0.1 * w, cy + dy * 0.1 * h, w * math.exp(dw * 0.2), h * math.exp(dh * 0.2)
            corners = tuple(min(max(v, 0.0), 1.0) for v in (x - w / 2, y - h / 2, x + w / 2, y + h / 2))
            if corners[2] > corners[0] and corners[3] > corners[1]:
                boxes.append((probabilities[index, label].item(), corners))
        boxes.sort(key=lambda entry: -entry[0])
        kept = []
        for value, box in boxes:
            if all(iou(other, box) <= overlap for _, other in kept):
                kept.append((value, box))
        found += [(label, value, box) for value, box in kept]
    return sorted(found, key=lambda entry: -entry[1])[:limit]


def iou(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def outputs(n: int, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As of a trained model: background nearly everywhere, some hundred boxes that are sure of something."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randn(n, 8732, 4, generator=generator)
    logits = torch.randn(n, 8732, classes + 1, generator=generator)
    logits[..., 0] += 12
    for index in range(n):
        sure = torch.randperm(8732, generator=generator)[:150]
        logits[index, sure, 0] -= 12
    return offsets, logits


def test_detections_are_those_of_the_definition():
    offsets, logits = outputs(3)
    found = unpad(Detect(ANCHORS)(offsets, logits))
    for index, detections in enumerate(found):
        expected = plain_detect(offsets[index], logits[index], ANCHORS)
        assert len(expected) > 50
        assert detections["labels"].tolist() == [label for label, _, _ in expected]
        np.testing.assert_allclose(detections["scores"], [value for _, value, _ in expected], atol=1e-6)
        np.testing.assert_allclose(detections["boxes"], [box for _, _, box in expected], atol=1e-5)


def test_limits():
    offsets, logits = outputs(1)
    scores = logits.softmax(2)
    few = Detect(ANCHORS, max_detections=5)(offsets, logits)
    assert few.boxes.shape == (1, 5, 4) and few.count.tolist() == [5]
    assert torch.equal(few.scores[0], Detect(ANCHORS)(offsets, logits).scores[0, :5])
    _, values, labels = Detect(ANCHORS, per_class=10, candidates=20).select(offsets, logits)
    best = torch.cat([scores[0, :, label].topk(10).values for label in (1, 2, 3)]).topk(20).values
    torch.testing.assert_close(values[0], best)
    assert all((labels == label).sum() <= 10 for label in (1, 2, 3))
    high = Detect(ANCHORS, score_threshold=0.6)(offsets, logits)
    assert 0 < high.count.item() < Detect(ANCHORS)(offsets, logits).count.item()
    assert high.scores[0, : high.count.item()].min() > 0.6


def test_nothing_found():
    """User case O09: background everywhere."""
    logits = torch.zeros(2, 8732, 4)
    logits[..., 0] = 100
    found = Detect(ANCHORS)(torch.randn(2, 8732, 4), logits)
    assert found.count.tolist() == [0, 0]
    for detections in unpad(found):
        assert detections["boxes"].shape == (0, 4) and detections["boxes"].dtype == np.float32
        assert detections["scores"].shape == (0,) and detections["scores"].dtype == np.float32
        assert detections["labels"].shape == (0,) and detections["labels"].dtype == np.int64
        assert to_pixels(detections, Frame.of((640, 480)))["boxes"].shape == (0, 4)


def test_values_that_are_not_numbers_find_nothing():
    logits = torch.full((1, 8732, 3), torch.nan)
    assert Detect(ANCHORS)(torch.zeros(1, 8732, 4), logits).count.tolist() == [0]
    offsets, logits = outputs(1)
    found = Detect(ANCHORS)(offsets * 1e6, logits)  # exp overflows
    assert torch.isfinite(found.boxes).all()


def test_boxes_outside_of_the_picture_are_none():
    offsets = torch.zeros(1, 8732, 4)
    logits = torch.zeros(1, 8732, 2)
    logits[..., 0] = 20
    logits[0, 0] = torch.tensor([0.0, 9.0])
    offsets[0, 0, 0] = -100  # ten widths to the left
    assert Detect(ANCHORS)(offsets, logits).count.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_outputs(dtype):
    offsets, logits = (tensor.to(dtype) for tensor in outputs(1))
    expected = Detect(ANCHORS)(offsets.float(), logits.float())
    for ours, theirs in zip(Detect(ANCHORS)(offsets, logits), expected, strict=True):
        assert torch.equal(ours, theirs)


class Stub(torch.nn.Module):
    """A network that sees one object at the given place, whatever the image."""

    def __init__(self, box: tuple[float, ...], label: int):
        super().__init__()
        target = torch.tensor(box)
        index = (ANCHORS[:, :2] - (target[:2] + target[2:]) / 2).norm(dim=1).argmin()
        self.offsets, self.logits = torch.zeros(1, 8732, 4), torch.zeros(1, 8732, 5)
        self.logits[..., 0] = 20.0
        self.logits[0, index, label] = 40.0
        self.offsets[0, index] = encode(target, ANCHORS[index])

    def forward(self, images):
        return self.offsets.expand(len(images), -1, -1), self.logits.expand(len(images), -1, -1)


@pytest.mark.parametrize(
    ("crop", "expected"), [("whole", [64, 96, 320, 288]), ("centre", [80 + 48, 96, 80 + 240, 288])]
)
def test_boxes_return_to_the_original_picture(crop, expected):
    """User case O08: a picture that is not square; whole is the default."""
    assert Preprocessing().crop == "whole"
    preprocessing = Preprocessing(crop=crop)
    picture = Image.new("RGB", (640, 480))
    model = DetectionModel(Stub((0.1, 0.2, 0.5, 0.6), 3), 300)
    found = unpad(model(preprocessing(picture)[None]))[0]
    pixels = to_pixels(found, preprocessing.frame(picture.size))
    np.testing.assert_allclose(pixels["boxes"], [expected], atol=0.01)
    assert pixels["labels"].tolist() == [3] and pixels["boxes"].dtype == np.float32


def test_an_object_is_seen_where_it_is():
    """A white rectangle through either frame and back."""
    picture = Image.new("RGB", (640, 480))
    picture.paste((255, 255, 255), (200, 120, 360, 330))
    for crop in ("whole", "centre"):
        preprocessing = Preprocessing(crop=crop)
        bright = preprocessing.pixels(picture)[0].numpy() > 127
        rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
        box = np.array([[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]]) / 300
        found = preprocessing.frame(picture.size).to_pixels(box)
        np.testing.assert_allclose(found, [[200, 120, 360, 330]], atol=1.5)


def test_preprocessing_travels_as_a_dictionary():
    given = Preprocessing(size=384, crop="centre", mean=(0.5, 0.4, 0.3))
    assert Preprocessing.from_dict(given.to_dict()) == given
    with pytest.raises(ValueError, match="preprocessing has no resize"):
        Preprocessing.from_dict({"size": 300, "resize": 256})
    with pytest.raises(ValueError, match="crop 'center' is none of whole, centre"):
        Preprocessing(crop="center")


def test_a_padded_batch_is_unpadded():
    kept = Kept(torch.rand(2, 3, 4), torch.rand(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.tensor([2, 0]))
    first, second = unpad(kept)
    assert first["boxes"].shape == (2, 4) and second["boxes"].shape == (0, 4)
