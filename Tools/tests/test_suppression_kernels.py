"""The Triton kernels of suppression against the visit in order, written out.

They run on a GPU, or without one through Triton's interpreter:
``TRITON_INTERPRET=1 pytest tests/test_suppression_kernels.py``.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def device():
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU (or TRITON_INTERPRET=1 with triton installed)")


def visit(boxes: Tensor, labels: Tensor, valid: Tensor, threshold: float) -> list[bool]:
    keep: list[bool] = []
    rows = boxes.double().tolist()
    for j in range(len(rows)):
        survives = bool(valid[j])
        for i in range(j):
            if survives and keep[i] and labels[i] == labels[j]:
                a, b = rows[i], rows[j]
                both = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
                union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
                survives = not both > threshold * union
        keep.append(survives)
    return keep


@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_kernels_are_the_visit_in_order(count, threshold):
    from dlx.suppression_kernels import greedy_keep_boxes

    generator = torch.Generator().manual_seed(count)
    corner = torch.randint(0, 24, (3, count, 2), generator=generator)
    size = torch.randint(4, 24, (3, count, 2), generator=generator)
    boxes = torch.cat([corner, corner + size], 2).float() / 64  # on a grid, where float32 is exact
    labels = torch.randint(1, 3, (3, count), generator=generator)
    valid = torch.rand(3, count, generator=generator) < 0.8
    found = greedy_keep_boxes(boxes.to(DEVICE), labels.to(DEVICE), valid.to(DEVICE), threshold)
    assert found.dtype == torch.bool
    expected = [visit(boxes[n], labels[n], valid[n], threshold) for n in range(3)]
    assert found.cpu().tolist() == expected
    assert count < 30 or 0 < sum(map(sum, expected)) < int(valid.sum())


def test_nothing_to_visit():
    from dlx.suppression_kernels import greedy_keep_boxes

    for images, count in ((0, 5), (2, 0)):
        boxes = torch.zeros(images, count, 4, device=DEVICE)
        labels = torch.zeros(images, count, dtype=torch.int64, device=DEVICE)
        assert greedy_keep_boxes(boxes, labels, labels > 0, 0.5).shape == (images, count)
