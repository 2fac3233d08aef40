"""Sizes of pictures, as Python numbers where the graph knows them and as tensors where not."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

Size = tuple[Any, Any]


def size_of(image: tf.Tensor) -> Size:
    """(height, width) of [H, W, C]."""
    return _dimension(image, 0), _dimension(image, 1)


def as_floats(size: Size) -> tuple[tf.Tensor, tf.Tensor]:
    """Height and width as float32 scalars."""
    return tf.cast(size[0], tf.float32), tf.cast(size[1], tf.float32)


def present(*tensors: Any) -> tuple[Any, ...]:
    """Those that are not None: what a function returns."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def floats(image: Any) -> tf.Tensor:
    """The picture as float32, its values as they are."""
    return tf.cast(image, tf.float32)


def _dimension(image: tf.Tensor, axis: int) -> Any:
    known = image.shape[axis]
    return tf.shape(image)[axis] if known is None else known
