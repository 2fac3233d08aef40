"""Flips, quarter turns and a random scale: boxes, masks and keypoints move with the picture.

Functions return a tuple of what they were given: the picture, then boxes, masks and keypoints where there are any.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import parameters as p
from .boxes import flip_boxes, flip_keypoints, rotate_boxes, rotate_keypoints
from .cache import PreprocessorCache as Ids
from .draws import AnyCache, Draws, Seed
from .registry import step
from .resize import resize, resize_masks
from .shapes import present, size_of

__all__ = ["random_horizontal_flip", "random_image_scale", "random_rotation90", "random_vertical_flip"]

_FLIP = {"keypoint_flip_permutation": p.optional(p.permutation)}


@step(checks=_FLIP)
def random_horizontal_flip(
    image: Any, boxes: Any = None, masks: Any = None, keypoints: Any = None,
    keypoint_flip_permutation: list[int] | None = None, seed: Seed = None, preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Mirror left to right if u > 0.5. Keypoints need `keypoint_flip_permutation`: which point each one becomes."""
    draws = Draws(Ids.HORIZONTAL_FLIP, [], seed, preprocess_vars_cache)
    return _flip(image, boxes, masks, keypoints, keypoint_flip_permutation, draws, vertical=False)


@step(checks=_FLIP)
def random_vertical_flip(
    image: Any, boxes: Any = None, masks: Any = None, keypoints: Any = None,
    keypoint_flip_permutation: list[int] | None = None, seed: Seed = None, preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Turn upside down if u > 0.5. Keypoints need `keypoint_flip_permutation`: which point each one becomes."""
    draws = Draws(Ids.VERTICAL_FLIP, [], seed, preprocess_vars_cache)
    return _flip(image, boxes, masks, keypoints, keypoint_flip_permutation, draws, vertical=True)


def _flip(
    image: Any, boxes: Any, masks: Any, keypoints: Any, permutation: list[int] | None, draws: Draws, vertical: bool
) -> tuple[tf.Tensor, ...]:
    if keypoints is not None and permutation is None:
        raise ValueError("keypoints need keypoint_flip_permutation: the point that each one becomes in the mirror")
    given = [None if value is None else tf.convert_to_tensor(value) for value in (image, boxes, masks, keypoints)]
    points = given[3]
    if points is not None and points.shape[1] not in (None, len(permutation or [])):
        raise ValueError(
            f"keypoint_flip_permutation has {len(permutation or [])} entries for {points.shape[1]} keypoints"
        )

    def mirrored() -> tuple[tf.Tensor, ...]:
        return present(
            tf.reverse(given[0], [0 if vertical else 1]),
            None if given[1] is None else flip_boxes(given[1], vertical),
            None if given[2] is None else tf.reverse(given[2], [1 if vertical else 2]),
            None if points is None else flip_keypoints(points, vertical, list(permutation or [])),
        )

    return _either(draws.uniform("flip") > 0.5, mirrored, given)


@step()
def random_rotation90(
    image: Any, boxes: Any = None, masks: Any = None, keypoints: Any = None, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Turn by 90 degrees counter-clockwise if u > 0.5; height and width change places."""
    draws = Draws(Ids.ROTATION90, [], seed, preprocess_vars_cache)
    given = [None if value is None else tf.convert_to_tensor(value) for value in (image, boxes, masks, keypoints)]

    def turned() -> tuple[tf.Tensor, ...]:
        return present(
            tf.reverse(tf.transpose(given[0], [1, 0, 2]), [0]),
            None if given[1] is None else rotate_boxes(given[1]),
            None if given[2] is None else tf.reverse(tf.transpose(given[2], [0, 2, 1]), [1]),
            None if given[3] is None else rotate_keypoints(given[3]),
        )

    return _either(draws.uniform("turn") > 0.5, turned, given)


def _either(change: tf.Tensor, changed: Any, given: list[Any]) -> tuple[tf.Tensor, ...]:
    """The changed tensors or the given ones. A branch, so that nothing is computed for the other; no draw is inside."""
    return tuple(tf.nest.flatten(tf.cond(change, changed, lambda: present(*map(_same, given)))))


def _same(value: Any) -> Any:
    return None if value is None else tf.identity(value)


@step(
    checks={"min_scale_ratio": p.positive, "max_scale_ratio": p.positive},
    ordered=[("min_scale_ratio", "max_scale_ratio")],
)
def random_image_scale(
    image: Any, masks: Any = None, min_scale_ratio: float = 0.5, max_scale_ratio: float = 2.0, seed: Seed = None,
    preprocess_vars_cache: AnyCache = None,
) -> tuple[tf.Tensor, ...]:  # fmt: skip
    """Both sides times one ratio in [min_scale_ratio, max_scale_ratio), cut to whole pixels, at least 1.

    Bilinear for the picture, nearest for masks [N, H, W]; corners stay corners. Boxes are fractions and do not change.
    """
    draws = Draws(Ids.IMAGE_SCALE, [min_scale_ratio, max_scale_ratio], seed, preprocess_vars_cache)
    ratio = draws.between("ratio", min_scale_ratio, max_scale_ratio)
    sides = tf.cast(tf.stack(size_of(tf.convert_to_tensor(image))), tf.float32)
    size = tf.maximum(tf.cast(sides * ratio + 1e-4, tf.int32), 1)  # 0.7 * 10 is 7, also in float32
    scaled = resize(image, size, "bilinear", align_corners=True)
    return present(scaled, None if masks is None else resize_masks(masks, size, align_corners=True))
