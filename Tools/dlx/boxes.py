"""Boxes on any device: formats, overlap, the encoding that detectors learn, and suppression of duplicates. Needs torch.

Boxes are "corners" (left, top, right, bottom) unless a name says otherwise; "centres" are (centre x, centre y, width,
height) and "sized" are (left, top, width, height), as COCO files have them. Everything keeps fixed shapes and waits for
no device, so it can be compiled, captured as a CUDA graph and exported.

N images, A anchors, M or K boxes of an image, D boxes that are given back.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = ("corners", "centres", "sized")
BLOCK = 32  # boxes of one block of the suppression that knows no early end


def convert(boxes: Tensor, source: str, target: str) -> Tensor:
    """Boxes (..., 4) of one of FORMATS in another. ValueError for a format that is none."""
    for name in (source, target):
        if name not in FORMATS:
            raise ValueError(f"box format {name!r} is none of {', '.join(FORMATS)}")
    if source == target:
        return boxes
    first, second = boxes[..., :2], boxes[..., 2:]
    if source == "centres":
        first, second = first - second / 2, first + second / 2
    elif source == "sized":
        second = first + second
    if target == "centres":
        first, second = (first + second) / 2, second - first
    elif target == "sized":
        second = second - first
    return torch.cat([first, second], dim=-1)


def to_centres(boxes: Tensor) -> Tensor:
    """Corners (..., 4) as centres."""
    return convert(boxes, "corners", "centres")


def to_corners(boxes: Tensor) -> Tensor:
    """Centres (..., 4) as corners."""
    return convert(boxes, "centres", "corners")


def flip(boxes: Tensor, width: float = 1.0, form: str = "corners") -> Tensor:
    """Mirrored left to right in a picture of this width; ``form`` is one of FORMATS, and the result has it, too."""
    left, top, right, bottom = convert(boxes, form, "corners").unbind(-1)
    return convert(torch.stack([width - right, top, width - left, bottom], dim=-1), "corners", form)


def clip(boxes: Tensor, width: float = 1.0, height: float = 1.0) -> Tensor:
    """Corners cut off at the borders of the picture."""
    x, y = boxes[..., 0::2].clamp(0.0, float(width)), boxes[..., 1::2].clamp(0.0, float(height))
    return torch.stack([x, y], dim=-1).flatten(-2)


def area(boxes: Tensor) -> Tensor:
    """Area of corners (..., 4), 0 for inverted ones."""
    size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0)
    return size[..., 0] * size[..., 1]


def _overlap(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Areas of intersection and union of every pair: (..., M, 4) and (..., K, 4) -> twice (..., M, K)."""
    a, b = first[..., :, None, :], second[..., None, :, :]
    # In place: with many pairs most of the time goes into fresh memory.
    width = torch.minimum(a[..., 2], b[..., 2]).sub_(torch.maximum(a[..., 0], b[..., 0])).clamp_(min=0)
    height = torch.minimum(a[..., 3], b[..., 3]).sub_(torch.maximum(a[..., 1], b[..., 1])).clamp_(min=0)
    intersection = width.mul_(height)
    return intersection, (area(first)[..., :, None] + area(second)[..., None, :]).sub_(intersection)


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of every pair: corners (..., M, 4) and (..., K, 4) -> (..., M, K); 0 of empty boxes."""
    intersection, union = _overlap(first, second)
    return torch.where(union > 0, intersection / union.clamp(min=torch.finfo(union.dtype).tiny), 0)


# ------------------------------------------------------------------------------------------- what a detector learns


def encode(boxes: Tensor, anchors: Tensor, variances: tuple[float, float] = (0.1, 0.2)) -> Tensor:
    """Offsets of boxes (corners) from their anchors (centres), as SSD learns them (Liu et al. 2016, equation 2).

    Shifts of the centre are in anchor sizes, changes of size are logarithms; both are divided by their variance.
    """
    centres = to_centres(boxes)
    shift = (centres[..., :2] - anchors[..., :2]) / anchors[..., 2:]
    scale = torch.log(centres[..., 2:] / anchors[..., 2:])
    return torch.cat([shift / variances[0], scale / variances[1]], dim=-1)


def decode(offsets: Tensor, anchors: Tensor, variances: tuple[float, float] = (0.1, 0.2)) -> Tensor:
    """The inverse of ``encode``: corners."""
    centre = anchors[..., :2] + offsets[..., :2] * variances[0] * anchors[..., 2:]
    half = torch.exp(offsets[..., 2:] * variances[1]) * anchors[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


# ------------------------------------------------------------------------------------------------------ suppression


class Kept(NamedTuple):
    """Boxes N D 4, scores N D, labels N D by falling score; from ``count`` (N) on a row holds zeros."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    count: Tensor


def greedy_keep(suppresses: Tensor, valid: Tensor) -> Tensor:
    """Which boxes survive when they are visited in order and each survivor removes those that it suppresses.

    ``suppresses`` (N, K, K) bool: [n, i, j] says that box i, if it survives, removes box j; looked at for i < j only.
    ``valid`` (N, K) bool: boxes that take part. Returns (N, K) bool.

    A survivor is a valid box that no earlier survivor suppresses: ``keep[j] = valid[j] and not any(keep[i] and
    suppresses[i, j], i < j)``. Since only i < j matter, exactly one vector solves this, the one that the visit in order
    finds. Applying the right side again and again gets there from any start: after t rounds the first t boxes are
    right, whatever the others, and so is every box whose chain of rivals is no longer than t. One round treats all
    boxes of all images at once, a few rounds suffice in practice, and a round that changes nothing proves the end.
    """
    index = torch.arange(valid.shape[1], device=valid.device)
    earlier = suppresses & (index[:, None] < index[None, :])
    if torch.compiler.is_exporting():
        return _keep_in_graph(earlier, valid)
    if torch.compiler.is_compiling() or (valid.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _keep_unrolled(earlier, valid)
    keep = valid
    while True:
        following = _round(earlier, valid, keep)
        if torch.equal(following, keep):
            return keep
        keep = following


def _round(earlier: Tensor, valid: Tensor, keep: Tensor) -> Tensor:
    return valid & ~(earlier & keep[:, :, None]).any(1)


def _keep_in_graph(earlier: Tensor, valid: Tensor) -> Tensor:
    """The rounds as a loop inside the exported graph."""
    from torch._higher_order_ops.while_loop import while_loop

    def goes_on(keep: Tensor, changed: Tensor) -> Tensor:
        return changed.any()

    def body(keep: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        following = _round(earlier, valid, keep)
        return following, (following != keep).any().reshape(1)

    return while_loop(goes_on, body, (valid.clone(), torch.ones_like(valid[:1, 0])))[0]


def _keep_unrolled(earlier: Tensor, valid: Tensor) -> Tensor:
    """A fixed number of operations, for CUDA graphs, where nothing may depend on values.

    The boxes go through in blocks. Within a block as many rounds as it has boxes always reach the solution; then its
    survivors remove what they suppress in all later blocks.
    """
    alive, kept = valid, []
    for start in range(0, valid.shape[1], BLOCK):
        rows = earlier[:, start : start + BLOCK]
        inside, candidates = rows[:, :, start : start + BLOCK], alive[:, start : start + BLOCK]
        keep = candidates
        for _ in range(candidates.shape[1] - 1):
            keep = _round(inside, candidates, keep)
        kept.append(keep)
        alive = alive & ~(rows & keep[:, :, None]).any(1)
    return torch.cat(kept, 1)


def batched_nms(
    boxes: Tensor, scores: Tensor, labels: Tensor, *, iou_threshold: float = 0.5, max_output: int = 200
) -> Kept:
    """Greedy non-maximum suppression of every class of every image at once.

    Corners N K 4, scores N K and integer labels N K; a box with a score of 0 or less (or NaN) takes no part. Boxes are
    visited by falling score, equal scores in the order given; a box goes when an earlier survivor of its image and
    label overlaps it by more than ``iou_threshold``. The first ``max_output`` survivors are given back. Memory and time
    grow linearly in N and with the square of K.
    """
    if boxes.shape[:2] != scores.shape or scores.shape != labels.shape or boxes.shape[2:] != (4,):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (boxes, scores, labels))
        raise ValueError(f"boxes, scores and labels must be N K 4, N K and N K, got {shapes}")
    scores = torch.where(scores > 0, scores, 0)
    # Labels are compared instead of moving each class to a place of its own, which would round the coordinates.
    if torch.compiler.is_exporting():  # ONNX has no stable sort; its TopK promises that of equal values the first leads
        scores, order = scores.topk(scores.shape[1], dim=1)
    else:
        scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
    boxes = boxes.gather(1, order[:, :, None].expand(-1, -1, 4))
    labels = labels.gather(1, order)
    if _kernels_apply(boxes):
        from .suppression_kernels import greedy_keep_boxes

        keep = greedy_keep_boxes(boxes, labels, scores > 0, iou_threshold)
    else:
        intersection, union = _overlap(boxes, boxes)
        suppresses = (intersection > iou_threshold * union) & (labels[:, :, None] == labels[:, None, :])
        keep = greedy_keep(suppresses, scores > 0)
    return _first(keep, boxes, scores, labels, max_output)


def _kernels_apply(boxes: Tensor) -> bool:
    """Whether the Triton kernels take these boxes; everywhere else plain PyTorch gives the same."""
    plain = torch.compiler.is_exporting() or torch.compiler.is_compiling()
    return boxes.is_cuda and boxes.dtype == torch.float32 and not plain and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _first(keep: Tensor, boxes: Tensor, scores: Tensor, labels: Tensor, max_output: int) -> Kept:
    """The first ``max_output`` kept rows moved to the front."""
    total = keep.shape[1]
    rank = torch.where(keep, torch.arange(total, 0, -1, device=keep.device), 0)
    chosen = rank.topk(min(max_output, total), dim=1)
    real = chosen.values > 0
    found = Kept(
        boxes.gather(1, chosen.indices[:, :, None].expand(-1, -1, 4)) * real[:, :, None],
        scores.gather(1, chosen.indices) * real,
        labels.gather(1, chosen.indices) * real,
        real.sum(1),
    )
    missing = max_output - total
    if missing <= 0:
        return found
    pad = torch.nn.functional.pad
    return Kept(
        pad(found.boxes, (0, 0, 0, missing)),
        pad(found.scores, (0, missing)),
        pad(found.labels, (0, missing)),
        found.count,
    )
