"""ONNX export with a parity check in onnxruntime, and a cache for what is built from it. Needs torch and onnx.

Legend: B = batch, the first dimension of every input and output.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import files

if TYPE_CHECKING:
    import torch

LARGEST = 2**31 - 2**20  # a protobuf message ends at 2 GiB


class ParityError(ValueError):
    """An exported graph that does not compute what the model computes."""


def to_onnx(
    model: torch.nn.Module,
    example: torch.Tensor | tuple[torch.Tensor, ...],
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] = ("input",),
    output_names: Sequence[str] = ("output",),
    dynamic_batch: bool = True,
    dynamic_shapes: Sequence[Mapping[int, Any]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model in evaluation mode as one .onnx file (whole or not at all); returns its path.

    `example`: the inputs, any batch size. With `dynamic_batch`, dimension 0 of all inputs is the symbol `batch`;
    ValueError if the graph turns out to be fixed to one size. `dynamic_shapes` takes its place where other dimensions
    vary, too: for each input its torch.export.Dim by dimension. `metadata` is stored in the file, each value as JSON
    unless it is a string.
    """
    import onnx
    import torch

    inputs = example if isinstance(example, tuple) else (example,)
    if len(input_names) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs need as many names, got {list(input_names)}")
    shapes = None
    if dynamic_batch:
        # An example of one would be compiled in as a constant.
        inputs = tuple(x if x.shape[0] > 1 else torch.cat([x, x]) for x in inputs)
        batch = torch.export.Dim("batch", min=1)
        shapes = tuple({0: batch} for _ in inputs) if dynamic_shapes is None else tuple(map(dict, dynamic_shapes))
    was_training = model.training
    model.eval()
    # It warns of each optional library that is not installed.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                inputs,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=list(input_names),
                output_names=list(output_names),
                external_data=False,
                verbose=False,
            )
    finally:
        model.train(was_training)
    proto = program.model_proto
    if dynamic_batch:
        _require_dynamic(proto, path)
    if metadata:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        onnx.helper.set_model_props(proto, values)
    if proto.ByteSize() > LARGEST:
        raise ValueError(f"{path}: the graph of {files.human_bytes(proto.ByteSize())} does not fit into one ONNX file")
    onnx.checker.check_model(proto)
    with files.atomic_path(path) as temporary:
        onnx.save(proto, str(temporary))
    return Path(path)


def _require_dynamic(proto: Any, path: str | os.PathLike[str]) -> None:
    for value in (*proto.graph.input, *proto.graph.output):
        first = value.type.tensor_type.shape.dim[0] if value.type.tensor_type.shape.dim else None
        if first is None or not first.dim_param:
            size = first.dim_value if first is not None else "no dimensions"
            raise ValueError(f"{path}: {value.name} has a fixed batch ({size}); the model depends on its batch size")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `to_onnx` was given as metadata."""
    import onnx

    found = {}
    for entry in onnx.load(str(path), load_external_data=False).metadata_props:
        try:
            found[entry.key] = json.loads(entry.value)
        except ValueError:
            found[entry.key] = entry.value
    return found


def check_onnx(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    example_maker: Callable[[int], torch.Tensor | tuple[torch.Tensor, ...]],
    *,
    batches: Sequence[int] = (1, 3),
    atol: float = 1e-4,
    rtol: float = 1e-3,
) -> float:
    """Run graph and model on `example_maker(batch)` for each batch size; the largest absolute difference.

    ParityError names output, batch, shapes or the worst difference where |graph - model| > atol + rtol * |model|.
    """
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    output_names = [value.name for value in session.get_outputs()]
    was_training = model.training
    model.eval()
    worst = 0.0
    try:
        for batch in batches:
            example = example_maker(batch)
            inputs = example if isinstance(example, tuple) else (example,)
            with torch.no_grad():
                expected = model(*inputs)
            expected = expected if isinstance(expected, tuple | list) else (expected,)
            found = session.run(None, {n: x.detach().cpu().numpy() for n, x in zip(names, inputs, strict=True)})
            for name, ours, theirs in zip(output_names, expected, found, strict=True):
                worst = max(worst, _compare(f"{path}: output {name} at batch {batch}", ours, theirs, atol, rtol))
    finally:
        model.train(was_training)
    return worst


def _compare(what: str, ours: torch.Tensor, theirs: np.ndarray, atol: float, rtol: float) -> float:
    reference = ours.detach().float().cpu().numpy()
    if reference.shape != theirs.shape:
        raise ParityError(f"{what}: shape {theirs.shape}, the model gives {reference.shape}")
    difference = np.abs(theirs.astype(np.float32) - reference)
    if not (difference <= atol + rtol * np.abs(reference)).all():
        raise ParityError(f"{what}: differs by up to {difference.max():.3g} (atol {atol:g}, rtol {rtol:g})")
    return float(difference.max(initial=0.0))


def build_once(folder: str | os.PathLike[str], key: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder's artefact for this key, from the cache or made by `build(path)`.

    `key` holds everything that decides the result: hash of the weights, precision, largest shape, builder's version.
    """
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = Path(folder) / digest
    with files.lock(path.with_name(digest + ".lock")):
        if not path.exists():
            with files.atomic_path(path) as temporary:
                build(temporary)
    return path
