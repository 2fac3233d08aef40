"""TensorRT's network definition as functions of tensors, strongly typed: what goes in decides what comes out."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cuda.halves import to_bfloat16

MODULES = ("tensorrt", "tensorrt_rtx")


def load() -> Any:
    """TensorRT's Python module, or TensorRT-RTX's, which has the same interface; ImportError if neither is there."""
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError(f"TensorRT is not installed ({'; '.join(reasons)}): pip install tensorrt")


def is_rtx(trt: Any) -> bool:
    """TensorRT-RTX has no plugins, and GPUs of its own list."""
    return trt.__name__.startswith("tensorrt_rtx")


class Layers:
    """A network under construction. ``weights``: arrays by name; ``dtype``: "float32", "float16" or "bfloat16".

    Arrays given to TensorRT are kept as long as this object is, since it reads them when it builds. Tensors passed to
    `watch` can be made outputs, to look at. Sizes of -1 are dynamic.
    """

    def __init__(self, trt: Any, network: Any, weights: Mapping[str, np.ndarray], dtype: str) -> None:
        self.trt, self.network, self.weights, self.kept = trt, network, weights, []
        self.types = {"float32": trt.float32, "float16": trt.float16, "bfloat16": trt.bfloat16}
        if dtype not in self.types:
            raise ValueError(f"dtype must be one of {', '.join(self.types)}, got {dtype!r}")
        self.dtype = self.types[dtype]
        self.watched: dict[str, Any] = {}

    def watch(self, name: str, tensor: Any) -> Any:
        self.watched[name] = tensor
        return tensor

    def input(self, name: str, dtype: Any, shape: Sequence[int]) -> Any:
        return self.network.add_input(name, dtype, tuple(shape))

    def output(self, name: str, tensor: Any) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, values: Any, dtype: Any = None) -> Any:
        """An array of int32, or of floats as ``dtype``, by default the network's."""
        values = np.asarray(values)
        if np.issubdtype(values.dtype, np.integer):
            data, dtype = np.ascontiguousarray(values, np.int32), self.trt.int32
        else:
            dtype = dtype or self.dtype
            if dtype == self.trt.bfloat16:
                data = to_bfloat16(values)
            else:
                data = np.ascontiguousarray(values, np.float16 if dtype == self.trt.float16 else np.float32)
        self.kept.append(data)
        weights = self.trt.Weights(dtype, data.ctypes.data, data.size)
        return self.network.add_constant(values.shape, weights).get_output(0)

    def weight(self, name: str) -> np.ndarray:
        if name not in self.weights:
            raise ValueError(f"the state dict has no {name!r}")
        return np.asarray(self.weights[name], np.float32)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x if x.dtype == dtype else self.network.add_cast(x, dtype).get_output(0)

    def elementwise(self, x: Any, y: Any, operation: str) -> Any:
        """``operation``: SUM, PROD, SUB, DIV, MIN, MAX, LESS, ...; both of one type and rank."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.network.add_elementwise(x, y, kind).get_output(0)

    def unary(self, x: Any, operation: str) -> Any:
        return self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)).get_output(0)

    def relu(self, x: Any) -> Any:
        return self.network.add_activation(x, self.trt.ActivationType.RELU).get_output(0)

    def number(self, value: float, rank: int, dtype: Any = None) -> Any:
        return self.constant(np.full((1,) * rank, float(value)), dtype or self.trt.float32)

    def shuffle(
        self, x: Any, first: Sequence[int] | None, shape: Sequence[int], second: Sequence[int] | None = None
    ) -> Any:
        """Permute, reshape (0 keeps a size, -1 is what is left), permute."""
        layer = self.network.add_shuffle(x)
        if first is not None:
            layer.first_transpose = tuple(first)
        layer.reshape_dims = tuple(shape)
        if second is not None:
            layer.second_transpose = tuple(second)
        return layer.get_output(0)

    def gather(self, table: Any, index: Any) -> Any:
        """Rows of the table."""
        return self.network.add_gather(table, index, 0).get_output(0)

    def size(self, x: Any, axis: int) -> Any:
        """One size of x as an int32 tensor (1,)."""
        shape = self.cast(self.network.add_shape(x).get_output(0), self.trt.int32)
        return self.gather(shape, self.constant(np.array([axis])))

    def head(self, x: Any, rows: Any) -> Any:
        """The first ``rows`` (a tensor (1,)) of x (N, C) or (N,)."""
        rank = len(x.shape)
        if rank == 2:
            parts = self.network.add_concatenation([rows, self.constant(np.array([x.shape[1]]))])
            parts.axis = 0
            rows = parts.get_output(0)
        layer = self.network.add_slice(x, (0,) * rank, (1,) * rank, (1,) * rank)
        layer.set_input(2, rows)
        return layer.get_output(0)

    def linear(self, x: Any, name: str) -> Any:
        """x (B, L, I) by a weight (O, I) and its bias."""
        operation = self.trt.MatrixOperation
        weight = self.constant(self.weight(f"{name}.weight")[None])
        y = self.network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE).get_output(0)
        return self.elementwise(y, self.constant(self.weight(f"{name}.bias")[None, None]), "SUM")

    def product(self, x: Any, y: Any, transposed: bool) -> Any:
        operation = self.trt.MatrixOperation
        right = operation.TRANSPOSE if transposed else operation.NONE
        return self.network.add_matrix_multiply(x, operation.NONE, y, right).get_output(0)

    def convolution(self, x: Any, name: str) -> Any:
        """x (B, L, I) by a weight (O, I, 3) and its bias, zeros beyond the ends."""
        weight = self.weight(f"{name}.weight")
        outputs, inputs, taps = weight.shape
        image = self.shuffle(x, (0, 2, 1), (0, inputs, 1, -1))
        nothing = self.trt.Weights(self.dtype)
        layer = self.network.add_convolution_nd(image, outputs, (1, taps), nothing, nothing)
        layer.set_input(1, self.constant(weight[:, :, None]))
        layer.padding_nd = (0, taps // 2)
        y = self.shuffle(layer.get_output(0), (0, 3, 1, 2), (0, -1, outputs))
        return self.elementwise(y, self.constant(self.weight(f"{name}.bias")[None, None]), "SUM")

    def norm(self, x: Any, name: str) -> Any:
        """LayerNorm over the last of three axes, in float32 whatever x is."""
        float32 = self.trt.float32
        gain, shift = (self.constant(self.weight(f"{name}.{part}")[None, None], float32) for part in ("weight", "bias"))
        add = getattr(self.network, "add_normalization_v2", None) or self.network.add_normalization
        layer = add(self.cast(x, float32), gain, shift, 1 << 2)
        layer.epsilon = 1e-5
        return self.cast(layer.get_output(0), x.dtype)

    def softmax(self, x: Any) -> Any:
        """Over the last axis."""
        layer = self.network.add_softmax(x)
        layer.axes = 1 << (len(x.shape) - 1)
        return layer.get_output(0)

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return self.network.add_select(condition, x, y).get_output(0)

    def plugin(self, inputs: Sequence[Any], plugin: Any) -> list[Any]:
        """The outputs of an IPluginV3; ValueError where this TensorRT takes none."""
        if not hasattr(self.network, "add_plugin_v3"):
            raise ValueError(f"{self.trt.__name__} takes no plugins: build without")
        layer = self.network.add_plugin_v3(list(inputs), [], plugin)
        return [layer.get_output(number) for number in range(layer.num_outputs)]
