"""The detector: a residual network, a feature pyramid of levels 3 to 7, and two heads that all levels share.

Lin et al. 2017, "Feature Pyramid Networks" (section 3) and "Focal Loss for Dense Object Detection" (section 4). As in
the TensorFlow Object Detection API the heads' convolutions are shared and their norms are not: each level has its own.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

import keras

from .anchors import LEVELS, PER_CELL, grid_sides
from .backbone import BackboneConfig, build_backbone, convolve

PRIOR = 0.01  # the score that a fresh network gives every class: a bias of -4.6
COCO_CLASSES = 90
MEAN = (123.68, 116.779, 103.939)  # of ImageNet's pictures, red, green, blue


@dataclass(frozen=True)
class ModelConfig:
    """`channels` of the pyramid and the heads, `depth`: convolutions of a head before its last."""

    backbone: BackboneConfig = BackboneConfig()
    channels: int = 256
    depth: int = 4


ARCHITECTURES: dict[str, ModelConfig] = {
    "full": ModelConfig(),
    "compact": ModelConfig(BackboneConfig(False, (2, 2, 2, 2), 32, momentum=0.97), channels=64, depth=2),
}


def config_of(name: str) -> ModelConfig:
    """An architecture by its name. ValueError for an unknown one, with the nearest."""
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"architecture {name!r} is none of {', '.join(ARCHITECTURES)}{hint}")
    return ARCHITECTURES[name]


def _norm(config: ModelConfig, name: str, dtype):
    return keras.layers.BatchNormalization(
        momentum=config.backbone.momentum, epsilon=config.backbone.epsilon, name=name, dtype=dtype
    )


def _relu6(x, name: str, dtype):
    return keras.layers.ReLU(max_value=6.0, name=name, dtype=dtype)(x)


def feature_pyramid(stages: list, config: ModelConfig, dtype=None) -> list:
    """Outputs of the stages 3, 4 and 5 -> five maps of `channels` channels, level 3 first.

    Levels 3 to 5: each stage's 1x1 convolution plus the level above at twice its size, smoothed by a 3x3 convolution
    except for level 5, which nothing is added to. Levels 6 and 7: strided convolutions of the level before.
    """
    lateral = [
        keras.layers.Conv2D(config.channels, 1, name=f"lateral{level}", dtype=dtype)(x)
        for level, x in zip(LEVELS, stages, strict=False)
    ]
    top = lateral[-1]
    merged = [top]
    for level, x in zip((4, 3), reversed(lateral[:-1]), strict=True):
        up = keras.layers.UpSampling2D(2, name=f"upsample{level}", dtype=dtype)(top)
        top = keras.layers.Add(name=f"merge{level}", dtype=dtype)([x, up])
        smooth = keras.layers.Conv2D(config.channels, 3, padding="same", name=f"smooth{level}", dtype=dtype)
        merged.insert(0, smooth(top))
    for level in LEVELS[3:]:
        x = convolve(merged[-1], config.channels, 3, f"coarse{level}_conv", 2, dtype)
        merged.append(_relu6(_norm(config, f"coarse{level}_bn", dtype)(x), f"coarse{level}_relu", dtype))
    return merged


def head(maps: list, config: ModelConfig, values: int, bias: float, name: str, dtype=None):
    """`values` numbers for each anchor: [N, A, values] float32, in the anchors' order."""
    spread = keras.initializers.RandomNormal(stddev=0.01)
    tower = [
        keras.layers.Conv2D(
            config.channels, 3, padding="same", use_bias=False, kernel_initializer=spread,
            name=f"{name}_conv{number}", dtype=dtype,
        )
        for number in range(config.depth)
    ]  # fmt: skip
    last = keras.layers.Conv2D(
        PER_CELL * values, 3, padding="same", kernel_initializer=spread,
        bias_initializer=keras.initializers.Constant(bias), name=f"{name}_predict", dtype=dtype,
    )  # fmt: skip
    found = []
    for level, x in zip(LEVELS, maps, strict=True):
        for number, layer in enumerate(tower):
            x = _norm(config, f"{name}_bn{number}_level{level}", dtype)(layer(x))
            x = _relu6(x, f"{name}_relu{number}_level{level}", dtype)
        found.append(keras.layers.Reshape((-1, values), name=f"{name}_flat{level}", dtype=dtype)(last(x)))
    joined = keras.layers.Concatenate(1, name=f"{name}_levels", dtype=dtype)(found)
    # A loss, and a score near 0, need more digits than a half precision float has.
    return keras.layers.Activation("linear", name=name, dtype="float32")(joined)


def build_model(
    architecture: str | ModelConfig = "full",
    num_classes: int = COCO_CLASSES,
    image_size: int = 320,
    dtype: str | None = None,
) -> keras.Model:
    """Pictures [N, S, S, 3], RGB of 0 to 255 -> {"offsets": [N, A, 4], "logits": [N, A, num_classes]}, float32.

    The model subtracts the mean colour itself. `dtype`: a Keras policy ("float32", "mixed_bfloat16", "mixed_float16");
    variables are float32 under each. ValueError: unknown architecture, fewer than one class, a side that is no
    multiple of 32.
    """
    config = config_of(architecture) if isinstance(architecture, str) else architecture
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    grid_sides(image_size)
    policy = None if dtype is None else keras.dtype_policies.get(dtype)
    inputs = keras.Input((image_size, image_size, 3), name="image")
    x = keras.layers.Normalization(mean=MEAN, variance=(1.0, 1.0, 1.0), name="centre", dtype=policy)(inputs)
    stages = build_backbone(config.backbone, image_size, policy)(x)
    maps = feature_pyramid(stages[1:], config, policy)
    bias = -math.log((1 - PRIOR) / PRIOR)
    outputs = {
        "offsets": head(maps, config, 4, 0.0, "offsets", policy),
        "logits": head(maps, config, num_classes, bias, "logits", policy),
    }
    return keras.Model(inputs, outputs, name="ssd")
