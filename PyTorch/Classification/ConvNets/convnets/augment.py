"""Training augmentation whose every draw is a function of (seed, epoch, sample index): RandomResizedCrop, flip,
AutoAugment (Cubuk et al., CVPR 2019), random erasing (Zhong et al., 2017), the weight of mixup (Zhang et al., 2017).

So neither the number of workers or devices nor a resumed run changes what a sample looks like, and the Pillow and DALI
loaders cut the same boxes. Differs from the AutoAugment paper as torchvision and NVIDIA's code do: colour operations
use 1 +- magnitude with a random sign, and grey (128) fills what a rotation or shear uncovers.

Legend: N samples; box = (left, top, width, height) in pixels; draws are uniform in [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from dlx.draws import draws

AUGMENTATIONS = ("none", "standard", "autoaugment", "erase")
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10

# Independent streams of draws of one sample.
GEOMETRY, POLICY, ERASE = range(3)
MIXUP = 4  # 3 is dlx.draws.ORDER
GEOMETRY_DRAWS = 2 * CROP_ATTEMPTS + 3


# RandomResizedCrop and flip


def crop_boxes(sizes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(N, 4) int64 boxes for pictures of `sizes` (N, 2: width, height) from `values` (N, GEOMETRY_DRAWS).

    The first of ten tries that fits is taken: area 8-100 % of the picture, aspect 3/4 to 4/3 (log-uniform); if none
    fits, the largest centred box within the aspect limits.
    """
    sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
    width, height = sizes[:, 0], sizes[:, 1]
    area = (width * height).astype(np.float64)[:, None]
    scale = SCALE[0] + (SCALE[1] - SCALE[0]) * values[:, 0 : 2 * CROP_ATTEMPTS : 2]
    low, high = np.log(RATIO[0]), np.log(RATIO[1])
    ratio = np.exp(low + (high - low) * values[:, 1 : 2 * CROP_ATTEMPTS : 2])
    tried_width = np.rint(np.sqrt(area * scale * ratio)).astype(np.int64)
    tried_height = np.rint(np.sqrt(area * scale / ratio)).astype(np.int64)
    fits = (tried_width > 0) & (tried_height > 0)
    fits &= (tried_width <= width[:, None]) & (tried_height <= height[:, None])
    first = fits.argmax(1)
    rows = np.arange(len(sizes))
    box_width, box_height = tried_width[rows, first], tried_height[rows, first]

    aspect = width / height
    wide, tall = aspect > RATIO[1], aspect < RATIO[0]
    whole_width = np.where(wide, np.rint(height * RATIO[1]), width).astype(np.int64)
    whole_height = np.where(tall, np.rint(width / RATIO[0]), height).astype(np.int64)
    found = fits.any(1)
    box_width = np.where(found, box_width, np.minimum(whole_width, width))
    box_height = np.where(found, box_height, np.minimum(whole_height, height))

    left = np.floor(values[:, -3] * (width - box_width + 1)).astype(np.int64)
    top = np.floor(values[:, -2] * (height - box_height + 1)).astype(np.int64)
    left = np.where(found, left, (width - box_width) // 2)
    top = np.where(found, top, (height - box_height) // 2)
    return np.stack([left, top, box_width, box_height], 1)


def flips(values: np.ndarray) -> np.ndarray:
    """(N,) bool: which samples are mirrored."""
    return values[:, -1] < 0.5


def random_resized_crop(image: Image.Image, size: int, values: np.ndarray, resample: Image.Resampling) -> Image.Image:
    """One picture, `values` (GEOMETRY_DRAWS,): cropped, scaled to size x size and perhaps mirrored."""
    left, top, width, height = (int(v) for v in crop_boxes(np.array([image.size]), values[None])[0])
    image = image.crop((left, top, left + width, top + height)).resize((size, size), resample)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips(values[None])[0] else image


# AutoAugment

_FILL = (128, 128, 128)
# Pairs of (operation, probability, level 0..9): the ImageNet policy, table 9 of the paper.
IMAGENET_POLICY: tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("color", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)
POLICY_DRAWS = 5


def _shear(image: Image.Image, x: float) -> Image.Image:
    matrix = (1, x, -x * image.height / 2, 0, 1, 0)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=_FILL)


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=_FILL)


# Each takes the picture, the level as a fraction 0..1, and a random sign.
OPERATIONS: dict[str, Callable[[Image.Image, float, int], Image.Image]] = {
    "shear_x": lambda image, level, sign: _shear(image, sign * 0.3 * level),
    "rotate": lambda image, level, sign: _rotate(image, sign * 30 * level),
    "posterize": lambda image, level, sign: ImageOps.posterize(image, round(8 - 4 * level)),
    "solarize": lambda image, level, sign: ImageOps.solarize(image, round(256 * (1 - level))),
    "color": lambda image, level, sign: ImageEnhance.Color(image).enhance(1 + sign * 0.9 * level),
    "contrast": lambda image, level, sign: ImageEnhance.Contrast(image).enhance(1 + sign * 0.9 * level),
    "sharpness": lambda image, level, sign: ImageEnhance.Sharpness(image).enhance(1 + sign * 0.9 * level),
    "autocontrast": lambda image, level, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, level, sign: ImageOps.equalize(image),
    "invert": lambda image, level, sign: ImageOps.invert(image),
}


def auto_augment(image: Image.Image, values: np.ndarray) -> Image.Image:
    """Apply the sub-policy of the ImageNet policy that `values` (POLICY_DRAWS,) picks to an RGB picture."""
    policy = IMAGENET_POLICY[int(values[0] * len(IMAGENET_POLICY))]
    for number, (name, probability, level) in enumerate(policy):
        if values[1 + number] < probability:
            image = OPERATIONS[name](image, level / 9, 1 if values[3 + number] < 0.5 else -1)
    return image


# Random erasing

ERASE_DRAWS = 5


def erase_boxes(width: int, height: int, values: np.ndarray) -> np.ndarray:
    """(N, 4) int64 boxes, empty for the half of the samples that stay whole: area 2-25 %, aspect 0.3-3.3, anywhere."""
    area = width * height * (0.02 + 0.23 * values[:, 1])
    ratio = np.exp(np.log(0.3) * (1 - 2 * values[:, 2]))
    box_width = np.clip(np.rint(np.sqrt(area * ratio)), 1, width).astype(np.int64)
    box_height = np.clip(np.rint(np.sqrt(area / ratio)), 1, height).astype(np.int64)
    left = np.floor(values[:, 3] * (width - box_width + 1)).astype(np.int64)
    top = np.floor(values[:, 4] * (height - box_height + 1)).astype(np.int64)
    boxes = np.stack([left, top, box_width, box_height], 1)
    return boxes * (values[:, :1] < 0.5)


# Mixup


def mixup_weight(alpha: float, seed: int, epoch: int, batch: int) -> float:
    """The share of a batch's own samples, from Beta(alpha, alpha), equal on all ranks; 1 (no mixing) for alpha 0."""
    if alpha < 0:
        raise ValueError(f"mixup alpha must not be negative, got {alpha}")
    if alpha == 0:
        return 1.0
    first, second = (draws(seed, epoch, batch, 2, MIXUP)[0] * 2**32).astype(np.uint64)
    return float(np.random.Generator(np.random.Philox(key=np.array([first, second]))).beta(alpha, alpha))
