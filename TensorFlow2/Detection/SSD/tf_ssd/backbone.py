"""Residual networks (He et al. 2015, table 1) that feed the feature pyramid, and the layout of Keras' own weights.

Layers have the names of `keras.applications.ResNet50`: conv1_conv, conv1_bn, conv{stage}_block{i}_{1,2,3}_{conv,bn},
and _0_ for the shortcut that changes the shape. Convolutions have no bias: the norm after each has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import keras
import numpy as np

EXPANSION = 4


@dataclass(frozen=True)
class BackboneConfig:
    """`bottleneck`: blocks of three convolutions, as in ResNet-50, or of two, as in ResNet-18. `blocks` of the stages
    2 to 5, `width`: channels of stage 2 within a block. `stride_first`: a bottleneck halves the picture in its first
    1x1 convolution as in the paper (v1), not in the 3x3 one (v1.5). `momentum`, `epsilon`: of the norms."""

    bottleneck: bool = True
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 64
    stride_first: bool = False
    momentum: float = 0.997
    epsilon: float = 1e-3


def convolve(x, filters: int, kernel: int, name: str, strides: int = 1, dtype=None):
    """A convolution without bias; larger kernels are padded by half their size on every side, not as "same" does,
    which pads even pictures at the bottom and right only."""
    if kernel > 1:
        x = keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad", dtype=dtype)(x)
    return keras.layers.Conv2D(
        filters, kernel, strides, use_bias=False, kernel_initializer="he_normal", name=name, dtype=dtype
    )(x)


class _Stages:
    def __init__(self, config: BackboneConfig, dtype) -> None:
        self.config, self.dtype = config, dtype

    def normalised(self, x, filters: int, kernel: int, name: str, strides: int = 1, last: bool = False):
        """Convolution and norm, `name` with _conv and _bn; the last norm of a branch has no ReLU after it."""
        x = convolve(x, filters, kernel, f"{name}_conv", strides, self.dtype)
        x = keras.layers.BatchNormalization(
            momentum=self.config.momentum, epsilon=self.config.epsilon, name=f"{name}_bn", dtype=self.dtype
        )(x)
        return x if last else keras.layers.ReLU(name=f"{name}_relu", dtype=self.dtype)(x)

    def block(self, x, width: int, strides: int, name: str):
        filters = width * (EXPANSION if self.config.bottleneck else 1)
        shortcut = x
        if strides != 1 or x.shape[-1] != filters:
            shortcut = self.normalised(x, filters, 1, f"{name}_0", strides, last=True)
        if self.config.bottleneck:
            first, second = (strides, 1) if self.config.stride_first else (1, strides)
            x = self.normalised(x, width, 1, f"{name}_1", first)
            x = self.normalised(x, width, 3, f"{name}_2", second)
            x = self.normalised(x, filters, 1, f"{name}_3", last=True)
        else:
            x = self.normalised(x, width, 3, f"{name}_1", strides)
            x = self.normalised(x, width, 3, f"{name}_2", last=True)
        x = keras.layers.Add(name=f"{name}_add", dtype=self.dtype)([shortcut, x])
        return keras.layers.ReLU(name=f"{name}_out", dtype=self.dtype)(x)


def build_backbone(config: BackboneConfig, image_size: int | None, dtype=None) -> keras.Model:
    """Pictures [N, S, S, 3] -> the outputs of stages 2 to 5, at 1/4, 1/8, 1/16 and 1/32 of the side.

    `image_size` None: any. `dtype`: a Keras dtype policy or its name, such as "mixed_bfloat16".
    """
    stages = _Stages(config, dtype)
    inputs = keras.Input((image_size, image_size, 3), name="image")
    x = stages.normalised(inputs, config.width, 7, "conv1", 2)
    x = keras.layers.ZeroPadding2D(1, name="pool1_pad", dtype=dtype)(x)  # after a ReLU zeros never win
    x = keras.layers.MaxPooling2D(3, 2, name="pool1_pool", dtype=dtype)(x)
    outputs = []
    for stage, blocks in enumerate(config.blocks):
        for number in range(blocks):
            strides = 2 if stage and not number else 1
            x = stages.block(x, config.width * 2**stage, strides, f"conv{stage + 2}_block{number + 1}")
        outputs.append(x)
    return keras.Model(inputs, outputs, name="backbone")


def from_keras_resnet(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """This backbone's weights from those of `keras.applications.ResNet50`, both by "layer/variable".

    The biases of its convolutions go into the mean that the following norm subtracts. The result is the same function
    for a backbone with `stride_first` and an epsilon of 1.001e-5; with the stride in the 3x3 convolution the weights
    fit but were trained for another function. Its classifier (`predictions`) is left out.
    """
    found = {}
    for path, value in weights.items():
        layer, variable = path.split("/")
        if layer == "predictions":
            continue
        if layer.endswith("_conv") and variable == "bias":
            continue
        value = np.asarray(value)
        if variable == "moving_mean":
            value = value - np.asarray(weights[f"{layer.removesuffix('_bn')}_conv/bias"])
        found[path] = value
    return found


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """All variables of the layers of a model by "layer/variable"."""
    return {f"{layer.name}/{variable.name}": variable.numpy() for layer in model.layers for variable in layer.weights}


def set_weights(model: keras.Model, weights: Mapping[str, np.ndarray]) -> None:
    """Give a model all its variables by "layer/variable". ValueError names what is missing, left over or misshapen;
    then nothing is changed."""
    variables = {f"{layer.name}/{variable.name}": variable for layer in model.layers for variable in layer.weights}
    missing, unknown = sorted(variables.keys() - weights.keys()), sorted(weights.keys() - variables.keys())
    if missing or unknown:
        raise ValueError(f"weights for {model.name}: missing {missing[:5]}, unknown {unknown[:5]}")
    for path, variable in variables.items():
        if tuple(variable.shape) != np.shape(weights[path]):
            raise ValueError(f"{path}: shape {np.shape(weights[path])}, the model has {tuple(variable.shape)}")
    for path, variable in variables.items():
        variable.assign(weights[path])
