"""How a batch of pictures enters a network on the device: normalisation, and the stem's convolution.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """uint8 images (0-255) to float32 ``(x / 255 - mean) / std`` on whatever device they are; floats pass through."""

    def __init__(self, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD):
        super().__init__()
        scale = 1.0 / (255.0 * torch.tensor(std).view(1, -1, 1, 1))
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("offset", -torch.tensor(mean).view(1, -1, 1, 1) * 255.0 * scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images
        return torch.addcmul(self.offset, images.to(self.scale.dtype), self.scale)


class Stem:
    """7x7 stride-2 convolution whose three input channels are first folded into twelve.

    A GPU's matrix units want channels in multiples of eight; three are padded and waste most of the work. Moving each
    2x2 patch into channels turns the 7x7 stride-2 convolution over 3 channels into an identical 4x4 stride-1
    convolution over 12 (padded to 16). The parameter keeps its published 7x7 shape.
    """

    @staticmethod
    def applies(x: Tensor) -> bool:
        """On GPUs, for even sizes; exported graphs keep the plain convolution."""
        even = x.shape[1] == 3 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
        return x.is_cuda and even and not torch.compiler.is_exporting()

    @staticmethod
    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: N 3 H W (even H, W), weight: C 3 7 7 -> N C H/2 W/2."""
        # Row 2i + k - 3 of the input, k = 0..6, is row 2(i - 2 + q) + r with k + 1 = 2q + r: pad the kernel by one in
        # front to 8x8, then the same unshuffle orders both operands, with two blocks of padding before and one after.
        folded = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1, 0, 4))
        kernel = F.pad(F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2), (0, 0, 0, 0, 0, 4))
        return F.conv2d(
            folded.contiguous(memory_format=torch.channels_last),
            kernel.contiguous(memory_format=torch.channels_last),
            bias,
        )
