"""Triton kernels of greedy non-maximum suppression: who would remove whom as bit rows, then one visit in order.

N images, K boxes of an image sorted by falling score, W = ceil(K / 32) words of a bit row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # boxes whose bit rows a program makes


@triton.jit
def _rivals_kernel(boxes, labels, rows, threshold, K, W, ROWS: tl.constexpr):
    """rows[n, i, w]: bit b says that box i, if it survives, removes box 32 w + b."""
    image = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, 32)
    mine = image * K + i
    inside = i < K
    left = tl.load(boxes + mine * 4, mask=inside, other=0.0)
    top = tl.load(boxes + mine * 4 + 1, mask=inside, other=0.0)
    right = tl.load(boxes + mine * 4 + 2, mask=inside, other=0.0)
    bottom = tl.load(boxes + mine * 4 + 3, mask=inside, other=0.0)
    label = tl.load(labels + mine, mask=inside, other=-1)
    area = (right - left) * (bottom - top)
    for w in range(tl.program_id(1) * ROWS // 32, W):  # words before hold earlier boxes only
        j = w * 32 + b
        other = image * K + j
        present = j < K
        left_j = tl.load(boxes + other * 4, mask=present, other=0.0)
        top_j = tl.load(boxes + other * 4 + 1, mask=present, other=0.0)
        right_j = tl.load(boxes + other * 4 + 2, mask=present, other=0.0)
        bottom_j = tl.load(boxes + other * 4 + 3, mask=present, other=0.0)
        label_j = tl.load(labels + other, mask=present, other=-2)
        area_j = (right_j - left_j) * (bottom_j - top_j)
        width = tl.minimum(right[:, None], right_j[None, :]) - tl.maximum(left[:, None], left_j[None, :])
        height = tl.minimum(bottom[:, None], bottom_j[None, :]) - tl.maximum(top[:, None], top_j[None, :])
        both = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
        union = area[:, None] + area_j[None, :] - both
        removes = (both > threshold * union) & (label[:, None] == label_j[None, :]) & (i[:, None] < j[None, :])
        word = tl.sum(removes.to(tl.int32) << b[None, :], axis=1)
        tl.store(rows + mine * W + w, word, mask=inside)


@triton.jit
def _visit_kernel(rows, valid, keep, K, W, WORDS: tl.constexpr):
    """Visit the boxes of an image in order; a survivor clears the bits of those that it removes."""
    image = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WORDS)
    b = tl.arange(0, 32)
    j = w[:, None] * 32 + b[None, :]
    takes_part = tl.load(valid + image * K + j, mask=j < K, other=0) != 0
    alive = tl.sum(takes_part.to(tl.int32) << b[None, :], axis=1)
    for i in range(K):
        row = tl.load(rows + (image * K + i) * W + w, mask=(w < W) & (w >= i // 32), other=0)
        word = tl.sum(tl.where(w == i // 32, alive, 0), axis=0)
        survives = (word >> (i % 32)) & 1
        alive = tl.where(survives != 0, alive & ~row, alive)
    tl.store(keep + image * K + j, ((alive[:, None] >> b[None, :]) & 1).to(tl.int8), mask=j < K)


def greedy_keep_boxes(boxes: Tensor, labels: Tensor, valid: Tensor, iou_threshold: float) -> Tensor:
    """Which boxes survive: bool N K. Boxes float32 N K 4 by falling score, labels int64 N K, valid bool N K."""
    images, count = valid.shape
    words = triton.cdiv(count, 32)
    boxes, labels = boxes.contiguous(), labels.contiguous()
    keep = torch.empty_like(valid, dtype=torch.int8, memory_format=torch.contiguous_format)
    if not images or not count:
        return keep.bool()
    rows = torch.empty(images, count, words, dtype=torch.int32, device=boxes.device)
    grid = (images, triton.cdiv(count, ROWS))
    # Without fused multiply-adds, so that a box exactly at the threshold falls on the side that plain PyTorch says.
    _rivals_kernel[grid](boxes, labels, rows, iou_threshold, count, words, ROWS=ROWS, enable_fp_fusion=False)
    size = triton.next_power_of_2(words)
    _visit_kernel[(images,)](rows, valid.to(torch.int8), keep, count, words, WORDS=size, num_warps=1)
    return keep.bool()
