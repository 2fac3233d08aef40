"""The training objective of SSD (Liu et al. 2016, equations 1-3) with hard negative mining.

N images, M rows of objects (label 0: no object), A default boxes, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .matching import Targets, match

NEGATIVES = 3  # background boxes that count for each one with an object


class Losses(NamedTuple):
    """Means over the batch; ``total`` = ``box`` + ``category``."""

    total: Tensor
    box: Tensor
    category: Tensor


def multibox_loss(offsets: Tensor, logits: Tensor, targets: Targets) -> Losses:
    """Smooth L1 of the offsets plus cross entropy, per image divided by its matched boxes, then averaged over images.

    ``offsets`` N A 4, ``logits`` N A C+1. Of the background boxes of an image only the NEGATIVES times as many as
    matched ones with the largest cross entropy count. An image without a matched box contributes 0.
    """
    positive = targets.labels > 0
    count = positive.sum(1)
    distance = F.smooth_l1_loss(offsets.float(), targets.offsets.float(), reduction="none").sum(2)
    box = torch.where(positive, distance, 0).sum(1)
    entropy = F.cross_entropy(logits.float().flatten(0, 1), targets.labels.flatten(), reduction="none")
    entropy = entropy.view_as(positive)
    # The hardest k of an image are the first k of its sorted values; with the values at hand no ranks are needed.
    hardest = torch.where(positive, 0, entropy).sort(1, descending=True).values
    taken = torch.arange(positive.shape[1], device=positive.device) < NEGATIVES * count[:, None]
    category = torch.where(positive, entropy, 0).sum(1) + torch.where(taken, hardest, 0).sum(1)
    divisor = count.clamp(min=1)
    box, category = (box / divisor).mean(), (category / divisor).mean()
    return Losses(box + category, box, category)


class MultiboxLoss(nn.Module):
    """Match and compare: model outputs, boxes N M 4 (corners), labels N M -> Losses. ``anchors`` A 4 are centres."""

    def __init__(self, anchors: Tensor):
        super().__init__()
        self.register_buffer("anchors", anchors, persistent=False)

    def forward(self, outputs: tuple[Tensor, Tensor], boxes: Tensor, labels: Tensor) -> Losses:
        with torch.autocast(boxes.device.type, enabled=False):
            with torch.no_grad():
                targets = match(boxes, labels, self.anchors)
            return multibox_loss(*outputs, targets)
