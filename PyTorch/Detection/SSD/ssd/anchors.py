"""Default boxes of SSD (Liu et al. 2016, section 2.2) for pictures of any size, 8732 of them at 300 pixels.

Six feature maps; a cell of one has 4 or 6 boxes: a square of the map's scale, one of the geometric mean with the next
scale, and a wide and a tall one for each aspect ratio. Order: map, row, column, box of the cell, which is that of the
heads' output in channels_last memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

REFERENCE = 300  # pixels for which the scales are given; other sizes take the same shares of the picture
SCALES = (21, 45, 99, 153, 207, 261, 315)
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
PER_CELL = tuple(2 + 2 * len(ratios) for ratios in RATIOS)
HALVED = 4  # maps reached by strides of two from the picture; the last two come from unpadded 3x3 convolutions
FIRST_STRIDE = 8
MINIMUM = 257  # below, nothing would be left for the last map


def feature_sizes(image_size: int) -> tuple[int, ...]:
    """Sides of the six maps: 38, 19, 10, 5, 3, 1 at 300. ValueError for pictures that are too small."""
    if image_size < MINIMUM:
        raise ValueError(f"image_size must be at least {MINIMUM} (six feature maps need that many), got {image_size}")
    sizes = [math.ceil(image_size / (FIRST_STRIDE * 2**level)) for level in range(HALVED)]
    return (*sizes, sizes[-1] - 2, sizes[-1] - 4)


def default_boxes(image_size: int = REFERENCE) -> Tensor:
    """Centres (A, 4) in shares of the picture, each number limited to 0..1 as in NVIDIA's training: float32."""
    maps = []
    for level, side in enumerate(feature_sizes(image_size)):
        # Of a padded map a cell is exactly one stride wide, so its last cells reach beyond the picture.
        cell = FIRST_STRIDE * 2**level / image_size if level < HALVED else 1 / side
        scale, following = SCALES[level] / REFERENCE, SCALES[level + 1] / REFERENCE
        shapes = [(scale, scale), (math.sqrt(scale * following),) * 2]
        for ratio in RATIOS[level]:
            long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            shapes += [(long, short), (short, long)]
        middle = (torch.arange(side, dtype=torch.float64) + 0.5) * cell
        size = torch.tensor(shapes, dtype=torch.float64)
        boxes = torch.empty(side, side, len(shapes), 4, dtype=torch.float64)
        boxes[..., 0], boxes[..., 1] = middle[None, :, None], middle[:, None, None]
        boxes[..., 2:] = size
        maps.append(boxes.view(-1, 4))
    return torch.cat(maps).clamp(0, 1).float()
