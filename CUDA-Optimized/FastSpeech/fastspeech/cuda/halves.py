"""bfloat16 in numpy, which has none: as uint16 with the same bits."""

from __future__ import annotations

import numpy as np


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 as the bits of bfloat16, rounded to the nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 of bfloat16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
