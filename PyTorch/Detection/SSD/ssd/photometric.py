"""Photometric distortion as one affine map of colours a sample: brightness, contrast, saturation and hue.

Saturation and hue scale and turn the chroma of YIQ, contrast stretches around mid-grey, brightness scales: what DALI's
color_twist does, so that one formula serves both back ends. Ranges are NVIDIA's, except hue: theirs, +-0.5 given to an
operator that reads degrees, changes nothing that can be seen; the +-18 here are the paper's code's.

Legend: N samples; colours 0 to 255; `values` uniform in [0, 1).
"""

from __future__ import annotations

import numpy as np
from PIL import Image

BRIGHTNESS = (0.875, 1.125)
CONTRAST = (0.5, 1.5)
SATURATION = (0.5, 1.5)
HUE = (-18.0, 18.0)  # degrees
DRAWS = 4
MIDDLE = 128.0
RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
YIQ_TO_RGB = np.linalg.inv(RGB_TO_YIQ)


def factors(values: np.ndarray) -> np.ndarray:
    """(N, 4) float32: brightness, contrast, saturation, hue from `values` (N, DRAWS)."""
    low, high = np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE]).T
    return (low + (high - low) * np.asarray(values)).astype(np.float32)


def unchanged(count: int) -> np.ndarray:
    """(N, 4) float32 factors that leave pictures as they are."""
    return np.tile(np.array([1, 1, 1, 0], np.float32), (count, 1))


def colour_maps(changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (N, 3, 3) and offsets (N,): colour -> matrix @ colour + offset, for `changes` (N, 4, see `factors`)."""
    brightness, contrast, saturation, hue = np.asarray(changes, np.float64).T
    angle = np.deg2rad(hue)
    turn = np.zeros((len(angle), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = saturation * np.cos(angle)
    turn[:, 1, 2] = saturation * np.sin(angle)
    turn[:, 2, 1] = -turn[:, 1, 2]
    matrices = (brightness * contrast)[:, None, None] * (YIQ_TO_RGB @ turn @ RGB_TO_YIQ)
    return matrices, brightness * MIDDLE * (1 - contrast)


def distort(pixels: np.ndarray, change: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) of one picture with its `change` (4,), rounded and limited to 0 to 255."""
    matrices, offsets = colour_maps(change[None])
    rows = np.column_stack([matrices[0], np.full(3, offsets[0])])
    # Pillow's own loop is seven times as fast as a product of matrices with a side of three.
    return np.asarray(Image.fromarray(pixels).convert("RGB", tuple(rows.ravel().tolist())))
