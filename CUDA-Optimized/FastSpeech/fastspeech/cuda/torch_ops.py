"""The kernels as PyTorch operators `fastspeech::...`, of the meaning of `reference`, for inference.

On a CUDA device of 8.0 or newer they launch on the current stream; on a CPU, and where a kernel does not take a type or
a size (`reasons`), they compute the reference. Nothing is built or loaded before the first launch. Each has a fake
form, so that torch.compile and torch.export see shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import launches, native, reference

HALF_TYPES = (torch.float16, torch.bfloat16)
LIBRARY = torch.library.Library("fastspeech", "DEF")
_host: native.Library | None = None  # plays the device for tensors of the CPU, in tests


@contextmanager
def host_library(library: native.Library) -> Iterator[None]:
    """Within the block tensors on the CPU go to ``library``, which takes addresses of the host's memory."""
    global _host
    before, _host = _host, library
    try:
        yield
    finally:
        _host = before


@functools.cache
def _of_device(index: int) -> tuple[native.Library, int]:
    properties = torch.cuda.get_device_properties(index)
    return native.for_arch(launches.arch_of(properties.major, properties.minor)), properties.multi_processor_count


def device_library(x: Tensor) -> tuple[native.Library, int, int] | None:
    """The launchers, the processors and the stream for x; None on a CPU."""
    if x.is_cuda:
        return *_of_device(x.device.index), torch.cuda.current_stream(x.device).cuda_stream
    return None if _host is None else (_host, launches.PROCESSORS, 0)


def type_of(x: Tensor) -> int:
    return launches.TYPES[str(x.dtype).removeprefix("torch.")]


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def reasons(name: str, x: Tensor, **sizes: int) -> str | None:
    """Why a kernel does not take this, if it does not."""
    simple = name in ("regulate", "add_positions", "embed", "residual_norm")
    if x.dtype not in (HALF_TYPES if not simple else (*HALF_TYPES, torch.float32)):
        return f"{name} has no kernel for {x.dtype}"
    if name == "residual_norm" and sizes["channels"] > 2048:
        return f"channels {sizes['channels']} are more than 2048"
    if name.startswith("convolution") and (sizes["inputs"] % 8 or sizes["outputs"] % 8 or sizes["taps"] not in (1, 3)):
        return f"convolutions need channels in multiples of 8 and 1 or 3 taps, got {sizes}"
    if name == "convolution_norm" and sizes["outputs"] > 1024:
        return f"a norm after a convolution takes 1024 channels at most, got {sizes['outputs']}"
    if name == "predict_durations" and (
        sizes["inputs"] % 32 or sizes["inputs"] > 1024 or sizes["hidden"] not in (128, 256)
    ):
        return f"the predictor takes inputs in multiples of 32 up to 1024 and 128 or 256 hidden, got {sizes}"
    return None


def _ready(device: Any, name: str, x: Tensor, **sizes: int) -> bool:
    return device is not None and reasons(name, x, **sizes) is None


def _whole(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on, as vectors are loaded: a view into a tensor may begin anywhere."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _same(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """`_whole`, and of x's type and device; ValueError if not of that."""
    for other in others:
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(f"expected {x.dtype} on {x.device}, got {other.dtype} on {other.device}")
    return [None if other is None else _whole(other) for other in (x, *others)]


def _ints(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Contiguous int32 on x's device."""
    return [None if other is None else other.to(x.device, torch.int32).contiguous() for other in others]


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Launches go to the current device, which the first tensor's may not be."""

    @functools.wraps(function)
    def run(x: Tensor, *others: Any, **named: Any) -> Any:
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return function(x, *others, **named)
        return function(x, *others, **named)

    return run


@_on_its_device
def regulate(
    x: Tensor, durations: Tensor, size: int, least: int = 0, with_positions: bool = False
) -> tuple[Tensor, Tensor]:
    """See `reference.regulate`."""
    device = device_library(x)
    (durations,) = _ints(x, durations)
    if not _ready(device, "regulate", x):
        return reference.regulate(x, durations, size, least, with_positions)
    (x,) = _same(x)
    batch, symbols, channels = x.shape
    out, lengths = x.new_empty(batch, size, channels), durations.new_empty(batch)
    library, _, stream = device
    library.launch(
        "length_regulation", *map(address, (x, durations, out, lengths)), batch, symbols, channels, size, least,
        int(with_positions), type_of(x), stream,
    )  # fmt: skip
    return out, lengths


@_on_its_device
def add_positions(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """See `reference.add_positions`."""
    return _positions("add_positions", x, None, lengths)


@_on_its_device
def embed(table: Tensor, symbols: Tensor, lengths: Tensor | None = None) -> Tensor:
    """See `reference.embed`."""
    return _positions("embed", table, symbols, lengths)


def _positions(name: str, x: Tensor, symbols: Tensor | None, lengths: Tensor | None) -> Tensor:
    device = device_library(x)
    symbols, lengths = _ints(x, symbols, lengths)
    if not _ready(device, name, x):
        return reference.add_positions(x, lengths) if symbols is None else reference.embed(x, symbols, lengths)
    (x,) = _same(x)
    shape = x.shape if symbols is None else (*symbols.shape, x.shape[1])
    out = x.new_empty(shape)
    library, _, stream = device
    library.launch(
        "positions", *map(address, (x, symbols, out, lengths)), shape[0], len(x), shape[1], shape[2], type_of(x), stream
    )
    return out


@_on_its_device
def residual_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, gain: Tensor, shift: Tensor, lengths: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:  # fmt: skip
    """See `reference.residual_norm`."""
    device = device_library(x)
    (lengths,) = _ints(x, lengths)
    if not _ready(device, "residual_norm", x, channels=x.shape[2]):
        return reference.residual_norm(x, bias, residual, gain, shift, lengths, epsilon)
    x, bias, residual, gain, shift = _same(x, bias, residual, gain, shift)
    out = torch.empty_like(x)
    library, _, stream = device
    library.launch(
        "residual_norm", *map(address, (x, bias, residual, gain, shift, out, lengths)), *x.shape, epsilon, type_of(x),
        stream,
    )  # fmt: skip
    return out


@_on_its_device
def attention64(qkv: Tensor, lengths: Tensor | None, heads: int) -> Tensor:
    """See `reference.attention64`."""
    device = device_library(qkv)
    (lengths,) = _ints(qkv, lengths)
    if not _ready(device, "attention64", qkv):
        return reference.attention64(qkv, lengths, heads)
    (qkv,) = _same(qkv)
    batch, length, width = qkv.shape
    if width != 192 * heads:
        raise ValueError(f"expected 3 x {heads} heads x 64 channels, got {width}")
    out = qkv.new_empty(batch, length, 64 * heads)
    library, processors, stream = device
    many = launches.attention_many(batch, length, heads, processors)
    library.launch(
        "attention64", *map(address, (qkv, out, lengths)), batch, length, heads, int(many), type_of(qkv), stream
    )
    return out


@_on_its_device
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None = None, relu: bool = False,
    plan: launches.Plan | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.convolution`. ``plan``: another than the usual one, to measure it."""
    device = device_library(x)
    (lengths,) = _ints(x, lengths)
    outputs, taps, inputs = weight.shape
    if not _ready(device, "convolution", x, inputs=inputs, outputs=outputs, taps=taps):
        return reference.convolution(x, weight, bias, lengths, relu)
    return _convolve(device, x, weight, bias, None, None, None, lengths, launches.RELU * relu, 0.0, None, plan)


@_on_its_device
def convolution_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gain: Tensor, shift: Tensor,
    lengths: Tensor | None = None, relu: bool = False, epsilon: float = 1e-5, arrived: Tensor | None = None,
    plan: launches.Plan | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.convolution_norm`. ``arrived``: int32 zeros, `launches.tickets` of them, which come back as zeros,
    for calls in turn on one stream; made anew where not given. ``plan``: other than the usual one."""
    device = device_library(x)
    (lengths,) = _ints(x, lengths)
    outputs, taps, inputs = weight.shape
    if not _ready(device, "convolution_norm", x, inputs=inputs, outputs=outputs, taps=taps):
        return reference.convolution_norm(x, weight, bias, residual, gain, shift, lengths, relu, epsilon)
    mode = launches.NORM | launches.RELU * relu
    return _convolve(device, x, weight, bias, residual, gain, shift, lengths, mode, epsilon, arrived, plan)


def _convolve(
    device: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gain: Tensor | None,
    shift: Tensor | None, lengths: Tensor | None, mode: int, epsilon: float, arrived: Tensor | None,
    plan: launches.Plan | None,
) -> Tensor:  # fmt: skip
    x, weight, bias, residual, gain, shift = _same(x, weight, bias, residual, gain, shift)
    (batch, length, inputs), (outputs, taps, expected) = x.shape, weight.shape
    if inputs != expected:
        raise ValueError(f"expected {expected} channels, got {inputs}")
    library, processors, stream = device
    norm = bool(mode & launches.NORM)
    if plan is None:
        plan = launches.plan_convolution(batch, length, inputs, outputs, taps, norm, processors)
    parts = None
    if norm:
        parts = torch.empty(plan.splits * batch * length * outputs, device=x.device, dtype=torch.float32)
        if arrived is None:
            arrived = torch.zeros(launches.tickets(batch, length), device=x.device, dtype=torch.int32)
    out = x.new_empty(batch, length, outputs)
    library.launch(
        "convolution", *map(address, (x, weight, bias, residual, gain, shift, out, parts, arrived, lengths)), batch,
        length, inputs, outputs, taps, mode, epsilon, plan.tile, plan.splits, type_of(x), stream,
    )  # fmt: skip
    return out


@_on_its_device
def predict_durations(
    x: Tensor, weights: list[Tensor], lengths: Tensor | None = None, speed: Tensor | None = None,
    emphasis: Tensor | None = None, pauses: Tensor | None = None, epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `reference.predict_durations`."""
    device = device_library(x)
    lengths, pauses = _ints(x, lengths, pauses)
    speed, emphasis = (None if y is None else y.to(x.device, torch.float32).contiguous() for y in (speed, emphasis))
    (batch, symbols, inputs), hidden = x.shape, len(weights[0])
    if not _ready(device, "predict_durations", x, inputs=inputs, hidden=hidden):
        return reference.predict_durations(x, weights, lengths, speed, emphasis, pauses, epsilon)
    x, *weights = _same(x, *weights)
    logs = torch.empty(batch, symbols, device=x.device, dtype=torch.float32)
    durations = torch.empty(batch, symbols, device=x.device, dtype=torch.int32)
    library, _, stream = device
    library.launch(
        "duration_predictor", *map(address, (x, *weights, lengths, speed, emphasis, pauses, logs, durations)), batch,
        symbols, inputs, hidden, launches.LONGEST_FRAMES, epsilon, type_of(x), stream,
    )  # fmt: skip
    return logs, durations


# Operators: a schema, the function above, and the shapes of its results.


def _fake_regulate(x, durations, size, least=0, with_positions=False):
    return x.new_empty(x.shape[0], size, x.shape[2]), x.new_empty(x.shape[0], dtype=torch.int32)


def _fake_durations(x, weights, lengths=None, speed=None, emphasis=None, pauses=None, epsilon=1e-5):
    return x.new_empty(x.shape[:2], dtype=torch.float32), x.new_empty(x.shape[:2], dtype=torch.int32)


def _fake_convolution(x, weight, *others, **named):
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0])


OPERATORS = (
    (
        "regulate(Tensor x, Tensor durations, SymInt size, int least=0, bool with_positions=False) -> (Tensor, Tensor)",
        regulate,
        _fake_regulate,
    ),
    (
        "add_positions(Tensor x, Tensor? lengths=None) -> Tensor",
        add_positions,
        lambda x, lengths=None: x.new_empty(x.shape),
    ),
    (
        "embed(Tensor table, Tensor symbols, Tensor? lengths=None) -> Tensor",
        embed,
        lambda table, symbols, lengths=None: table.new_empty(*symbols.shape, table.shape[1]),
    ),
    (
        "residual_norm(Tensor x, Tensor? bias, Tensor? residual, Tensor gain, Tensor shift, Tensor? lengths=None, "
        "float epsilon=1e-5) -> Tensor",
        residual_norm,
        lambda x, *others, **named: x.new_empty(x.shape),
    ),
    (
        "attention64(Tensor qkv, Tensor? lengths, int heads) -> Tensor",
        attention64,
        lambda qkv, lengths, heads: qkv.new_empty(*qkv.shape[:2], 64 * heads),
    ),
    (
        "convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths=None, bool relu=False) -> Tensor",
        convolution,
        _fake_convolution,
    ),
    (
        "convolution_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor gain, Tensor shift, "
        "Tensor? lengths=None, bool relu=False, float epsilon=1e-5) -> Tensor",
        convolution_norm,
        _fake_convolution,
    ),
    (
        "predict_durations(Tensor x, Tensor[] weights, Tensor? lengths=None, Tensor? speed=None, "
        "Tensor? emphasis=None, Tensor? pauses=None, float epsilon=1e-5) -> (Tensor, Tensor)",
        predict_durations,
        _fake_durations,
    ),
)
for _schema, _function, _fake in OPERATORS:
    _name = _schema.split("(")[0]
    LIBRARY.define(_schema)
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)
    torch.library.register_fake(f"fastspeech::{_name}", _fake, lib=LIBRARY)
