"""A store of random draws, so that a second picture can be augmented exactly as the first one was.

    cache = PreprocessorCache()
    left = preprocess(left, steps, preprocess_vars_cache=cache, seed=7)
    right = preprocess(right, steps, preprocess_vars_cache=cache)      # the same flips, crops and colours

What is kept is normalised (fractions of the picture, uniforms in 0..1), so the second picture may have another size.
A draw is kept under the function, the step's position in the list, the parameters that it was made with and its own
name: two brightness steps in one list are two draws, and a step with another range is another step.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

__all__ = ["PreprocessorCache", "StepCache"]


class PreprocessorCache:
    """Draws by function id and key: `get`, `update`, `clear`. Ids that are not listed here are ValueErrors."""

    ROTATION90 = "rotation90"
    HORIZONTAL_FLIP = "horizontal_flip"
    VERTICAL_FLIP = "vertical_flip"
    PIXEL_VALUE_SCALE = "pixel_value_scale"
    IMAGE_SCALE = "image_scale"
    RGB_TO_GRAY = "rgb_to_gray"
    ADJUST_BRIGHTNESS = "adjust_brightness"
    ADJUST_CONTRAST = "adjust_contrast"
    ADJUST_HUE = "adjust_hue"
    ADJUST_SATURATION = "adjust_saturation"
    DISTORT_COLOR = "distort_color"
    STRICT_CROP_IMAGE = "strict_crop_image"
    CROP_IMAGE = "crop_image"
    PAD_IMAGE = "pad_image"
    CROP_TO_ASPECT_RATIO = "crop_to_aspect_ratio"
    RESIZE_METHOD = "resize_method"
    PAD_TO_ASPECT_RATIO = "pad_to_aspect_ratio"
    BLACK_PATCHES = "black_patches"
    ADD_BLACK_PATCH = "add_black_patch"
    SELECTOR = "selector"
    SELECTOR_TUPLES = "selector_tuples"
    SSD_CROP_SELECTOR_ID = "ssd_crop_selector_id"
    SSD_CROP_PAD_SELECTOR_ID = "ssd_crop_pad_selector_id"

    def __init__(self) -> None:
        self._draws: dict[str, dict[Hashable, Any]] = {}

    def clear(self) -> None:
        """Forget every draw."""
        self._draws.clear()

    def get(self, function_id: str, key: Hashable) -> Any:
        """The draw kept under (function_id, key), or None. Asking leaves no trace.

        ValueError for an unknown id, and for a draw that belongs to another traced function: such a tensor cannot be
        used here, and a new draw in its place would break the pair without a word.
        """
        value = self._draws.get(_known(function_id), {}).get(key)
        if value is not None and not _usable(value):
            raise ValueError(
                f"the draw {function_id!r} {key!r} in the cache belongs to another traced tf.function or dataset; "
                f"make the cache inside the function that augments the pair, or call clear() first"
            )
        return value

    def update(self, function_id: str, key: Hashable, value: Any) -> None:
        """Keep a draw; one under the same key is replaced. ValueError for an unknown id."""
        self._draws.setdefault(_known(function_id), {})[key] = value

    def __len__(self) -> int:
        return sum(len(draws) for draws in self._draws.values())


class StepCache:
    """The view that one step of a list has of a cache: the same calls, with the step's position in every key."""

    def __init__(self, cache: PreprocessorCache, position: int) -> None:
        self._cache, self._position = cache, position

    def get(self, function_id: str, key: Hashable) -> Any:
        return self._cache.get(function_id, (self._position, key))

    def update(self, function_id: str, key: Hashable, value: Any) -> None:
        self._cache.update(function_id, (self._position, key), value)


IDS = tuple(value for name, value in vars(PreprocessorCache).items() if name.isupper())


def _known(function_id: str) -> str:
    if function_id not in IDS:
        raise ValueError(f"unknown function id {function_id!r}; known: {', '.join(IDS)}")
    return function_id


def _usable(value: Any) -> bool:
    """Whether a tensor can be read in the graph that is being built (or eagerly, if none is)."""
    if not tf.is_symbolic_tensor(value):
        return True
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not value.graph:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None
