"""Two TensorRT plugins (IPluginV3) on the kernels of csrc/: positions and length regulation.

They launch on the stream that TensorRT gives, allocate nothing, and write every value of their outputs. The classes are
made for the TensorRT module at hand, since they inherit from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..cuda import native

NAMESPACE, VERSION = "fastspeech", "1"
POSITIONS, REGULATION = "FastSpeechPositions", "FastSpeechLengthRegulation"


class Plugins:
    """What `network.Builder` asks for: plugins whose kernels come from ``library``."""

    def __init__(self, trt: Any, library: Callable[[], native.Library]) -> None:
        self._positions, self._regulation = positions_class(trt), regulation_class(trt)
        self.library = library

    def positions(self) -> Any:
        """x (B, L, C), lengths int32 (B,) -> x and its positions, 0 beyond the lengths."""
        return self._positions(self.library)

    def regulation(self, least: int = 1) -> Any:
        """x (B, T, C), durations int32 (B, T), anything (F,) -> expanded (B, F, C), lengths int32 (B,).

        An item without frames has ``least`` of its first symbol.
        """
        return self._regulation(self.library, least)


def kernel_types(trt: Any) -> dict[Any, int]:
    """DataType of common.cuh by TensorRT's types."""
    return {trt.float32: 0, trt.float16: 1, trt.bfloat16: 2}


@functools.cache
def base_class(trt: Any) -> type:
    """The class of both plugins for one TensorRT module."""
    types = kernel_types(trt)

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        """What both have: linear memory, the first input's type for what it names, int32 for the rest."""

        floats: tuple[int, ...]  # which of inputs and outputs are of the network's type

        def __init__(self, name: str, outputs: int, library: Callable[[], native.Library]) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = name, VERSION, NAMESPACE
            self.num_outputs = outputs
            self.library = library

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
            given = getattr(in_out[pos], "desc", in_out[pos])
            first = getattr(in_out[0], "desc", in_out[0])
            if given.format != trt.TensorFormat.LINEAR:
                return False
            if pos in self.floats:
                return given.type in types and given.type == first.type
            return given.type == trt.int32

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            pass  # sizes come with each call

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            pass

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

    return Plugin


@functools.cache
def positions_class(trt: Any) -> type:
    types = kernel_types(trt)

    class Positions(base_class(trt)):
        floats = (0, 2)

        def __init__(self, library: Callable[[], native.Library]) -> None:
            super().__init__(POSITIONS, 1, library)

        def get_output_data_types(self, input_types: Any) -> list[Any]:
            return [input_types[0]]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            return [trt.DimsExprs(inputs[0])]

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection([])

        def clone(self) -> Any:
            return Positions(self.library)

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            batch, length, channels = input_desc[0].dims
            self.library().launch(
                "positions", inputs[0], None, outputs[0], inputs[1], batch, batch, length, channels,
                types[input_desc[0].type], stream,
            )  # fmt: skip

    return Positions


@functools.cache
def regulation_class(trt: Any) -> type:
    types = kernel_types(trt)

    class Regulation(base_class(trt)):
        floats = (0, 3)

        def __init__(self, library: Callable[[], native.Library], least: int) -> None:
            super().__init__(REGULATION, 2, library)
            self.least = least

        def get_output_data_types(self, input_types: Any) -> list[Any]:
            return [input_types[0], trt.int32]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            expanded, lengths = trt.DimsExprs(3), trt.DimsExprs(1)
            expanded[0], expanded[1], expanded[2] = inputs[0][0], inputs[2][0], inputs[0][2]
            lengths[0] = inputs[0][0]
            return [expanded, lengths]

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection(
                [trt.PluginField("least", np.array([self.least], np.int32), trt.PluginFieldType.INT32)]
            )

        def clone(self) -> Any:
            return Regulation(self.library, self.least)

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            batch, symbols, channels = input_desc[0].dims
            self.library().launch(
                "length_regulation", inputs[0], inputs[1], outputs[0], outputs[1], batch, symbols, channels,
                output_desc[0].dims[1], self.least, 0, types[input_desc[0].type], stream,
            )  # fmt: skip

    return Regulation


def register(trt: Any, library: Callable[[], native.Library]) -> None:
    """So that engines with the plugins can be read back: their creators, once for a process."""
    positions, regulation = positions_class(trt), regulation_class(trt)

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self, name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = name, VERSION, NAMESPACE
            fields = [] if name == POSITIONS else [trt.PluginField("least", np.array([]), trt.PluginFieldType.INT32)]
            self.field_names = trt.PluginFieldCollection(fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            if self.name == POSITIONS:
                return positions(library)
            least = {field.name: int(field.data[0]) for field in fields}["least"]
            return regulation(library, least)

    registry = trt.get_plugin_registry()
    for name in (POSITIONS, REGULATION):
        if registry.get_creator(name, VERSION, NAMESPACE) is None:
            creator = Creator(name)
            _kept.append(creator)
            registry.register_creator(creator, NAMESPACE)


_kept: list[Any] = []  # the registry does not own what Python made
