"""What a batch's padding needs: masks from lengths, and sequences turned around within their own length.

B batch, L length, C channels. No function here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """bool (B, size): true within each item's length."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def reverse_within(x: Tensor, lengths: Tensor) -> Tensor:
    """(B, L, C) with the first ``lengths[b]`` rows of each item in reverse order; padding stays where it is."""
    places = torch.arange(x.shape[1], device=x.device)[None]
    turned = lengths[:, None] - 1 - places
    source = torch.where(turned >= 0, turned, places)
    return x.gather(1, source[:, :, None].expand(-1, -1, x.shape[2]))
