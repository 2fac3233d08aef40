"""From model outputs to detections: class probabilities, decoded boxes, suppression of duplicates; all of fixed shape.

N images, A default boxes, C classes without the background, K candidates of an image, D detections of an image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlx.boxes import Kept, batched_nms, clip, decode

from .anchors import default_boxes
from .preprocessing import Frame


class Detect(nn.Module):
    """Offsets N A 4 and logits N A C+1 -> Kept(boxes N D 4, scores N D, labels N D, count N).

    Boxes are corners in shares of the network's input, labels 1..C. A class of an image enters the suppression with
    its ``per_class`` best boxes above ``score_threshold``, an image with its ``candidates`` best of all classes.
    """

    def __init__(
        self,
        anchors: Tensor,
        *,
        score_threshold: float = 0.05,
        iou_threshold: float = 0.5,
        max_detections: int = 200,
        per_class: int = 200,
        candidates: int = 512,
    ):
        super().__init__()
        self.register_buffer("anchors", anchors, persistent=False)
        self.score_threshold, self.iou_threshold = score_threshold, iou_threshold
        self.max_detections, self.per_class, self.candidates = max_detections, per_class, candidates

    def settings(self) -> dict[str, float]:
        """What decides about detections besides the network, for the metadata of an exported model."""
        names = ("score_threshold", "iou_threshold", "max_detections", "per_class", "candidates")
        return {name: getattr(self, name) for name in names}

    def select(self, offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The candidates: corners N K 4, scores N K (0: none), labels N K."""
        scores = logits.float().softmax(2)[:, :, 1:].transpose(1, 2)
        scores, place = scores.topk(min(self.per_class, scores.shape[2]), dim=2)
        each = scores.shape[2]
        scores, flat = scores.flatten(1).topk(min(self.candidates, scores.shape[1] * each), dim=1)
        labels = torch.div(flat, each, rounding_mode="floor") + 1
        place = place.flatten(1).gather(1, flat)
        offsets = offsets.float().gather(1, place[:, :, None].expand(-1, -1, 4))
        boxes = clip(decode(offsets, self.anchors[place]))
        inside = ((boxes[:, :, 2:] - boxes[:, :, :2]) > 0).all(2)
        return boxes, torch.where((scores > self.score_threshold) & inside, scores, 0), labels

    def forward(self, offsets: Tensor, logits: Tensor) -> Kept:
        with torch.autocast(offsets.device.type, enabled=False):
            boxes, scores, labels = self.select(offsets, logits)
            return batched_nms(boxes, scores, labels, iou_threshold=self.iou_threshold, max_output=self.max_detections)


class DetectionModel(nn.Module):
    """A trained SSD with its ``Detect``: normalised images N 3 S S -> Kept."""

    def __init__(self, model: nn.Module, image_size: int, **options: Any):
        super().__init__()
        self.model = model
        self.detect = Detect(default_boxes(image_size), **options)

    def forward(self, images: Tensor) -> Kept:
        return self.detect(*self.model(images))


def unpad(found: Kept) -> list[dict[str, np.ndarray]]:
    """Per image its detections alone: boxes float32 (k, 4), scores float32 (k,), labels int64 (k,)."""
    boxes, scores = found.boxes.float().cpu().numpy(), found.scores.float().cpu().numpy()
    labels, counts = found.labels.long().cpu().numpy(), found.count.tolist()
    return [
        {"boxes": boxes[index, :count], "scores": scores[index, :count], "labels": labels[index, :count]}
        for index, count in enumerate(counts)
    ]


def to_pixels(detections: dict[str, np.ndarray], frame: Frame) -> dict[str, np.ndarray]:
    """Detections in shares of the network's input as corners in pixels of the original picture, within it."""
    return detections | {"boxes": frame.to_pixels(detections["boxes"])}
