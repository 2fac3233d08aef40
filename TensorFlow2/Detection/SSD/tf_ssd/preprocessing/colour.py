"""Colours: brightness, contrast, hue, saturation, their mixtures, grey, noise and black patches.

Pictures are [H, W, 3] with values 0 to 255 and come back as float32, cut off at 0 and 255. Boxes do not change. The
known functions divide by 255, change the colours and multiply by 255; here the factor is in the parameters, which gives
the same values without two passes over the picture.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import parameters as p
from .cache import PreprocessorCache as Ids
from .draws import AnyCache, Draws, Seed
from .registry import step
from .shapes import floats, size_of

__all__ = [
    "random_adjust_brightness", "random_adjust_contrast", "random_adjust_hue", "random_adjust_saturation",
    "random_black_patches", "random_distort_color", "random_pixel_value_scale", "random_rgb_to_gray", "rgb_to_gray",
]  # fmt: skip

GREY_WEIGHTS = (0.2989, 0.587, 0.114)  # ITU-R BT.601
MAX = 255.0


@step(checks={"minval": p.number(0), "maxval": p.number(0)}, ordered=[("minval", "maxval")])
def random_pixel_value_scale(
    image: Any, minval: float = 0.9, maxval: float = 1.1, seed: Seed = None, preprocess_vars_cache: AnyCache = None
) -> tf.Tensor:
    """Multiply every value by a factor of its own in [minval, maxval). A cached field is resized to another picture."""
    image = floats(image)
    draws = Draws(Ids.PIXEL_VALUE_SCALE, [minval, maxval, image.shape[2]], seed, preprocess_vars_cache)
    noise = draws.remember("noise", lambda: draws.fresh_uniform("noise", tf.shape(image)))
    if preprocess_vars_cache is not None:  # nearest: averages of the noise would be weaker noise
        noise = tf.raw_ops.ResizeNearestNeighbor(
            images=noise[tf.newaxis], size=tf.stack(size_of(image)), half_pixel_centers=True
        )[0]
    return _clip(image * (minval + noise * (maxval - minval)))


@step(checks={"probability": p.fraction})
def random_rgb_to_gray(
    image: Any, probability: float = 0.1, seed: Seed = None, preprocess_vars_cache: AnyCache = None
) -> tf.Tensor:
    """Grey in three equal channels if u <= probability; 0 means never."""
    image = floats(image)
    draws = Draws(Ids.RGB_TO_GRAY, [probability], seed, preprocess_vars_cache)
    _three_channels(image, "grey")
    grey = (draws.uniform("grey") <= probability) & (probability > 0)
    return tf.cond(grey, lambda: _grey(image), lambda: tf.identity(image))


@step()
def rgb_to_gray(image: Any) -> tf.Tensor:
    """[H, W, 3] to one channel, [H, W, 1]."""
    red, green, blue = tf.unstack(_three_channels(floats(image), "grey"), 3, axis=2)
    return tf.expand_dims(red * GREY_WEIGHTS[0] + green * GREY_WEIGHTS[1] + blue * GREY_WEIGHTS[2], 2)


@step(checks={"max_delta": p.fraction})
def random_adjust_brightness(
    image: Any, max_delta: float = 0.2, seed: Seed = None, preprocess_vars_cache: AnyCache = None
) -> tf.Tensor:
    """Add one number to all values, up to `max_delta` of the full range in either direction."""
    return _brightness(floats(image), max_delta, _draws(Ids.ADJUST_BRIGHTNESS, seed, preprocess_vars_cache, max_delta))


@step(checks={"min_delta": p.number(0), "max_delta": p.number(0)}, ordered=[("min_delta", "max_delta")])
def random_adjust_contrast(
    image: Any, min_delta: float = 0.8, max_delta: float = 1.25, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tf.Tensor:  # fmt: skip
    """Multiply the distance from each channel's mean by a factor in [min_delta, max_delta)."""
    draws = _draws(Ids.ADJUST_CONTRAST, seed, preprocess_vars_cache, min_delta, max_delta)
    return _contrast(floats(image), min_delta, max_delta, draws)


@step(checks={"max_delta": p.number(0, 0.5)})
def random_adjust_hue(
    image: Any, max_delta: float = 0.02, seed: Seed = None, preprocess_vars_cache: AnyCache = None
) -> tf.Tensor:
    """Turn the hue by up to `max_delta` of the full circle in either direction."""
    draws = _draws(Ids.ADJUST_HUE, seed, preprocess_vars_cache, max_delta)
    return _clip(_change_hsv(floats(image), turn=_turn(draws, max_delta)))


@step(checks={"min_delta": p.number(0), "max_delta": p.number(0)}, ordered=[("min_delta", "max_delta")])
def random_adjust_saturation(
    image: Any, min_delta: float = 0.8, max_delta: float = 1.25, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tf.Tensor:  # fmt: skip
    """Multiply the saturation by a factor in [min_delta, max_delta)."""
    draws = _draws(Ids.ADJUST_SATURATION, seed, preprocess_vars_cache, min_delta, max_delta)
    return _clip(_change_hsv(floats(image), factor=_factor(draws, min_delta, max_delta)))


@step(checks={"color_ordering": p.one_of(0, 1)})
def random_distort_color(
    image: Any, color_ordering: int = 0, seed: Seed = None, preprocess_vars_cache: AnyCache = None
) -> tf.Tensor:
    """All four: 0 = brightness, saturation, hue, contrast; 1 = brightness, contrast, saturation, hue.

    Brightness up to 32/255, saturation and contrast 0.5 to 1.5, hue up to 0.2.
    """
    draws = _draws(Ids.DISTORT_COLOR, seed, preprocess_vars_cache, color_ordering)

    def part(function_id: str) -> Draws:
        return draws.inner(function_id, "distort")

    image = _brightness(floats(image), 32 / 255, part(Ids.ADJUST_BRIGHTNESS))
    if color_ordering == 1:
        image = _contrast(image, 0.5, 1.5, part(Ids.ADJUST_CONTRAST))
    factor, turn = _factor(part(Ids.ADJUST_SATURATION), 0.5, 1.5), _turn(part(Ids.ADJUST_HUE), 0.2)
    image = _clip(_change_hsv(image, factor, turn))
    return _contrast(image, 0.5, 1.5, part(Ids.ADJUST_CONTRAST)) if color_ordering == 0 else image


@step(
    checks={
        "max_black_patches": p.whole(0),
        "probability": p.fraction,
        "size_to_image_ratio": p.number(above=0, high=1),
    }
)
def random_black_patches(
    image: Any, max_black_patches: int = 10, probability: float = 0.5, size_to_image_ratio: float = 0.1,
    random_seed: Seed = None, preprocess_vars_cache: AnyCache = None,
) -> tf.Tensor:  # fmt: skip
    """Up to `max_black_patches` black squares, each drawn if u <= probability, anywhere inside [H, W, 3].

    A square's side is `size_to_image_ratio` of the picture's smaller side, in whole pixels.
    """
    image = _three_channels(floats(image), "random_black_patches")
    if not max_black_patches or not probability:
        return image
    height, width = size_of(image)
    shortest = tf.cast(tf.minimum(height, width), tf.float32)
    side = tf.cast(shortest * size_to_image_ratio + 1e-4, tf.int32)  # 0.1 * 30 is 3, also in float32
    numbers = [max_black_patches, probability, size_to_image_ratio]
    drawn = _draws(Ids.BLACK_PATCHES, random_seed, preprocess_vars_cache, *numbers)
    place = _draws(Ids.ADD_BLACK_PATCH, random_seed, preprocess_vars_cache, *numbers)
    active = drawn.uniform("drawn", [max_black_patches]) <= probability

    def stripes(name: str, length: Any) -> tf.Tensor:
        """[patches, length]: which rows, or columns, each patch has."""
        free = tf.cast(length - side + 1, tf.float32)
        start = tf.cast(place.uniform(name, [max_black_patches]) * free, tf.int32)[:, tf.newaxis]
        at = tf.range(length)
        return tf.cast((at >= start) & (at < start + side) & active[:, tf.newaxis], tf.float32)

    patches = tf.matmul(stripes("y", height), stripes("x", width), transpose_a=True)  # how many lie on each pixel
    return image * tf.cast(patches < 0.5, tf.float32)[..., tf.newaxis]


# ------------------------------------------------------------------------------------------ one change of the colours


def _brightness(image: tf.Tensor, max_delta: float, draws: Draws) -> tf.Tensor:
    return _clip(image + MAX * draws.between("delta", -max_delta, max_delta))


def _contrast(image: tf.Tensor, low: float, high: float, draws: Draws) -> tf.Tensor:
    return _clip(tf.image.adjust_contrast(image, _factor(draws, low, high)))


def _factor(draws: Draws, low: float, high: float) -> tf.Tensor:
    return draws.between("factor", low, high)


def _turn(draws: Draws, max_delta: float) -> tf.Tensor:
    return draws.between("delta", -max_delta, max_delta)


def _change_hsv(image: tf.Tensor, factor: tf.Tensor | None = None, turn: tf.Tensor | None = None) -> tf.Tensor:
    """Saturation times `factor` (at most 1 comes out), hue plus `turn` of a circle; the value, max(R, G, B), stays.

    With C = max - min, a channel is max - C w, where w depends on the hue alone: 0 near the channel's own colour, 1
    opposite to it, straight between. Saturation is C / max. So both changes are arithmetic on whole planes, several
    times faster than tf.image's operations, which convert pixel by pixel.
    """
    planes = tf.transpose(_three_channels(image, "a change of hue or saturation"), [2, 0, 1])
    red, green, blue = tf.unstack(planes, 3)
    value = tf.maximum(tf.maximum(red, green), blue)
    chroma = value - tf.minimum(tf.minimum(red, green), blue)
    reciprocal = 1.0 / tf.maximum(chroma, 1e-6)
    share = None if factor is None else tf.minimum(factor, value * reciprocal)
    if turn is None:
        return tf.transpose(value - (value - planes) * share, [1, 2, 0])
    sixth = tf.where(
        value <= red,
        (green - blue) * reciprocal,
        tf.where(value <= green, (blue - red) * reciprocal + 2.0, (red - green) * reciprocal + 4.0),
    )
    circle = (sixth + tf.constant([5.0, 3.0, 1.0])[:, tf.newaxis, tf.newaxis]) / 6.0 + turn
    place = 6.0 * (circle - tf.floor(circle))
    weight = tf.clip_by_value(tf.minimum(place, 4.0 - place), 0.0, 1.0)
    chroma = chroma if share is None else chroma * share
    return tf.transpose(value - chroma * weight, [1, 2, 0])


def _draws(function_id: str, seed: Seed, cache: AnyCache, *numbers: Any) -> Draws:
    return Draws(function_id, numbers, seed, cache)


def _grey(image: tf.Tensor) -> tf.Tensor:
    """Three equal channels, by one small matrix product."""
    matrix = tf.tile(tf.constant(GREY_WEIGHTS)[:, tf.newaxis], [1, 3])
    return tf.reshape(tf.matmul(tf.reshape(image, [-1, 3]), matrix), tf.shape(image))


def _three_channels(image: tf.Tensor, what: str) -> tf.Tensor:
    if image.shape[2] not in (3, None):
        raise ValueError(f"{what} needs a picture of three channels, got the shape {image.shape}")
    return image


def _clip(image: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(image, 0.0, MAX)
