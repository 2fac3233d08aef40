"""A quantised classifier as an ONNX file with int8 weights, and what onnxruntime makes of it.

The file holds QuantizeLinear/DequantizeLinear pairs around floating-point operators (the "QDQ" form): every runtime can
read it, and onnxruntime or TensorRT replace a pair with the operator between by an integer kernel. Weights are stored
as int8 with a scale per output channel, biases as int32 at the product of the input's and the weight's scale.

N batch, K classes.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dlx import export as exports
from dlx import files
from dlx.inputs import Normalize

from . import pretrained
from .quantizers import SMALLEST_SCALE, ActivationQuantizer, QuantizedClassifier

LARGEST_BIAS = 2.0**30  # of int32, with room for the sum of products
INTEGER_KERNELS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "QLinearAdd",
                   "QLinearMul", "QLinearSigmoid", "QLinearGlobalAveragePool")  # fmt: skip


class ExportedQuantizer(nn.Module):
    """Becomes a QuantizeLinear and a DequantizeLinear in the graph."""

    def __init__(self, source: ActivationQuantizer):
        super().__init__()
        self.register_buffer("scale", source.scale.detach().clone().float())
        self.register_buffer("zero_point", source.zero_point.detach().to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        inputs = (x, self.scale, self.zero_point)
        levels = torch.onnx.ops.symbolic("QuantizeLinear", inputs, dtype=torch.uint8, shape=x.shape)
        inputs = (levels, self.scale, self.zero_point)
        return torch.onnx.ops.symbolic("DequantizeLinear", inputs, dtype=torch.float32, shape=x.shape)


def exportable(model: QuantizedClassifier) -> nn.Module:
    """A copy on the CPU with rounded weights in place of the rounding, and quantisers that the exporter knows."""
    model = copy.deepcopy(model).cpu().eval()
    for parent in list(model.modules()):
        if parametrize.is_parametrized(parent, "weight"):
            # remove_parametrizations would change the class, which the copy shares with the original.
            weight = parent.weight.detach()
            parent.__class__ = parametrize.type_before_parametrizations(parent)
            del parent.parametrizations
            parent.weight = nn.Parameter(weight)
        for name, child in list(parent.named_children()):
            if isinstance(child, ActivationQuantizer):
                setattr(parent, name, ExportedQuantizer(child))
    return model.requires_grad_(False)


def export(found: pretrained.Classifier, path: str | Path) -> Path:
    """Write a classifier that ``quantizers.quantize`` made to one ONNX file: whole, or not at all."""
    model, shape = found.model, found.preprocessing
    if not isinstance(model, QuantizedClassifier):
        raise ValueError(f"{found.source}: not a quantised model ({type(model).__name__})")
    path = Path(path)
    example = torch.zeros(2, shape.channels, shape.crop, shape.crop)
    with tempfile.TemporaryDirectory() as folder:
        plain = exports.to_onnx(
            exportable(model),
            example,
            Path(folder) / "model.onnx",
            input_names=["images"],
            output_names=["logits"],
            metadata=found.describe(),
        )
        graph = onnx.load(str(plain))
    pool_integers(graph.graph)
    stored = store_integers(graph.graph, model.scheme.weight_limit)
    if not stored:
        raise ValueError(f"{found.arch}: no layer of the exported graph has a quantised input")
    _strip(graph.graph)
    onnx.checker.check_model(graph, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_path(path) as temporary:
        onnx.save(graph, str(temporary))
    return path


# --------------------------------------------------------------------------------------------- graph passes


def _producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in graph.node for name in node.output}


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


def store_integers(graph: onnx.GraphProto, limit: int) -> int:
    """Store weights as int8 and biases as int32 wherever the input comes from a DequantizeLinear; counts the layers.

    A channel whose weights are minute beside its bias gets a larger scale than theirs, so that the bias fits.
    """
    producers, constants = _producers(graph), _constants(graph)
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        source = producers.get(node.input[0]) if node.input else None
        if node.op_type in ("Conv", "Gemm") and source is not None and source.op_type == "DequantizeLinear":
            weight = constants[node.input[1]]
            axis = 0 if node.op_type == "Conv" or _attribute(node, "transB", 0) else 1
            step = float(constants[source.input[1]])
            bias = constants[node.input[2]] if len(node.input) > 2 else None
            channels_first = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float64)
            scale = np.maximum(np.abs(channels_first).max(1) / limit, SMALLEST_SCALE)
            if bias is not None:
                scale = np.maximum(scale, np.abs(bias.astype(np.float64)) / (step * LARGEST_BIAS))
            scale = scale.astype(np.float32)
            shape = [-1 if dimension == axis else 1 for dimension in range(weight.ndim)]
            levels = np.clip(np.rint(weight / scale.reshape(shape)), -limit, limit).astype(np.int8)
            node.input[1] = _dequantized(graph, nodes, node.input[1], levels, scale, axis)
            if bias is not None:
                steps = (step * scale.astype(np.float64)).astype(np.float32)
                levels = np.rint(bias.astype(np.float64) / steps).astype(np.int32)
                node.input[2] = _dequantized(graph, nodes, node.input[2], levels, steps, 0)
            count += 1
        nodes.append(node)
    _replace_nodes(graph, nodes)
    _drop_unused(graph)
    return count


def _dequantized(
    graph: onnx.GraphProto, nodes: list[onnx.NodeProto], name: str, levels: np.ndarray, scale: np.ndarray, axis: int
) -> str:
    """Add the constants and the DequantizeLinear of a weight or bias; returns the name of its output."""
    names = [f"{name}.levels", f"{name}.scale", f"{name}.zero_point"]
    for key, value in zip(names, (levels, scale, np.zeros(scale.shape, levels.dtype)), strict=True):
        graph.initializer.append(numpy_helper.from_array(value, key))
    output = f"{name}.dequantized"
    nodes.append(helper.make_node("DequantizeLinear", names, [output], name=output, axis=axis))
    return output


def pool_integers(graph: onnx.GraphProto) -> int:
    """``flatten(mean over H and W)`` before a quantiser becomes GlobalAveragePool, whose integer kernel exists.

    The quantiser moves in front of the flattening, which may then happen on integers.
    """
    constants = _constants(graph)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    nodes: list[onnx.NodeProto] = []
    pooled: dict[str, str] = {}
    for node in graph.node:
        following = readers.get(node.output[0], [])
        axes = constants.get(node.input[1]) if node.op_type == "ReduceMean" and len(node.input) > 1 else None
        quantised = len(following) == 1 and following[0].op_type == "QuantizeLinear"
        if axes is None or sorted(axes.tolist()) not in ([2, 3], [-2, -1]) or not quantised:
            if node.op_type == "QuantizeLinear" and node.input[0] in pooled:
                flat = node.output[0]
                node.input[0], node.output[0] = pooled[node.input[0]], f"{flat}.pooled"
                nodes += [node, helper.make_node("Flatten", [node.output[0]], [flat], name=f"{flat}.flatten", axis=1)]
                for value in [value for value in graph.value_info if value.name == flat]:
                    graph.value_info.remove(value)
            else:
                nodes.append(node)
            continue
        if _attribute(node, "keepdims", 1):
            nodes.append(node)
            continue
        output = f"{node.output[0]}.pooled"
        nodes.append(helper.make_node("GlobalAveragePool", [node.input[0]], [output], name=output))
        pooled[node.output[0]] = output
    _replace_nodes(graph, nodes)
    return len(pooled)


def _replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    nodes = [copy.deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)


def _strip(graph: onnx.GraphProto) -> None:
    """Without the exporter's stack traces, which take more room than a small model."""
    for item in (*graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")


def _drop_unused(graph: onnx.GraphProto) -> None:
    used = {name for node in graph.node for name in node.input}
    kept = [copy.deepcopy(tensor) for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


# -------------------------------------------------------------------------------------------- in onnxruntime


def session(path: str | Path, threads: int = 0, save: str | Path | None = None) -> onnxruntime.InferenceSession:
    """A session on the CPU; ``save`` also writes the graph as onnxruntime optimised it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if save is not None:
        options.optimized_model_filepath = str(save)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def executed_operators(path: str | Path) -> dict[str, int]:
    """How many nodes of each operator onnxruntime runs for a file, after its optimisation."""
    with tempfile.TemporaryDirectory() as folder:
        optimised = Path(folder) / "optimised.onnx"
        session(path, save=optimised)
        graph = onnx.load(str(optimised)).graph
    return dict(Counter(node.op_type for node in graph.node).most_common())


@torch.no_grad()
def compare(
    path: str | Path,
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    normalize: Normalize,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """The file in onnxruntime against the PyTorch simulation, over a whole split.

    ``top1`` and ``simulated_top1`` in percent, ``agreement``: percent of images with the same best class;
    ``difference``: largest difference of a logit relative to the largest logit. Labels of -1 do not count.
    """
    runtime = session(path)
    model.eval()
    hits = own_hits = agreeing = count = 0
    largest = difference = 0.0
    for images, labels in batches:
        counted = labels >= 0
        images = normalize(images)[counted]
        labels = labels[counted].cpu().numpy()
        if not len(labels):
            continue
        own = model(images.contiguous(memory_format=torch.channels_last)).float().cpu().numpy()
        found = runtime.run(None, {"images": images.contiguous().cpu().numpy()})[0]
        best, own_best = found.argmax(1), own.argmax(1)
        hits += int((best == labels).sum())
        own_hits += int((own_best == labels).sum())
        agreeing += int((best == own_best).sum())
        count += len(labels)
        largest = max(largest, float(np.abs(own).max()))
        difference = max(difference, float(np.abs(own - found).max()))
    if not count:
        raise ValueError("the split holds no labelled picture")
    return {
        "top1": 100.0 * hits / count,
        "simulated_top1": 100.0 * own_hits / count,
        "agreement": 100.0 * agreeing / count,
        "difference": difference / max(largest, 1e-12),
        "samples": count,
    }
