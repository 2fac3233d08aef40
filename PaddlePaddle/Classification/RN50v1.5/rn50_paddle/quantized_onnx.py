"""A quantised classifier as an ONNX file with QuantizeLinear/DequantizeLinear pairs, for onnxruntime and TensorRT.

Paddle 3.3's own way, `QAT.convert` and `jit.save`, gives files with wrong numbers; here the folded float model goes
through paddle2onnx, and the pairs are put in front of its convolutions and products with the scales of the training.

Weights are stored as uint8 around 128: the product of unsigned activations and signed weights saturates its 16-bit sums
on processors without VNNI, that of two unsigned ones does not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import paddle
from onnx import helper, numpy_helper

from dlx import files

from .quantizers import Observer, Quantised, set_mode

OPSET = 17
INTEGER_KERNELS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger")


def float_onnx(model: paddle.nn.Layer, channels: int, size: int, path: Path) -> None:
    """Write the model by paddle2onnx with a free batch; normalised float32 pictures in, logits out."""
    spec = [paddle.static.InputSpec([None, channels, size, size], "float32", "images")]
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model"
        paddle.onnx.export(model, str(made), input_spec=spec, opset_version=OPSET)
        proto = onnx.load(f"{made}.onnx")
    old, proto.graph.output[0].name = proto.graph.output[0].name, "logits"
    for node in proto.graph.node:
        node.output[:] = ["logits" if name == old else name for name in node.output]
    _merge_biases(proto)
    onnx.checker.check_model(proto)
    with files.atomic_path(path) as temporary:
        onnx.save(proto, str(temporary))


def _array(proto: Any, name: str) -> np.ndarray | None:
    found = next((tensor for tensor in proto.graph.initializer if tensor.name == name), None)
    return None if found is None else numpy_helper.to_array(found)


def _merge_biases(proto: Any) -> None:
    """paddle2onnx writes Conv, Add, Identity: make the added constant the convolution's bias."""
    users: dict[str, list[Any]] = {}
    for node in proto.graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    dropped, renamed = [], {}
    for node in proto.graph.node:
        if node.op_type == "Identity":
            renamed[node.output[0]] = node.input[0]
            dropped.append(node)
        following = users.get(node.output[0], [])
        if node.op_type != "Conv" or len(node.input) > 2 or [user.op_type for user in following] != ["Add"]:
            continue
        add = following[0]
        other = next(name for name in add.input if name != node.output[0])
        bias = _array(proto, other)
        if bias is not None and bias.size == bias.shape[1]:
            proto.graph.initializer.append(numpy_helper.from_array(bias.ravel(), f"{node.input[1]}.bias"))
            node.input.append(f"{node.input[1]}.bias")
            node.output[0] = add.output[0]
            dropped.append(add)
    outputs = {value.name for value in proto.graph.output}
    for node in dropped:
        proto.graph.node.remove(node)
    back = {renamed[name]: name for name in outputs & renamed.keys()}  # a graph's output keeps its name
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                name = renamed.get(name, name) if name not in outputs else name
                names[place] = back.get(name, name)
    used = {name for node in proto.graph.node for name in node.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    del proto.graph.initializer[:], proto.graph.value_info[:]
    proto.graph.initializer.extend(kept)


class _Rewriter:
    """Collects the nodes and constants of the quantised graph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.rounded: dict[str, str] = {}  # of a tensor, the name of its rounded form

    def constant(self, name: str, value: np.ndarray) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def round(self, source: str, name: str, observer: Observer) -> str:
        """A pair behind a tensor, once; the name of the rounded tensor."""
        if source not in self.rounded:
            scale = self.constant(f"{name}.scale", np.float32(observer.scale))
            zero = self.constant(f"{name}.zero", np.uint8(128 if observer.signed else 0))
            self.nodes.append(helper.make_node("QuantizeLinear", [source, scale, zero], [f"{name}.levels"]))
            self.nodes.append(
                helper.make_node("DequantizeLinear", [f"{name}.levels", scale, zero], [f"{name}.rounded"])
            )
            self.rounded[source] = f"{name}.rounded"
        return self.rounded[source]

    def weight(self, name: str, layer: Quantised) -> str:
        weight, scale = layer.inner.weight.numpy(), layer.weight_scale().numpy()
        levels = np.clip(np.rint(weight / scale), -127, 127).astype(np.int16) + 128
        inputs = [
            self.constant(f"{name}.weight.levels", levels.astype(np.uint8)),
            self.constant(f"{name}.weight.scale", scale.ravel().astype(np.float32)),
            self.constant(f"{name}.weight.zero", np.full(scale.size, 128, np.uint8)),
        ]
        axis = 0 if weight.ndim == 4 else 1
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}.weight.rounded"], axis=axis))
        return f"{name}.weight.rounded"

    def bias(self, name: str, layer: Quantised) -> str:
        """int32 at the product of the input's and the weight's scale: what an integer sum is in."""
        scale = (layer.weight_scale().numpy().ravel().astype(np.float64) * layer.observer.scale).astype(np.float32)
        levels = np.clip(np.rint(layer.inner.bias.numpy() / scale.astype(np.float64)), -(2**30), 2**30)
        inputs = [
            self.constant(f"{name}.bias.levels", levels.astype(np.int32)),
            self.constant(f"{name}.bias.scale", scale),
            self.constant(f"{name}.bias.zero", np.zeros(scale.size, np.int32)),
        ]
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}.bias.rounded"], axis=0))
        return f"{name}.bias.rounded"


def export(model: paddle.nn.Layer, layers: dict[str, Quantised], channels: int, size: int, path: Path) -> None:
    """Write the quantised model: a folded one whose layers are wrapped."""
    set_mode(layers, "float")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "float.onnx"
        float_onnx(model, channels, size, source)
        proto = onnx.load(str(source))
    set_mode(layers, "quantise")
    by_weight = {layer.inner.weight.name: name for name, layer in layers.items()}
    made = _Rewriter()
    for node in proto.graph.node:
        name = by_weight.pop(node.input[1], None) if node.op_type in ("Conv", "MatMul") else None
        if name is not None:
            layer = layers[name]
            node.input[0] = made.round(node.input[0], name, layer.observer)
            node.input[1] = made.weight(name, layer)
            if len(node.input) > 2:
                node.input[2] = made.bias(name, layer)
        else:
            node.input[:] = [made.rounded.get(value, value) for value in node.input]
        made.nodes.append(node)
        if name is not None and layers[name].output is not None:
            made.round(node.output[0], f"{name}.out", layers[name].output)
    if by_weight:
        raise ValueError(f"the exported graph has no convolution or product for {', '.join(by_weight.values())}")
    used = {name for node in made.nodes for name in node.input}
    tensors = [tensor for tensor in proto.graph.initializer if tensor.name in used] + made.tensors
    graph = helper.make_graph(made.nodes, "int8", proto.graph.input, proto.graph.output, tensors)
    result = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    onnx.checker.check_model(result)
    with files.atomic_path(path) as temporary:
        onnx.save(result, str(temporary))


def session(path: str | Path, threads: int = 0, optimized: str | None = None) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU; `optimized`: where to write the graph that it really runs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if optimized:
        options.optimized_model_filepath = optimized
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def integer_kernels(path: str | Path) -> dict[str, int]:
    """How many integer kernels, and float convolutions and products, onnxruntime makes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/optimized.onnx"
        session(path, optimized=target)
        kinds = [node.op_type for node in onnx.load(target).graph.node]
    floats = sum(kind in ("Conv", "FusedConv", "MatMul", "Gemm", "FusedMatMul") for kind in kinds)
    return {"integer": sum(kind in INTEGER_KERNELS for kind in kinds), "float": floats}
