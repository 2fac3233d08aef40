"""Where the time of a call goes: the network's halves, and each kernel beside its plain form, with what the memory and
the matrix units would allow at best. B batch, L length, C channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlx import bench
from dlx.inference import GraphedModel

from .cuda import launches, reference, torch_ops
from .model import FastSpeechConfig
from .registry import ARCHITECTURES

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig

REPEATS = 20  # calls in one graph, so that launching costs nothing


@dataclass
class Operation:
    """A kernel at one place of the network. ``times``: how often a call has it."""

    name: str
    times: int
    operator: str
    arguments: tuple[Any, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best, as measured beside the kernels: a copy, read and write, and a matrix product."""

    bytes_per_second: float
    flops_per_second: float

    @staticmethod
    def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
        large = device.type == "cuda"
        source = torch.ones((1 << 30 if large else 1 << 25) // dtype.itemsize, dtype=dtype, device=device)
        target, size = torch.empty_like(source), 8192 if large else 512
        square = torch.ones(size, size, dtype=dtype, device=device) / size
        product = torch.empty_like(square)
        moved, computed = 2.0 * source.numel() * dtype.itemsize, 2.0 * size**3
        calls = ((lambda: target.copy_(source), moved), (lambda: torch.mm(square, square, out=product), computed))
        best = [
            bench.measure(call, items=work, unit="/s", device=device, warmup=3, iterations=20).p50_ms
            for call, work in calls
        ]
        return Ceilings(*(1e3 * work / milliseconds for milliseconds, (_, work) in zip(best, calls, strict=True)))


def operations(
    config: FastSpeechConfig, batch: int, text: int, frames: int, dtype: torch.dtype, device: Any
) -> list[Operation]:
    """Every launch of the network, with the least it has to compute and to move."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

    def full(value: int) -> Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=device)

    width, wide, size = config.channels, config.heads * config.head_channels, dtype.itemsize
    gain = made(width)

    def product(
        name: str, times: int, length: int, inputs: int, outputs: int, taps: int, norm: bool, relu: bool = False
    ):
        x, weight, bias = made(batch, length, inputs), made(outputs, taps, inputs, scale=0.02), made(outputs)
        moved = size * (x.numel() + weight.numel() + batch * length * outputs * (2 if norm else 1))
        flops = 2.0 * batch * length * outputs * inputs * taps
        if norm:
            arguments = (x, weight, bias, made(batch, length, outputs), gain, gain, full(length), False, 1e-5)
            return Operation(name, times, "convolution_norm", arguments, flops, moved)
        return Operation(name, times, "convolution", (x, weight, bias, full(length), relu), flops, moved)

    found = []
    for side, length, blocks in (("text", text, config.encoder_blocks), ("mel", frames, config.decoder_blocks)):
        qkv = made(batch, length, 3 * wide)
        area = float(batch * length)
        found += [
            product(f"{side} qkv", blocks, length, width, 3 * wide, 1, False),
            Operation(
                f"{side} attention", blocks, "attention64", (qkv, full(length), config.heads),
                4.0 * area * length * wide, size * area * 4 * wide,
            ),
            product(f"{side} attention output + norm", blocks, length, wide, width, 1, True),
            product(f"{side} first convolution + relu", blocks, length, width, config.feed_forward, 3, False, True),
            product(f"{side} second convolution + norm", blocks, length, config.feed_forward, width, 3, True),
        ]  # fmt: skip
    x, mel = made(batch, text, width), made(batch, frames, width)
    hidden = config.predictor
    weights = [made(hidden, 3, width, scale=0.05), made(hidden), made(hidden), made(hidden)]
    weights += [made(hidden, 3, hidden, scale=0.05), made(hidden), made(hidden), made(hidden), made(hidden), made(1)]
    symbols = torch.ones(batch, text, dtype=torch.int32, device=device)
    durations = torch.full((batch, text), frames // text, dtype=torch.int32, device=device)
    found += [
        Operation(
            "embedding + positions", 1, "embed", (made(config.num_symbols, width), symbols, full(text)),
            0, size * 2.0 * x.numel(),
        ),
        Operation(
            "duration predictor", 1, "predict_durations", (x, weights, full(text), None, None, None, 1e-5),
            6.0 * batch * text * hidden * (width + hidden), size * float(x.numel() + sum(w.numel() for w in weights)),
        ),
        Operation(
            "length regulation + positions", 1, "regulate", (x, durations, frames, 1, True),
            0, size * float(x.numel() + mel.numel()),
        ),
        Operation(
            "residual + norm", 0, "residual_norm", (mel, gain, mel, gain, gain, full(frames), 1e-5),
            0, size * 3.0 * mel.numel(),
        ),
        product("mel linear", 1, frames, width, config.num_mels, 1, False),
    ]  # fmt: skip
    return found


def repeated(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], int]:
    """A call many times over as one graph, and how many; itself on a CPU."""
    if device.type != "cuda":
        return call, 1

    def many() -> None:
        for _ in range(REPEATS):
            call()

    return GraphedModel(many), REPEATS


def measure_stages(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """A row a kernel and, of products with several ways to be launched, a row a way; each beside its plain form."""
    sizes = ARCHITECTURES[config.arch].config
    ceilings = Ceilings.measure(device, config.dtype)
    rows: list[dict[str, Any]] = []
    for operation in operations(sizes, batch, config.text_length, config.frames, config.dtype, device):
        own, plain = getattr(torch_ops, operation.operator), getattr(reference, operation.operator)
        calls: dict[str, Callable[[], Any]] = {}
        if torch_ops.device_library(operation.arguments[0]) is not None:
            calls["kernel"] = lambda own=own, given=operation.arguments: own(*given)
            calls |= _tiles(operation, device)
        calls["plain"] = lambda plain=plain, given=operation.arguments: plain(*given)
        for name, call in calls.items():
            rows.append(_row(config, operation, name, call, batch, device, ceilings))
    return rows


def roofline(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of `measure_stages`' rows one a stage: its kernel, or the plain form where no kernel ran, its share of what the
    ceilings allow, which of them is the nearer one, and how much longer the plain form takes."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["batch"], row["stage"])
        if key not in found:  # the kernel comes first, the plain form last
            names = ("stage", "batch", "program", "per_call", "microseconds", "floor_microseconds", "of_floor", "bound")
            found[key] = {name: row[name] for name in (*names, "gigabytes_per_second", "teraflops")}
        if row["program"] == "plain":
            found[key] |= {
                "plain_microseconds": row["microseconds"],
                "plain_over_this": row["microseconds"] / found[key]["microseconds"],
            }
    return list(found.values())


def _tiles(operation: Operation, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Other plans of a product than the usual one, for a GPU to say which is best."""
    if not operation.operator.startswith("convolution") or device.type != "cuda":
        return {}
    operator = getattr(torch_ops, operation.operator)

    def way(plan: launches.Plan) -> Callable[[], Any]:
        return lambda: operator(*operation.arguments, plan=plan)

    return {
        f"{tile.name} x {splits}": way(launches.Plan(number, splits))
        for number, tile in enumerate(launches.TILES)
        for splits in ((1, 2, 4, 6) if operation.operator == "convolution_norm" else (1,))
    }


def _row(
    config: BenchmarkConfig,
    operation: Operation,
    program: str,
    call: Callable[[], Any],
    batch: int,
    device: torch.device,
    ceilings: Ceilings,
) -> dict[str, Any]:
    with torch.inference_mode():
        many, times = repeated(call, device)
        measured = bench.measure(
            many, unit="calls/s", items=times, device=device, warmup=config.warmup, iterations=config.iterations,
            batch=batch, precision=config.precision, mode="throughput",
        )  # fmt: skip
    seconds = 1 / measured.throughput
    moving, computing = operation.bytes / ceilings.bytes_per_second, operation.flops / ceilings.flops_per_second
    floor = max(moving, computing)
    print(f"{batch:>6}  {operation.name:34s} {program:12s} {seconds * 1e6:10.2f} us", flush=True)
    return {
        "stage": operation.name,
        "program": program,
        "per_call": operation.times,
        "microseconds": seconds * 1e6,
        "gigabytes_per_second": operation.bytes / seconds / 1e9,
        "teraflops": operation.flops / seconds / 1e12,
        "floor_microseconds": floor * 1e6,
        "of_floor": floor / seconds,
        "bound": "bytes" if moving >= computing else "operations",
        "ceiling_gigabytes_per_second": ceilings.bytes_per_second / 1e9,
        "ceiling_teraflops": ceilings.flops_per_second / 1e12,
        **measured.to_json(),
    }
