"""Where in a picture a training sample lies: zoom out, SSD's random crop and flip, as a function of their draws.

Liu et al., SSD: Single Shot MultiBox Detector, 2016, section 2.2 and the zoom-out of section 3.6. The outcome is one
cut: an integer box inside the picture, and the integer rectangle of the network's input that it is scaled to; what lies
around it there is filled with the mean colour. So both back ends do the same work on pixels, and boxes follow the same
map to the last digit. Differs from the paper: crops have sides of 30 to 100 % each (as NVIDIA's code, to which the area
of 10 % belongs, too), and if 50 tries find none, the whole picture is taken.

Legend: N samples, M boxes a sample (padded), T tries; picture coordinates in pixels, boxes left, top, right, bottom.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AUGMENTATIONS = ("none", "flip", "crop", "ssd")
MAX_ZOOM_OUT = 4.0
ZOOM_OUT_SHARE = 0.5
# Every sample draws one: the whole picture, or a crop that overlaps some box by at least this IoU (0: any crop).
WHOLE = -1.0
MIN_OVERLAPS = (WHOLE, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
MIN_SIDE = 0.3
MAX_ASPECT = 2.0
TRIES = 50
TRIES_AT_ONCE = 10
_FIXED = 6  # zoom out?, by how much, where (2), which crop, flip?
DRAWS = _FIXED + 4 * TRIES  # uniform in [0, 1), of each sample
EMPTY = 1e-6  # shares of the input; boxes must be larger


@dataclass(frozen=True)
class Cuts:
    """What is done to N pictures.

    `sources` (N, 4) int64: left, top, width, height in the picture; `targets` (N, 4) int64: the same in the size x size
    input, before the flip; `flips` (N,) bool; `windows` (N, 4) int64: left, top, width, height of the whole input in
    the picture, which it may exceed.
    """

    size: int
    sources: np.ndarray
    targets: np.ndarray
    flips: np.ndarray
    windows: np.ndarray


def whole(sizes: np.ndarray, size: int) -> Cuts:
    """All of each picture, scaled: evaluation's cut. `sizes` (N, 2): width, height."""
    sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
    sources = np.concatenate([np.zeros_like(sizes), sizes], 1)
    targets = np.tile(np.array([0, 0, size, size], np.int64), (len(sizes), 1))
    return Cuts(size, sources, targets, np.zeros(len(sizes), bool), sources)


def cuts(
    sizes: np.ndarray, boxes: np.ndarray, present: np.ndarray, values: np.ndarray, size: int, augmentation: str = "ssd"
) -> Cuts:
    """Cuts of N pictures of `sizes` (N, 2) with `boxes` (N, M, 4; where `present` (N, M)), from `values` (N, DRAWS).

    `augmentation`: "none", "flip", "crop" (and flip), "ssd" (zoom out first).
    """
    if augmentation not in AUGMENTATIONS:
        raise ValueError(f"augmentation {augmentation!r} is none of {', '.join(AUGMENTATIONS)}")
    if augmentation == "none":
        return whole(sizes, size)
    sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
    canvas = np.concatenate([np.zeros_like(sizes), sizes], 1)
    if augmentation == "ssd":
        canvas = _zoom_out(sizes, values)
    windows = canvas
    if augmentation != "flip":
        windows = _crop(canvas, sizes, boxes, present, values)
    sources, targets = _place(windows, sizes, size)
    return Cuts(size, sources, targets, values[:, 5] < 0.5, windows)


def _zoom_out(sizes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(N, 4): half of the pictures lie somewhere on a canvas with sides up to four times as long."""
    ratio = np.where(values[:, 0] < ZOOM_OUT_SHARE, 1 + (MAX_ZOOM_OUT - 1) * values[:, 1], 1.0)
    canvas = np.rint(sizes * ratio[:, None]).astype(np.int64)
    corner = -np.floor(values[:, 2:4] * (canvas - sizes + 1)).astype(np.int64)
    return np.concatenate([corner, canvas], 1)


def _crop(
    canvas: np.ndarray, sizes: np.ndarray, boxes: np.ndarray, present: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """(N, 4): of each canvas the first try that satisfies the sample's minimum overlap, else all of it."""
    least = np.array(MIN_OVERLAPS)[np.floor(values[:, 4] * len(MIN_OVERLAPS)).astype(np.int64)]
    windows = canvas.copy()
    left = np.flatnonzero((least != WHOLE) & present.any(1))
    for first in range(0, TRIES, TRIES_AT_ONCE):
        if not len(left):
            break
        columns = slice(_FIXED + 4 * first, _FIXED + 4 * (first + TRIES_AT_ONCE))
        drawn = values[left, columns].reshape(len(left), TRIES_AT_ONCE, 4)
        tries, shaped = _tries(canvas[left], drawn)
        good = shaped & _satisfied(tries, boxes[left], present[left], least[left])
        found = good.any(1)
        rows = np.flatnonzero(found)
        windows[left[rows]] = tries[rows, good[rows].argmax(1)]
        left = left[~found]
    return windows


def _tries(canvas: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, T, 4) windows, and (N, T) whether their shape, as the square input shows it, is within 1:2 and 2:1."""
    sides = MIN_SIDE + (1 - MIN_SIDE) * drawn[..., :2]
    whole_sides = canvas[:, None, 2:]
    shape = np.maximum(1, np.rint(sides * whole_sides)).astype(np.int64)
    corner = canvas[:, None, :2] + np.floor(drawn[..., 2:] * (whole_sides - shape + 1)).astype(np.int64)
    aspect = sides[..., 0] / sides[..., 1]
    return np.concatenate([corner, shape], 2), (aspect >= 1 / MAX_ASPECT) & (aspect <= MAX_ASPECT)


def _satisfied(tries: np.ndarray, boxes: np.ndarray, present: np.ndarray, least: np.ndarray) -> np.ndarray:
    """(N, T): whether a box overlaps the window by `least`, and the centre of a box is inside it."""
    windows = tries[:, :, None].astype(np.float64)
    low, high = windows[..., :2], windows[..., :2] + windows[..., 2:]
    starts, ends = boxes[:, None, :, :2], boxes[:, None, :, 2:]
    common = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None).prod(-1)
    union = (ends - starts).prod(-1) + windows[..., 2:].prod(-1) - common
    overlap = np.where(present[:, None], common / np.maximum(union, 1e-9), -1)
    centres = (starts + ends) / 2
    inside = ((centres >= low) & (centres < high)).all(-1) & present[:, None]
    return (overlap.max(-1) >= least[:, None]) & inside.any(-1)


def _place(windows: np.ndarray, sizes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of the picture in each window, and the rectangle of whole pixels of the input that it fills."""
    low = np.clip(windows[:, :2], 0, sizes - 1)
    high = np.maximum(np.minimum(windows[:, :2] + windows[:, 2:], sizes), low + 1)
    scale = size / windows[:, 2:]
    start = np.clip(np.rint((low - windows[:, :2]) * scale), 0, size - 1).astype(np.int64)
    end = np.rint((high - windows[:, :2]) * scale).astype(np.int64)
    end = np.clip(end, start + 1, size)
    return np.concatenate([low, high - low], 1), np.concatenate([start, end - start], 1)


def move_boxes(boxes: np.ndarray, present: np.ndarray, cut: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """Boxes (N, M, 4) of the pictures as float32 shares of the input, clipped to it, and which of them are left.

    A box stays if its centre is inside the input and something of it is visible; the others become zeros.
    """
    source, target = (values[:, None].astype(np.float64) for values in (cut.sources, cut.targets))
    scale = target[..., 2:] / source[..., 2:]
    corners = [(boxes[..., at : at + 2] - source[..., :2]) * scale + target[..., :2] for at in (0, 2)]
    moved = np.concatenate(corners, -1) / cut.size
    flipped = np.stack([1 - moved[..., 2], moved[..., 1], 1 - moved[..., 0], moved[..., 3]], -1)
    moved = np.where(cut.flips[:, None, None], flipped, moved)
    centres = (moved[..., :2] + moved[..., 2:]) / 2
    kept = present & ((centres >= 0) & (centres <= 1)).all(-1)
    moved = np.clip(moved, 0, 1).astype(np.float32)
    kept &= (moved[..., 2:] - moved[..., :2] > EMPTY).all(-1)
    return moved * kept[..., None], kept
