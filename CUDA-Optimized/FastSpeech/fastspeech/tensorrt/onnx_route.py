"""The other way to an engine: TensorRT reads an ONNX file (see `fastspeech.export`) instead of being told each layer.

What it costs: no plugins, types as they are in the file, and a graph that somebody else's exporter chose. What it saves
is `network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # smallest, usual, largest shape


def build(trt: Any, path: Path, shapes: Mapping[str, Range], capability: str | None = None) -> bytes:
    """A serialised engine of an ONNX file. ``shapes``: of every input whose sizes are dynamic.

    ValueError for a file that TensorRT does not read, with its reasons, or shapes that do not fit its inputs.
    """
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, trt.Logger(trt.Logger.WARNING))
    if not parser.parse_from_file(str(path)):  # finds weights that lie beside the file
        reasons = "; ".join(str(parser.get_error(number).desc()) for number in range(parser.num_errors))
        raise ValueError(f"{path}: TensorRT cannot read it: {reasons}")
    inputs = {}
    for number in range(definition.num_inputs):
        given = definition.get_input(number)
        inputs[given.name] = tuple(given.shape)
    missing = [name for name, shape in inputs.items() if -1 in shape and name not in shapes]
    unknown = [name for name in shapes if name not in inputs]
    if missing or unknown:
        raise ValueError(f"{path}: inputs are {inputs}; no shapes for {missing}, unknown {unknown}")
    options = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name, (smallest, usual, largest) in shapes.items():
        profile.set_shape(name, smallest, usual, largest)
    options.add_optimization_profile(profile)
    if capability is not None:
        options.num_compute_capabilities = 1
        options.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    engine = builder.build_serialized_network(definition, options)
    if engine is None:
        raise RuntimeError(f"{path}: TensorRT made no engine; its log says why")
    return bytes(engine)
