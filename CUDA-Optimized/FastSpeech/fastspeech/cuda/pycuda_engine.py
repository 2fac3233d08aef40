"""FastSpeech without PyTorch: numpy in, numpy out, the kernels' cubins launched by PyCUDA on a stream of their own.

    engine = PyCudaEngine.load("voice.safetensors")
    spoken = engine(text, lengths)          # int (B, T), int (B,)

The weights are those of `model.FastSpeech`; sizes are read off them. Device memory is kept between calls and grows when
a longer text comes. B batch, T symbols, F frames, L either, C channels, M mels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import build, launches
from .halves import from_bfloat16, to_bfloat16

EPSILON = 1e-5
ALLOWED_SHARED = 48 << 10  # bytes that a kernel has without asking


class Spoken(NamedTuple):
    """`mel` is 0 beyond a row's length."""

    mel: np.ndarray  # float32 (B, M, F)
    mel_lengths: np.ndarray  # int64 (B,)
    log_durations: np.ndarray  # float32 (B, T)
    durations: np.ndarray  # int64 (B, T)


@dataclass(frozen=True)
class Sizes:
    """Of a network, as its weights say."""

    num_symbols: int
    channels: int
    heads: int
    feed_forward: int
    predictor: int
    num_mels: int
    encoder_blocks: int
    decoder_blocks: int

    @staticmethod
    def of(weights: Mapping[str, np.ndarray]) -> Sizes:
        """ValueError for weights that are not a FastSpeech's, or not of sizes that the kernels take."""
        try:
            num_symbols, channels = weights["embedding.weight"].shape
            width = weights["encoder.blocks.0.attention.qkv.weight"].shape[0]
            found = Sizes(
                num_symbols, channels, width // 192, weights["encoder.blocks.0.feed_forward.first.weight"].shape[0],
                weights["durations.first.weight"].shape[0], weights["mel.weight"].shape[0],
                *(_blocks(weights, side) for side in ("encoder", "decoder")),
            )  # fmt: skip
        except KeyError as error:
            raise ValueError(f"the weights have no {error}: not a FastSpeech") from None
        if width % 192 or found.channels % 32 or found.channels > 512 or found.predictor not in (128, 256):
            raise ValueError(f"the kernels do not take these sizes: {found}, {width} rows of query, key and value")
        if found.feed_forward % 8 or found.num_mels % 8:
            raise ValueError(f"the kernels take multiples of 8, got {found}")
        return found


def _blocks(weights: Mapping[str, np.ndarray], side: str) -> int:
    numbers = [re.match(rf"{side}\.blocks\.(\d+)\.", name) for name in weights]
    return 1 + max((int(match[1]) for match in numbers if match), default=-1)


def driver() -> Any:
    """pycuda.driver, initialised; ImportError that says what to do where it is missing."""
    try:
        import pycuda.driver as cuda
    except ImportError as error:
        raise ImportError(f"PyCUDA is not there ({error}): pip install pycuda, beside a CUDA toolkit") from error
    cuda.init()
    return cuda


class Memory:
    """Device allocations by name, which grow and are used again."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda
        self.held: dict[str, tuple[int, Any]] = {}

    def get(self, name: str, size: int) -> Any:
        """At least ``size`` bytes; what was in them is lost when they grow."""
        if self.held.get(name, (0, None))[0] < size:
            self.held.pop(name, None)
            self.held[name] = (size, self.cuda.mem_alloc(size))
        return self.held[name][1]


class PyCudaEngine:
    """One network on one GPU; calls are not to be made from two threads at once."""

    def __init__(self, weights: Mapping[str, np.ndarray], dtype: str = "float16", device: int = 0) -> None:
        if dtype not in ("float16", "bfloat16"):
            raise ValueError(f"the kernels compute in float16 or bfloat16, got {dtype!r}")
        self.sizes, self.dtype = Sizes.of(weights), dtype
        self.cuda = driver()
        gpu = self.cuda.Device(device)
        self.arch = launches.arch_of(*gpu.compute_capability())
        self.processors = gpu.get_attribute(self.cuda.device_attribute.MULTIPROCESSOR_COUNT)
        self.context = gpu.retain_primary_context()
        self.functions: dict[str, Any] = {}
        with self._current():
            self.stream, self.memory = self.cuda.Stream(), Memory(self.cuda)
            self.weights = {name: self._upload(self._packed(value)) for name, value in weights.items()}
            self.modules = {
                name: self.cuda.module_from_file(str(build.cubin(name, self.arch)))
                for name in build.KERNELS
                if name != "residual_norm"  # the convolutions have it inside
            }

    @classmethod
    def load(cls, path: str | Path, dtype: str = "float16", device: int = 0) -> PyCudaEngine:
        """From a safetensors file."""
        from safetensors.numpy import load_file

        return cls(load_file(str(path)), dtype, device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self.context.push()
        try:
            yield
        finally:
            self.context.pop()

    def _packed(self, values: np.ndarray) -> np.ndarray:
        """In the network's type; of convolutions (O, I, 3) as (O, 3, I)."""
        values = np.asarray(values, np.float32)
        values = np.ascontiguousarray(values.transpose(0, 2, 1) if values.ndim == 3 else values)
        return to_bfloat16(values) if self.dtype == "bfloat16" else values.astype(np.float16)

    def _upload(self, values: np.ndarray) -> Any:
        target = self.cuda.mem_alloc(values.nbytes)
        self.cuda.memcpy_htod(target, values)
        return target

    def _launch(self, launch: launches.Launch, *arguments: Any) -> None:
        """Allocations and None as addresses, int as int32, float as float32."""
        function = self.functions.get(launch.kernel)
        if function is None:
            function = self.modules[launch.source].get_function(launch.kernel)
            if launch.shared > ALLOWED_SHARED:
                attribute = self.cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.set_attribute(attribute, launch.shared)
            self.functions[launch.kernel] = function
        given = [_argument(value) for value in arguments]
        block = (launch.threads, 1, 1)
        function(*given, block=block, grid=launch.grid, shared=launch.shared, stream=self.stream)

    def _convolve(
        self, name: str, x: Any, out: Any, lengths: Any, shape: tuple[int, int, int, int], taps: int, mode: int = 0,
        residual: Any = None, norm: str | None = None,
    ) -> None:  # fmt: skip
        """``shape``: B, L, inputs, outputs. ``norm``: the name of the norm after it."""
        batch, length, inputs, outputs = shape
        plan = launches.plan_convolution(batch, length, inputs, outputs, taps, norm is not None, self.processors)
        parts = arrived = gain = shift = None
        if norm is not None:
            mode |= launches.NORM
            parts = self.memory.get("parts", plan.splits * batch * length * outputs * 4)
            arrived = self._counters(launches.tickets(batch, length))
            gain, shift = self.weights[f"{norm}.weight"], self.weights[f"{norm}.bias"]
        self._launch(
            launches.convolution(self.dtype, plan, batch, length, outputs), x, self.weights[f"{name}.weight"],
            self.weights[f"{name}.bias"], residual, gain, shift, out, parts, arrived, lengths, batch, length, inputs,
            outputs, taps, mode, EPSILON,
        )  # fmt: skip

    def _counters(self, count: int) -> Any:
        """Zeros, which kernels give back as zeros."""
        known = self.memory.held.get("arrived", (0, None))[0]
        found = self.memory.get("arrived", 4 * count)
        if self.memory.held["arrived"][0] != known:
            self.cuda.memset_d32_async(found, 0, count, self.stream)
        return found

    def _stack(self, side: str, x: Any, lengths: Any, batch: int, length: int) -> None:
        """The blocks of one side, from and to x (B, L, C)."""
        sizes = self.sizes
        width, wide = sizes.channels, sizes.heads * 64
        area = batch * length * 2  # bytes of a channel
        qkv, found = self.memory.get("qkv", area * 3 * wide), self.memory.get("found", area * wide)
        between, hidden = self.memory.get("between", area * width), self.memory.get("hidden", area * sizes.feed_forward)
        many = launches.attention_many(batch, length, sizes.heads, self.processors)
        attend = launches.attention64(self.dtype, batch, length, sizes.heads, many)
        for number in range(getattr(sizes, f"{side}_blocks")):
            name = f"{side}.blocks.{number}"
            attention, forward = f"{name}.attention", f"{name}.feed_forward"
            self._convolve(f"{attention}.qkv", x, qkv, lengths, (batch, length, width, 3 * wide), 1)
            self._launch(attend, qkv, found, lengths, length, sizes.heads)
            self._convolve(
                f"{attention}.output", found, between, lengths, (batch, length, wide, width), 1, residual=x,
                norm=f"{attention}.norm",
            )  # fmt: skip
            inner = (batch, length, width, sizes.feed_forward)
            self._convolve(f"{forward}.first", between, hidden, lengths, inner, 3, launches.RELU)
            outer = (batch, length, sizes.feed_forward, width)
            self._convolve(f"{forward}.second", hidden, x, lengths, outer, 3, residual=between, norm=f"{forward}.norm")

    def __call__(
        self,
        text: np.ndarray,
        lengths: np.ndarray,
        speed: float | np.ndarray = 1.0,
        emphasis: np.ndarray | None = None,
        pauses: np.ndarray | None = None,
    ) -> Spoken:
        """As `FastSpeech.forward`. ValueError for symbols or lengths out of range."""
        text, lengths = np.ascontiguousarray(text, np.int32), np.ascontiguousarray(lengths, np.int32)
        self._check(text, lengths)
        if not ((speeds := np.asarray(speed)) > 0).all() or not np.isfinite(speeds).all():
            raise ValueError(f"a speed must be above 0, got {speed}")
        with self._current():
            hidden, logs, durations = self._encode(text, lengths, speed, emphasis, pauses)
            mel, mel_lengths = self._decode(hidden, durations, *text.shape)
        durations = durations.astype(np.int64)
        durations[durations.sum(1) == 0, 0] = 1
        return Spoken(mel, mel_lengths, logs, durations)

    def _check(self, text: np.ndarray, lengths: np.ndarray) -> None:
        if text.ndim != 2 or lengths.shape != text.shape[:1] or not text.size:
            raise ValueError(f"expected text (B, T) and lengths (B,), got {text.shape} and {lengths.shape}")
        if text.min() < 0 or text.max() >= self.sizes.num_symbols:
            raise ValueError(
                f"symbols must be from 0 to {self.sizes.num_symbols - 1}, got {text.min()} to {text.max()}"
            )
        if lengths.min() < 0 or lengths.max() > text.shape[1]:
            raise ValueError(f"lengths must be from 0 to {text.shape[1]}, got {lengths.tolist()}")

    def _send(self, name: str, values: np.ndarray) -> Any:
        target = self.memory.get(name, values.nbytes)
        self.cuda.memcpy_htod_async(target, values, self.stream)
        return target

    def _encode(
        self, text: np.ndarray, lengths: np.ndarray, speed: float | np.ndarray, emphasis: np.ndarray | None,
        pauses: np.ndarray | None,
    ) -> tuple[Any, np.ndarray, np.ndarray]:  # fmt: skip
        (batch, symbols), sizes, weights = text.shape, self.sizes, self.weights
        sent = [text, lengths, np.full(batch, speed, np.float32)]
        places = [self._send(name, values) for name, values in zip(("text", "lengths", "speed"), sent, strict=True)]
        # Arrays that a copy reads stay alive until the stream is waited for below.
        controls: list[Any] = []
        for name, values, kind in (("emphasis", emphasis, np.float32), ("pauses", pauses, np.int32)):
            if values is not None:
                sent.append(np.ascontiguousarray(np.broadcast_to(values, text.shape), kind))
            controls.append(None if values is None else self._send(name, sent[-1]))
        x = self.memory.get("encoded", text.size * sizes.channels * 2)
        self._launch(
            launches.positions(self.dtype, batch, symbols, sizes.channels), weights["embedding.weight"], places[0], x,
            places[1], sizes.num_symbols, symbols, sizes.channels,
        )  # fmt: skip
        self._stack("encoder", x, places[1], batch, symbols)
        parts = [
            weights[f"durations.{name}.{part}"]
            for name in ("first", "first_norm", "second", "second_norm", "output")
            for part in ("weight", "bias")
        ]
        logs, durations = self.memory.get("logs", text.nbytes), self.memory.get("durations", text.nbytes)
        self._launch(
            launches.duration_predictor(self.dtype, batch, symbols, sizes.channels, sizes.predictor), x, *parts,
            places[1], places[2], *controls, logs, durations, symbols, sizes.channels, launches.LONGEST_FRAMES, EPSILON,
        )  # fmt: skip
        found = np.empty(text.shape, np.float32), np.empty(text.shape, np.int32)
        for target, source in zip(found, (logs, durations), strict=True):
            self.cuda.memcpy_dtoh_async(target, source, self.stream)
        self.stream.synchronize()
        return x, *found

    def _decode(self, hidden: Any, durations: np.ndarray, batch: int, symbols: int) -> tuple[np.ndarray, np.ndarray]:
        sizes = self.sizes
        size = max(int(durations.sum(1).max()), 1)
        x = self.memory.get("expanded", batch * size * sizes.channels * 2)
        lengths, mel = (
            self.memory.get("mel_lengths", 4 * batch),
            self.memory.get("mel", batch * size * sizes.num_mels * 2),
        )
        self._launch(
            launches.length_regulation(self.dtype, batch, sizes.channels, size), hidden,
            self.memory.held["durations"][1], x, lengths, symbols, sizes.channels, size, 1, 1,
        )  # fmt: skip
        self._stack("decoder", x, lengths, batch, size)
        self._convolve("mel", x, mel, lengths, (batch, size, sizes.channels, sizes.num_mels), 1)
        bits = np.empty((batch, size, sizes.num_mels), np.uint16)
        counted = np.empty(batch, np.int32)
        self.cuda.memcpy_dtoh_async(bits, mel, self.stream)
        self.cuda.memcpy_dtoh_async(counted, lengths, self.stream)
        self.stream.synchronize()
        values = from_bfloat16(bits) if self.dtype == "bfloat16" else bits.view(np.float16).astype(np.float32)
        return np.ascontiguousarray(values.transpose(0, 2, 1)), counted.astype(np.int64)


def _argument(value: Any) -> Any:
    if value is None:
        return np.intp(0)
    if isinstance(value, int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else np.intp(int(value))
