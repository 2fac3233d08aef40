"""From a picture of any size to the network's square input, and from boxes there back to the picture's pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from dlx.inputs import IMAGENET_MEAN, IMAGENET_STD, Normalize
from dlx.vision import INTERPOLATIONS, ImageSource, decode_image

CROPS = ("whole", "centre")


@dataclass(frozen=True)
class Frame:
    """The part of a picture that the network sees, in pixels of the picture, and the picture's size."""

    left: float
    top: float
    width: float
    height: float
    picture: tuple[int, int]  # width, height

    @classmethod
    def of(cls, size: tuple[int, int], crop: str = "whole") -> Frame:
        """All of a picture of ``size`` (width, height), or its largest centred square."""
        width, height = size
        if crop == "whole":
            return cls(0.0, 0.0, float(width), float(height), size)
        side = min(width, height)
        return cls((width - side) / 2, (height - side) / 2, float(side), float(side), size)

    def to_pixels(self, boxes: np.ndarray) -> np.ndarray:
        """Corners (k, 4) in shares of the frame -> float32 corners in pixels of the picture, cut off at its borders."""
        scale = np.array([self.width, self.height] * 2)
        pixels = np.asarray(boxes, np.float64).reshape(-1, 4) * scale + np.array([self.left, self.top] * 2)
        return np.clip(pixels, 0, np.array(self.picture * 2)).astype(np.float32)


@dataclass(frozen=True)
class Preprocessing:
    """The frame of a picture (``crop``: whole or centre) scaled to ``size`` x ``size``, then normalised."""

    size: int = 300
    crop: str = "whole"
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        if self.crop not in CROPS:
            raise ValueError(f"crop {self.crop!r} is none of {', '.join(CROPS)}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation {self.interpolation!r} is none of {', '.join(INTERPOLATIONS)}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean and std need 3 values, std positive ones, got {self.mean} and {self.std}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """From a weights card or a checkpoint. Unknown keys are errors."""
        extra = sorted(set(values) - {entry.name for entry in fields(cls)})
        if extra:
            raise ValueError(f"preprocessing has no {', '.join(extra)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def normalize(self) -> Normalize:
        """The module that turns uint8 N 3 S S into the network's float input."""
        return Normalize(self.mean, self.std)

    def frame(self, size: tuple[int, int]) -> Frame:
        """What the network sees of a picture of ``size`` (width, height)."""
        return Frame.of(size, self.crop)

    def pixels(self, image: ImageSource) -> torch.Tensor:
        """uint8 (3, size, size) of a picture in any form."""
        picture = decode_image(image)
        frame = self.frame(picture.size)
        box = (frame.left, frame.top, frame.left + frame.width, frame.top + frame.height)
        resized = picture.resize((self.size, self.size), INTERPOLATIONS[self.interpolation], box=box)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()

    def __call__(self, image: ImageSource) -> torch.Tensor:
        """float32 (3, size, size), normalised."""
        return self.normalize()(self.pixels(image)[None])[0]
