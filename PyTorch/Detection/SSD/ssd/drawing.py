"""Detections drawn into the picture: a box in the colour of its class, and a caption that can be read on any ground."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from dlx.vision import best_font

LARGEST = 1600  # pixels of a drawn picture's longer side
SMALLEST = 400  # smaller pictures are enlarged, or captions would hide them


def class_colour(index: int) -> tuple[int, int, int]:
    """A strong colour for class 0, 1, 2 ...; neighbours differ much (golden-angle steps of hue)."""
    hue = (index * 0.381966 + 0.02) % 1.0
    value = (1.0, 0.8, 0.9)[index % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _ink(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever stands out (luma of Rec. 601)."""
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _scaled(image: Image.Image) -> tuple[Image.Image, float]:
    longer = max(image.size)
    factor = LARGEST / longer if longer > LARGEST else max(1.0, SMALLEST / longer)
    if factor == 1:
        return image.copy(), 1.0
    return image.resize([max(1, round(side * factor)) for side in image.size], Image.Resampling.BICUBIC), factor


def draw(image: Image.Image, boxes: np.ndarray, labels: Sequence[int], captions: Sequence[str]) -> Image.Image:
    """A copy of the picture with ``boxes`` (k, 4: corners in its pixels), one caption each; ``labels`` 1.. set colours.

    Very large pictures are reduced and very small ones enlarged. The most certain detection, the first, is drawn last.
    """
    if not len(boxes) == len(labels) == len(captions):
        raise ValueError(f"{len(boxes)} boxes, {len(labels)} labels and {len(captions)} captions")
    picture, factor = _scaled(image.convert("RGB"))
    pen = ImageDraw.Draw(picture)
    size = max(12, round(max(picture.size) / 45))
    line = max(2, size // 6)
    font = best_font(size, "".join(captions))
    entries = [
        (tuple(float(value) * factor for value in box), class_colour(int(label) - 1), caption)
        for box, label, caption in zip(boxes, labels, captions, strict=True)
    ]
    for (left, top, right, bottom), colour, _ in reversed(entries):
        right, bottom = max(right - 1, left), max(bottom - 1, top)
        # With an edge of the caption's ink, a red box also shows on a red object.
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=_ink(colour), width=line + 2)
        pen.rectangle((left, top, right, bottom), outline=colour, width=line)
    for (left, top, _, _), colour, caption in reversed(entries):  # no line may cross a caption
        _write(pen, picture.size, (left, top), caption, colour, font, size)
    return picture


def _write(pen, canvas: tuple[int, int], corner: tuple[float, float], caption: str, colour, font, size: int) -> None:
    """The caption on a plate above the box's left upper corner, moved into the picture where it would leave it."""
    margin = size // 5
    width, height = font.getlength(caption) + 2 * margin, round(size * 1.3)
    left = max(0.0, min(corner[0], canvas[0] - width))
    top = corner[1] - height if corner[1] >= height else corner[1]
    top = max(0.0, min(top, canvas[1] - height))
    pen.rectangle((left, top, left + width, top + height), fill=colour)
    pen.text((left + margin, top + height / 2), caption, fill=_ink(colour), font=font, anchor="lm")
