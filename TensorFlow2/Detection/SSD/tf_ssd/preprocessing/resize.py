"""Resizing of pictures and masks. Boxes and keypoints are fractions and do not change.

Functions return (picture, [masks], shape): the shape [3] is the picture's own, before any padding. With
`align_corners` the centres of the corner pixels stay where they are; without it the pictures' edges do (half-pixel
centres: what TensorFlow 2, Pillow and OpenCV do).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import parameters as p
from .cache import PreprocessorCache as Ids
from .draws import AnyCache, Draws, Seed
from .registry import step
from .shapes import present, size_of

__all__ = ["random_resize_method", "resize_image", "resize_to_min_dimension", "resize_to_range"]

METHODS = ("bilinear", "nearest", "bicubic", "area")  # a number is the place in this list, as in TensorFlow 1
METHOD = p.either(p.one_of(*METHODS), p.one_of(*range(len(METHODS))))
_SIZES = {"min_dimension": p.optional(p.whole()), "max_dimension": p.optional(p.whole())}


def resize(image: Any, size: Any, method: str | int = "bilinear", align_corners: bool = False) -> tf.Tensor:
    """[H, W, C] to [h, w, C] for size (h, w). float32, and with "nearest" the type of the picture."""
    image = tf.convert_to_tensor(image)
    name = METHODS[method] if isinstance(method, int) else method
    batch, size = tf.expand_dims(image, 0), tf.convert_to_tensor(size, tf.int32)
    if name == "area":
        return tf.squeeze(tf.raw_ops.ResizeArea(images=batch, size=size, align_corners=align_corners), 0)
    operation = {
        "bilinear": tf.raw_ops.ResizeBilinear,
        "nearest": tf.raw_ops.ResizeNearestNeighbor,
        "bicubic": tf.raw_ops.ResizeBicubic,
    }[name]
    resized = operation(images=batch, size=size, align_corners=align_corners, half_pixel_centers=not align_corners)
    return tf.squeeze(resized, 0)


def resize_masks(masks: Any, size: Any, align_corners: bool = False) -> tf.Tensor:
    """[N, H, W] to [N, h, w], nearest neighbour: no new values. N may be 0."""
    stacked = tf.convert_to_tensor(masks)[..., tf.newaxis]
    resized = tf.raw_ops.ResizeNearestNeighbor(
        images=stacked, size=tf.convert_to_tensor(size, tf.int32), align_corners=align_corners,
        half_pixel_centers=not align_corners,
    )  # fmt: skip
    return resized[..., 0]


@step(checks={"target_size": p.pair(p.whole())})
def random_resize_method(
    image: Any, target_size: Any, seed: Seed = None, preprocess_vars_cache: AnyCache = None
) -> tf.Tensor:
    """To `target_size` (height, width) by one of bilinear, nearest, bicubic and area, each as likely."""
    draws = Draws(Ids.RESIZE_METHOD, [target_size], seed, preprocess_vars_cache)
    image = tf.cast(image, tf.float32)
    chosen = tf.cast(draws.uniform("method") * len(METHODS), tf.int32)
    branches = [lambda method=method: resize(image, target_size, method) for method in METHODS]
    resized = tf.switch_case(chosen, branches)
    if not tf.is_tensor(target_size):
        resized.set_shape([*target_size, image.shape[2]])
    return resized


@step(
    checks=_SIZES
    | {
        "method": METHOD,
        "align_corners": p.flag,
        "pad_to_max_dimension": p.flag,
        "per_channel_pad_value": p.list_of(p.number()),
    }
)
def resize_to_range(
    image: Any, masks: Any = None, min_dimension: int | None = None, max_dimension: int | None = None,
    method: str | int = "bilinear", align_corners: bool = False, pad_to_max_dimension: bool = False,
    per_channel_pad_value: Any = (0, 0, 0),
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """The smaller side becomes `min_dimension`, unless the larger one would pass `max_dimension`, which it then has.

    The sides keep their ratio, rounded to whole pixels. With one limit only that one holds: `min_dimension` alone sets
    the smaller side, `max_dimension` alone shrinks pictures that are larger, neither leaves the size as it is.
    `pad_to_max_dimension` fills up to a square of `max_dimension` at the bottom and right with `per_channel_pad_value`
    (masks with 0); boxes then still are fractions of the picture without the padding.
    """
    image = tf.convert_to_tensor(image)
    if pad_to_max_dimension and max_dimension is None:
        raise ValueError("resize_to_range: pad_to_max_dimension needs max_dimension")
    size = _size_in_range(tf.cast(tf.stack(size_of(image)), tf.int64), min_dimension, max_dimension)
    resized = resize(image, size, method, align_corners)
    shape = tf.concat([size, tf.shape(image)[2:]], 0)
    resized_masks = None if masks is None else resize_masks(masks, size, align_corners)
    if pad_to_max_dimension:
        resized = _pad_to_square(resized, max_dimension, per_channel_pad_value)
        if resized_masks is not None:
            free = max_dimension - size
            resized_masks = tf.pad(resized_masks, [[0, 0], [0, free[0]], [0, free[1]]])
            resized_masks.set_shape([None, max_dimension, max_dimension])
    return present(resized, resized_masks, shape)


def _size_in_range(sides: tf.Tensor, min_dimension: int | None, max_dimension: int | None) -> tf.Tensor:
    """[2] int32. In whole numbers: floats round some halves the wrong way, up to a pixel more than the maximum."""
    one = tf.constant(1, tf.int64)
    above, below = (one, one) if min_dimension is None else (min_dimension * one, tf.reduce_min(sides))
    if max_dimension is not None:
        longest = tf.reduce_max(sides)
        limited = max_dimension * below < above * longest
        above, below = tf.where(limited, max_dimension * one, above), tf.where(limited, longest, below)
    quotient, rest = sides * above // below, sides * above % below
    upward = (2 * rest > below) | ((2 * rest == below) & (quotient % 2 == 1))  # halves to the even number
    return tf.cast(tf.maximum(quotient + tf.cast(upward, tf.int64), 1), tf.int32)


def _pad_to_square(image: tf.Tensor, side: int | None, values: Any) -> tf.Tensor:
    channels = image.shape[2]
    if channels is not None and len(values) != channels:
        raise ValueError(
            f"resize_to_range: per_channel_pad_value must have a value for each of {channels} channels, got {values!r}"
        )
    height, width = size_of(image)
    colour = tf.cast(tf.convert_to_tensor(values), image.dtype)
    image = tf.concat([image, tf.broadcast_to(colour, [height, side - width, len(values)])], 1)
    image = tf.concat([image, tf.broadcast_to(colour, [side - height, side, len(values)])], 0)
    image.set_shape([side, side, channels])
    return image


@step(checks={"min_dimension": p.whole(), "method": METHOD})
def resize_to_min_dimension(
    image: Any, masks: Any = None, min_dimension: int = 600, method: str | int = "bilinear"
) -> tuple[tf.Tensor, ...]:
    """Enlarge pictures whose smaller side is below `min_dimension` until it is that; others keep their size.

    The other side is cut to whole pixels. Corners stay corners.
    """
    image = tf.convert_to_tensor(image)
    sides = tf.cast(tf.stack(size_of(image)), tf.int64)
    smallest = tf.reduce_min(sides)
    size = tf.cast(sides * tf.maximum(smallest, min_dimension) // smallest, tf.int32)  # whole numbers: never 599
    resized = resize(image, size, method, align_corners=True)
    resized_masks = None if masks is None else resize_masks(masks, size, align_corners=True)
    return present(resized, resized_masks, tf.concat([size, tf.shape(image)[2:]], 0))


@step(checks={"new_height": p.whole(), "new_width": p.whole(), "method": METHOD, "align_corners": p.flag})
def resize_image(
    image: Any, masks: Any = None, new_height: int = 600, new_width: int = 1024, method: str | int = "bilinear",
    align_corners: bool = True,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """To `new_height` x `new_width`, whatever the ratio of the sides."""
    image = tf.convert_to_tensor(image)
    size = [new_height, new_width]
    resized = resize(image, size, method, align_corners)
    resized_masks = None if masks is None else resize_masks(masks, size, align_corners)
    return present(resized, resized_masks, tf.concat([size, tf.shape(image)[2:]], 0))
