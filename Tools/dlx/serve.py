"""A Triton model repository made from an ONNX graph's own names, types and shapes, and a local runner of the graph."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import files

# ONNX element type -> Triton's name, numpy's name
_TYPES = {
    1: ("TYPE_FP32", "float32"),
    2: ("TYPE_UINT8", "uint8"),
    3: ("TYPE_INT8", "int8"),
    4: ("TYPE_UINT16", "uint16"),
    5: ("TYPE_INT16", "int16"),
    6: ("TYPE_INT32", "int32"),
    7: ("TYPE_INT64", "int64"),
    8: ("TYPE_STRING", "object"),
    9: ("TYPE_BOOL", "bool"),
    10: ("TYPE_FP16", "float16"),
    11: ("TYPE_FP64", "float64"),
    16: ("TYPE_BF16", "bfloat16"),
}
INSTANCE_KINDS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class Port:
    """An input or output of a graph; a dimension of -1 is free."""

    name: str
    triton_type: str
    numpy_type: str
    shape: tuple[int, ...]


def ports(onnx_path: str | os.PathLike[str]) -> tuple[list[Port], list[Port]]:
    """The graph's inputs (without its constants) and outputs."""
    import onnx

    graph = onnx.load(str(onnx_path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [_port(value, onnx_path) for value in graph.input if value.name not in constants]
    return inputs, [_port(value, onnx_path) for value in graph.output]


def _port(value: object, onnx_path: str | os.PathLike[str]) -> Port:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TYPES:
        raise ValueError(f"{onnx_path}: {value.name} has the element type {tensor.elem_type}, which Triton has not")
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
    return Port(value.name, *_TYPES[tensor.elem_type], shape)


def model_repository(
    onnx_path: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    name: str,
    *,
    max_batch_size: int,
    labels: Sequence[str] | None = None,
    instance_kind: str = "auto",
    instance_count: int = 1,
    version: int = 1,
) -> Path:
    """Write out_dir/name/{config.pbtxt, <version>/model.onnx[, labels.txt]} and return out_dir/name.

    `max_batch_size` 0 serves the graph's shapes as they are; above 0, every input and output must have a free first
    dimension, else ValueError names the one that has not. `labels` go to the output whose last dimension is their
    number.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"model name {name!r}: letters, digits, '_', '.' and '-' only")
    if instance_kind not in INSTANCE_KINDS:
        raise ValueError(f"instance_kind {instance_kind!r} is none of {', '.join(INSTANCE_KINDS)}")
    if max_batch_size < 0 or instance_count < 1 or version < 1:
        raise ValueError(
            f"need max_batch_size >= 0, instance_count >= 1, version >= 1; "
            f"got {max_batch_size}, {instance_count}, {version}"
        )
    inputs, outputs = ports(onnx_path)
    if max_batch_size:
        for port in (*inputs, *outputs):
            if not port.shape or port.shape[0] != -1:
                raise ValueError(
                    f"{onnx_path}: cannot serve batches of up to {max_batch_size}, {port.name} has the fixed shape "
                    f"{list(port.shape)}; export it with a dynamic batch or give max_batch_size 0"
                )
    labelled = _labelled(outputs, labels, onnx_path) if labels is not None else None
    text = _config(name, inputs, outputs, max_batch_size, labelled, instance_kind, instance_count)
    folder = Path(out_dir) / name
    with files.atomic_path(folder) as temporary:
        (temporary / str(version)).mkdir(parents=True)
        shutil.copyfile(onnx_path, temporary / str(version) / "model.onnx")
        (temporary / "config.pbtxt").write_text(text)
        if labels is not None:
            (temporary / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    return folder


def _labelled(outputs: list[Port], labels: Sequence[str], onnx_path: str | os.PathLike[str]) -> str:
    fitting = [port.name for port in outputs if port.shape and port.shape[-1] == len(labels)]
    if not fitting:
        shapes = ", ".join(f"{port.name} {list(port.shape)}" for port in outputs)
        raise ValueError(f"{onnx_path}: {len(labels)} labels fit no output ({shapes})")
    if any("\n" in label for label in labels):
        raise ValueError("a label holds a line break")
    return fitting[0]


def _config(
    name: str,
    inputs: list[Port],
    outputs: list[Port],
    max_batch_size: int,
    labelled: str | None,
    instance_kind: str,
    instance_count: int,
) -> str:
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {max_batch_size}"]
    for field, group in (("input", inputs), ("output", outputs)):
        blocks = []
        for port in group:
            dims = ", ".join(str(d) for d in (port.shape[1:] if max_batch_size else port.shape))
            block = [f'    name: "{port.name}"', f"    data_type: {port.triton_type}", f"    dims: [ {dims} ]"]
            if not dims:  # Triton has no scalars per item: it calls them one number
                block[2] = "    dims: [ 1 ]\n    reshape { shape: [ ] }"
            if field == "output" and port.name == labelled:
                block.append('    label_filename: "labels.txt"')
            blocks.append("  {\n" + "\n".join(block) + "\n  }")
        lines.append(f"{field} [\n" + ",\n".join(blocks) + "\n]")
    if max_batch_size > 1:
        lines.append("dynamic_batching {\n  max_queue_delay_microseconds: 1000\n}")
    kind = f"KIND_{instance_kind.upper()}"
    lines.append(f"instance_group [\n  {{\n    count: {instance_count}\n    kind: {kind}\n  }}\n]")
    return "\n".join(lines) + "\n"


class OnnxModel:
    """The graph in onnxruntime, fed as a server would feed it: batches above `max_batch_size` are split.

    Called with one array per input, by position or name, all with the same first dimension; gives the outputs by name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_batch_size: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        import onnxruntime

        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.path, self.max_batch_size = Path(path), max_batch_size
        self.inputs, self.outputs = ports(path)
        self.session = onnxruntime.InferenceSession(str(path), providers=list(providers))

    def __call__(self, *arrays: np.ndarray, **named: np.ndarray) -> dict[str, np.ndarray]:
        given = dict(zip((port.name for port in self.inputs), arrays, strict=False)) | named
        expected = [port.name for port in self.inputs]
        if len(arrays) > len(self.inputs) or set(given) != set(expected):
            raise ValueError(f"{self.path}: takes the inputs {', '.join(expected)}, got {', '.join(given) or 'none'}")
        for port in self.inputs:
            self._check(port, given[port.name])
        sizes = {len(array) for array in given.values()}
        if len(sizes) != 1:
            raise ValueError(f"{self.path}: the inputs have different batch sizes {sorted(sizes)}")
        total = sizes.pop()
        step = self.max_batch_size or max(total, 1)
        parts = [
            self.session.run(None, {name: array[start : start + step] for name, array in given.items()})
            for start in range(0, max(total, 1), step)
        ]
        joined = [np.concatenate(found) for found in zip(*parts, strict=True)]
        return {port.name: values for port, values in zip(self.outputs, joined, strict=True)}

    def _check(self, port: Port, array: np.ndarray) -> None:
        fits = array.ndim == len(port.shape) and all(
            want in (-1, have) for want, have in zip(port.shape, array.shape, strict=True)
        )
        if not fits or array.dtype != np.dtype(port.numpy_type):
            raise ValueError(
                f"{self.path}: input {port.name} is {port.numpy_type}{list(port.shape)}, "
                f"got {array.dtype}{list(array.shape)}"
            )


def describe(onnx_path: str | os.PathLike[str]) -> Mapping[str, list[str]]:
    """For people: {"inputs": ["images float32[-1, 3, 224, 224]"], "outputs": [...]}."""
    inputs, outputs = ports(onnx_path)
    show = [[f"{port.name} {port.numpy_type}{list(port.shape)}" for port in group] for group in (inputs, outputs)]
    return {"inputs": show[0], "outputs": show[1]}
