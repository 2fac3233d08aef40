"""FastSpeech's two halves as TensorRT networks, layer by layer from the state dict of `model.FastSpeech`.

The host learns in between how many frames there are, so both have dynamic shapes and no output whose size depends on
values. With plugins positions and length regulation are the kernels of csrc/; without, positions come from a table and
the decoder's input is what was regulated before.

B batch, T symbols, F frames, L either, C channels, H heads, D channels of a head, M mels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .layers import Layers

PERIOD = 10000.0
LONGEST = 1024  # frames of one symbol
FAR = -1e9  # a score, in float32, that a softmax makes 0


@dataclass(frozen=True)
class Shapes:
    """The ranges that an engine is made for: batches from 1, lengths from ``shortest`` to ``longest``."""

    batch: int
    longest: int
    shortest: int = 1
    symbols: int = 0  # of the decoder's input with plugins: at most so many

    def __post_init__(self) -> None:
        if self.batch < 1 or not 1 <= self.shortest <= self.longest:
            raise ValueError(f"batch and lengths must be 1 or more and in order, got {self}")


def sinusoids(length: int, channels: int) -> np.ndarray:
    """float64 (length, channels): row p is position p + 1."""
    angles = np.arange(1, length + 1)[:, None] * np.exp(np.arange(0, channels, 2) * (-math.log(PERIOD) / channels))
    return np.stack([np.sin(angles), np.cos(angles)], 2).reshape(length, channels)


class Builder:
    """Makes one half in ``layers``, of sizes ``config`` (a FastSpeechConfig), for lengths up to ``shapes.longest``.

    ``plugins``: an object with `positions(type)` and `regulation(type)` that give IPluginV3 objects, or None.
    """

    def __init__(self, layers: Layers, config: Any, shapes: Shapes, plugins: Any = None) -> None:
        self.layers, self.config, self.shapes, self.plugins = layers, config, shapes, plugins

    def encoder(self) -> None:
        """Inputs text (B, T), lengths (B,), speed (B,), emphasis (B, T), pauses (B, T); outputs hidden (B, T, C),
        log_durations float32 (B, T), durations int32 (B, T) as `FastSpeech.encode` and `round_durations` have them, but
        that an item without frames stays so."""
        add, trt = self.layers, self.layers.trt
        text = add.input("text", trt.int32, (-1, -1))
        lengths = add.input("lengths", trt.int32, (-1,))
        speed = add.input("speed", trt.float32, (-1,))
        emphasis = add.input("emphasis", trt.float32, (-1, -1))
        pauses = add.input("pauses", trt.int32, (-1, -1))
        within = self._within(lengths, add.size(text, 1))
        table = add.constant(add.weight("embedding.weight"))
        symbols = add.elementwise(text, add.cast(within, trt.int32), "PROD")  # padding reads row 0
        x = add.gather(table, symbols)
        x = self._stack("encoder", self.config.encoder_blocks, x, lengths, within)
        logs = self._predictor(x, within)
        frames = self._round(logs, speed, emphasis)
        durations = add.elementwise(add.cast(frames, trt.int32), pauses, "SUM")
        durations = add.elementwise(durations, add.constant(np.array([[0]])), "MAX")
        durations = add.elementwise(durations, add.cast(within, trt.int32), "PROD")
        for name, tensor in (("hidden", x), ("log_durations", logs), ("durations", durations)):
            add.output(name, tensor)

    def decoder(self) -> None:
        """Output mel (B, F, M), 0 beyond the lengths. Inputs, with plugins: hidden (B, T, C), durations int32 (B, T)
        and frames (F,), of which only the size counts, and mel_lengths (B,) is an output; without: expanded (B, F, C),
        without positions, and mel_lengths int32 (B,)."""
        add, trt, channels = self.layers, self.layers.trt, self.config.channels
        if self.plugins is None:
            x = add.input("expanded", add.dtype, (-1, -1, channels))
            lengths = add.input("mel_lengths", trt.int32, (-1,))
        else:
            hidden = add.input("hidden", add.dtype, (-1, -1, channels))
            durations = add.input("durations", trt.int32, (-1, -1))
            frames = add.input("frames", trt.int32, (-1,))
            x, lengths = add.plugin([hidden, durations, frames], self.plugins.regulation())
        within = self._within(lengths, add.size(x, 1))
        x = self._stack("decoder", self.config.decoder_blocks, x, lengths, within)
        add.output("mel", self._keep(add.linear(x, "mel"), within))
        if self.plugins is not None:
            add.output("mel_lengths", lengths)

    def _within(self, lengths: Any, size: Any) -> Any:
        """bool (B, L): within each item's length."""
        add = self.layers
        places = add.head(add.constant(np.arange(self.shapes.longest)), size)
        return add.elementwise(add.shuffle(places, None, (1, -1)), add.shuffle(lengths, None, (-1, 1)), "LESS")

    def _keep(self, x: Any, within: Any) -> Any:
        """x (B, L, C), 0 in the padding."""
        add = self.layers
        return add.elementwise(x, add.cast(add.shuffle(within, None, (0, 0, 1)), x.dtype), "PROD")

    def _stack(self, name: str, blocks: int, x: Any, lengths: Any, within: Any) -> Any:
        add, trt = self.layers, self.layers.trt
        if self.plugins is None:
            table = add.constant(sinusoids(self.shapes.longest, self.config.channels))
            table = add.shuffle(add.head(table, add.size(x, 1)), None, (1, -1, self.config.channels))
            x = self._keep(add.elementwise(x, table, "SUM"), within)
        else:
            (x,) = add.plugin([x, lengths], self.plugins.positions())
        x = add.watch(f"{name}.positions", x)
        # An empty item looks at its first place: a softmax over nothing is not a number.
        first = add.elementwise(lengths, add.constant(np.array([1])), "MAX")
        keys = add.shuffle(self._within(first, add.size(x, 1)), None, (0, 1, 1, -1))
        if keys.dtype != trt.bool:
            raise ValueError(f"expected a mask of bool, got {keys.dtype}")
        for number in range(blocks):
            x = self._block(f"{name}.blocks.{number}", x, keys, within)
        return x

    def _block(self, name: str, x: Any, keys: Any, within: Any) -> Any:
        add = self.layers
        found = self._attention(f"{name}.attention", x, keys)
        x = add.norm(add.elementwise(x, found, "SUM"), f"{name}.attention.norm")
        x = self._keep(add.watch(f"{name}.attention", x), within)
        hidden = self._keep(add.relu(add.convolution(x, f"{name}.feed_forward.first")), within)
        hidden = add.convolution(hidden, f"{name}.feed_forward.second")
        x = add.norm(add.elementwise(x, hidden, "SUM"), f"{name}.feed_forward.norm")
        return self._keep(add.watch(f"{name}.feed_forward", x), within)

    def _attention(self, name: str, x: Any, keys: Any) -> Any:
        """Before the residual."""
        add, float32 = self.layers, self.layers.trt.float32
        heads, width = self.config.heads, self.config.head_channels
        weight, bias = add.weight(f"{name}.qkv.weight"), add.weight(f"{name}.qkv.bias")
        size = heads * width
        parts = []
        for number in range(3):
            rows = slice(number * size, (number + 1) * size)
            operation = add.trt.MatrixOperation
            matrix = add.constant(weight[rows][None])
            part = add.network.add_matrix_multiply(x, operation.NONE, matrix, operation.TRANSPOSE).get_output(0)
            part = add.elementwise(part, add.constant(bias[rows][None, None]), "SUM")
            parts.append(add.shuffle(part, None, (0, -1, heads, width), (0, 2, 1, 3)))  # (B, H, L, D)
        query, key, value = parts
        scores = add.cast(add.product(query, key, True), float32)
        scores = add.elementwise(scores, add.number(width**-0.5, 4), "PROD")
        scores = add.select(keys, scores, add.number(FAR, 4))
        found = add.product(add.cast(add.softmax(scores), x.dtype), value, False)
        return add.linear(add.shuffle(found, (0, 2, 1, 3), (0, -1, size)), f"{name}.output")

    def _predictor(self, x: Any, within: Any) -> Any:
        """float32 log(frames + 1) (B, T), 0 in the padding."""
        add = self.layers
        for name in ("first", "second"):
            x = add.relu(add.convolution(x, f"durations.{name}"))
            x = self._keep(add.norm(x, f"durations.{name}_norm"), within)
        logs = self._keep(add.linear(x, "durations.output"), within)
        return add.cast(add.shuffle(logs, None, (0, -1)), add.trt.float32)

    def _round(self, logs: Any, speed: Any, emphasis: Any) -> Any:
        """Whole frames as float32, rounded half up."""
        add = self.layers
        zero, longest = add.number(0, 2), add.number(LONGEST, 2)

        def clamp(x: Any) -> Any:
            return add.elementwise(add.elementwise(x, zero, "MAX"), longest, "MIN")

        frames = clamp(add.elementwise(add.unary(logs, "EXP"), add.number(1, 2), "SUB"))
        frames = add.elementwise(frames, emphasis, "PROD")
        frames = add.elementwise(frames, add.shuffle(speed, None, (-1, 1)), "DIV")
        return clamp(add.unary(add.elementwise(frames, add.number(0.5, 2), "SUM"), "FLOOR"))


def profile_shapes(half: str, config: Any, shapes: Shapes, plugins: bool) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The smallest, usual and largest shape of each input of "encoder" or "decoder"."""
    lengths = (shapes.shortest, shapes.longest, shapes.longest)
    batches = (1, 1, shapes.batch)
    if half == "encoder":
        flat, wide = ("lengths", "speed"), ("text", "emphasis", "pauses")
        found = {name: tuple((batch,) for batch in batches) for name in flat}
        return found | {name: tuple(zip(batches, lengths, strict=True)) for name in wide}
    if not plugins:
        rows = tuple((batch, length, config.channels) for batch, length in zip(batches, lengths, strict=True))
        return {"expanded": rows, "mel_lengths": tuple((batch,) for batch in batches)}
    symbols = (1, shapes.symbols, shapes.symbols)
    return {
        "hidden": tuple((batch, count, config.channels) for batch, count in zip(batches, symbols, strict=True)),
        "durations": tuple(zip(batches, symbols, strict=True)),
        "frames": tuple((length,) for length in lengths),
    }


def build(
    trt: Any,
    half: str,
    config: Any,
    weights: Mapping[str, np.ndarray],
    shapes: Shapes,
    dtype: str = "float16",
    plugins: Any = None,
    capability: str | None = None,
    watch: bool = False,
) -> bytes:
    """A serialised engine of "encoder" or "decoder"; RuntimeError where TensorRT makes none.

    ``capability``: "SM80" and the like, for TensorRT-RTX, which then needs no GPU. ``watch``: every layer's result is
    an output, named by its module.
    """
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network, kept = define(trt, builder, half, config, weights, shapes, dtype, plugins, watch)
    options = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name, (smallest, usual, largest) in profile_shapes(half, config, shapes, plugins is not None).items():
        profile.set_shape(name, smallest, usual, largest)
    options.add_optimization_profile(profile)
    if capability is not None:
        options.num_compute_capabilities = 1
        options.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    engine = builder.build_serialized_network(network, options)
    del kept
    if engine is None:
        raise RuntimeError(f"TensorRT made no engine of the {half}; its log says why")
    return bytes(engine)


def define(
    trt: Any, builder: Any, half: str, config: Any, weights: Mapping[str, np.ndarray], shapes: Shapes, dtype: str,
    plugins: Any = None, watch: bool = False,
) -> tuple[Any, Layers]:  # fmt: skip
    """The network definition, and what has to live as long as it."""
    if half not in ("encoder", "decoder"):
        raise ValueError(f"half must be encoder or decoder, got {half!r}")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    layers = Layers(trt, network, weights, dtype)
    getattr(Builder(layers, config, shapes, plugins), half)()
    for name, tensor in layers.watched.items() if watch else ():
        layers.output(name, tensor)
    return network, layers
