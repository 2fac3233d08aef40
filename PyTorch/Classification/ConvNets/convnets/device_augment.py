"""AutoAugment and random erasing on whole uint8 batches where they are, e.g. on the GPU behind DALI.

The same draws choose the same operations as in `augment`; each follows Pillow's arithmetic, exactly or to one level.
What to do comes from the host, so nothing waits for the device.

Legend: images uint8 (N, 3, H, W); K samples of one operation; level and sign float32 (K, 1, 1, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .augment import IMAGENET_POLICY, erase_boxes

FILL = 128.0


def auto_augment(images: Tensor, values: np.ndarray) -> Tensor:
    """A new tensor: to each sample the sub-policy is applied that its row of `values` (N, POLICY_DRAWS) picks."""
    chosen = (values[:, 0] * len(IMAGENET_POLICY)).astype(np.int64)
    images = images.clone()
    for stage in range(2):
        groups: dict[str, list[tuple[int, float, float]]] = {}
        for row, policy in enumerate(chosen):
            name, probability, level = IMAGENET_POLICY[policy][stage]
            if values[row, 1 + stage] < probability:
                groups.setdefault(name, []).append((row, level / 9, 1.0 if values[row, 3 + stage] < 0.5 else -1.0))
        if not groups:
            continue
        table = _upload(np.array([entry for group in groups.values() for entry in group], np.float32), images.device)
        first = 0
        for name, group in groups.items():
            part = table[first : first + len(group)]
            first += len(group)
            rows = part[:, 0].long()
            level, sign = (part[:, column].view(-1, 1, 1, 1) for column in (1, 2))
            images[rows] = OPERATIONS[name](images[rows], level, sign)
    return images


def erase(images: Tensor, values: np.ndarray) -> Tensor:
    """Black boxes in place, where `augment.erase_boxes` puts them for `values` (N, ERASE_DRAWS)."""
    height, width = images.shape[-2:]
    boxes = _upload(erase_boxes(width, height, values), images.device)
    left, top, box_width, box_height = (boxes[:, column : column + 1] for column in range(4))
    across, down = torch.arange(width, device=images.device), torch.arange(height, device=images.device)
    columns = ((across >= left) & (across < left + box_width))[:, None, None, :]
    rows = ((down >= top) & (down < top + box_height))[:, None, :, None]
    return images.masked_fill_(columns & rows, 0)


def _upload(values: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


# Operations on values


def _posterize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    step = torch.exp2((4 * level).round()).to(torch.int32)
    return (images - images.to(torch.int32) % step).to(torch.uint8)


def _solarize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return torch.where(images < (256 * (1 - level)).round(), images, 255 - images)


def _autocontrast(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    values = images.double()
    low, high = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    scale = 255.0 / (high - low).clamp(min=1)
    stretched = (values * scale + (-low * scale)).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def _equalize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    flat = images.flatten(2).long()  # (K, 3, H*W)
    counts = torch.zeros((*flat.shape[:2], 256), dtype=torch.long, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    # Pillow leaves the last filled bin out of the step.
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.gather(2, flat).to(torch.uint8).view_as(images)


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.to(torch.int32).unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).unsqueeze(1)


def _blend(base: Tensor, images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """base + factor (images - base), cut to 8 bits: Pillow's way to strengthen or weaken a property."""
    base = base.float()
    return (base + (1 + sign * 0.9 * level) * (images.float() - base)).clamp_(0, 255).to(torch.uint8)


def _color(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blend(_grey(images), images, level, sign)


def _contrast(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    mean = (_grey(images).double().mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images, level, sign)


def _sharpness(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    kernel = torch.ones((3, 1, 3, 3), device=images.device)
    kernel[:, :, 1, 1] = 5
    values = images.float()
    smooth = values.clone()
    if min(images.shape[-2:]) > 2:  # the rim stays as it is
        smooth[:, :, 1:-1, 1:-1] = (F.conv2d(values, kernel, groups=3) / 13 + 0.5).floor()
    return _blend(smooth, images, level, sign)


# Operations on places


def _sample(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Bilinear, `x` and `y` (K, H, W) in pixels from the outer corner; FILL outside the picture."""
    height, width = images.shape[-2:]
    grid = torch.stack([2 * x / width - 1, 2 * y / height - 1], -1)
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = ((x >= 0) & (x < width) & (y >= 0) & (y < height)).unsqueeze(1)
    return torch.where(inside, sampled, FILL).to(torch.uint8)


def _places(images: Tensor) -> tuple[Tensor, Tensor]:
    """Pixel centres relative to the picture's centre: (1, 1, W) and (1, H, 1)."""
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device) + 0.5 - width / 2
    y = torch.arange(height, device=images.device) + 0.5 - height / 2
    return x.view(1, 1, -1), y.view(1, -1, 1)


def _rotate(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    angle = (-sign * level * math.radians(30)).view(-1, 1, 1)
    x, y = _places(images)
    cosine, sine = angle.cos(), angle.sin()
    return _sample(images, cosine * x + sine * y + width / 2, cosine * y - sine * x + height / 2)


def _shear_x(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    x, y = _places(images)
    across = x + (sign * 0.3 * level).view(-1, 1, 1) * y + width / 2
    return _sample(images, across, (y + height / 2).expand_as(across))


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "shear_x": _shear_x,
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": _solarize,
    "color": _color,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": lambda images, level, sign: 255 - images,
}
