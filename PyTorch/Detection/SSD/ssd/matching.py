"""Which default box learns which object (Liu et al. 2016, section 2.2, matching strategy), for a whole batch at once.

N images, M rows of objects (label 0: no object), A default boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlx.boxes import encode, iou, to_corners

THRESHOLD = 0.5


class Targets(NamedTuple):
    """``offsets`` N A 4 to the matched object (meaningless where ``labels`` N A is 0, the background)."""

    offsets: Tensor
    labels: Tensor


def assign(boxes: Tensor, labels: Tensor, anchors: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """The row of the object that each default box is matched with, or -1: int64 N A.

    ``boxes`` float32 N M 4 and ``anchors`` A 4 are corners. Every object gets the default box that overlaps it most
    (of equal ones the first); where several objects want the same one it goes to the one with the largest overlap,
    of equal ones the first. All other default boxes take the object that they overlap most, above ``threshold``.
    """
    overlap = torch.where(labels[:, :, None] > 0, iou(boxes, anchors.expand(len(boxes), -1, -1)), -1.0)
    best = overlap.argmax(2, keepdim=True)
    wanted = torch.zeros_like(overlap, dtype=torch.bool).scatter(2, best, True) & (labels[:, :, None] > 0)
    value, row = torch.where(wanted, overlap + 2, overlap).max(1)
    return torch.where(value > threshold, row, -1)


def match(boxes: Tensor, labels: Tensor, anchors: Tensor, threshold: float = THRESHOLD) -> Targets:
    """Targets of a batch; ``anchors`` A 4 are centres here."""
    row = assign(boxes, labels, to_corners(anchors), threshold)
    chosen = row.clamp(min=0)
    matched = boxes.gather(1, chosen[:, :, None].expand(-1, -1, 4))
    # Padding has no size, whose logarithm would be infinite: such places take the default box itself.
    matched = torch.where((row >= 0)[:, :, None], matched, to_corners(anchors))
    return Targets(encode(matched, anchors), torch.where(row >= 0, labels.gather(1, chosen), 0))
