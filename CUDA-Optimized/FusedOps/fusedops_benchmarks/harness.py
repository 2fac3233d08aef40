"""What every measurement has in common: a case, its programs measured in turns, and the table's rows.

A module `bench_x` of this package offers `cases(device, quick)`, which yields `Case`s; a case's programs are built only
when their turn comes, so that memory holds one case at a time. `run` measures them all.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlx import bench

__all__ = [
    "QUICK",
    "Case",
    "Timing",
    "backward_of",
    "captured",
    "compiled",
    "copy_rate",
    "has_liger",
    "measure_case",
    "megabytes",
]


@dataclass(frozen=True)
class Timing:
    """Calls per turn, turns of ours and a peer, calls before each turn that do not count; CUDA graphs or launches."""

    iterations: int = 30
    pairs: int = 7
    warmup: int = 10
    graphs: bool = True


QUICK = Timing(3, 2, 2, graphs=False)


@dataclass(frozen=True)
class Case:
    """One line of the table. `bytes` is what the operation must move at least; 0 where bytes are not its measure."""

    op: str
    direction: str  # forward, backward, both or step
    shape: str
    dtype: str
    bytes: float
    build: Callable[[], dict[str, Callable[[], Any]]]  # programs by name; ours is the first
    memory: bool = False  # whether to note how much memory each program has at once


def has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any] | None:
    """The function under torch.compile, for one shape; None on a CPU, where it would measure another compiler."""
    if device.type != "cuda":
        return None
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward pass is measured again and again on one graph
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def backward_of(function: Callable[[], Tensor], inputs: tuple[Tensor, ...], dy: Tensor | None) -> Callable[[], Any]:
    """A program that runs the backward pass of `function()` alone."""
    y = function()
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def copy_rate(device: torch.device, quick: bool) -> float:
    """Bytes per second that the device reads and writes together in a copy."""
    count = (1 << 20) if quick else (1 << 30)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    iterations = 10 if quick else 50
    result = bench.measure(
        lambda: target.copy_(source), items=2 * count, unit="B/s", device=device, warmup=5, iterations=iterations
    )
    return 2 * count / (result.p50_ms / 1e3)


def measure_case(case: Case, device: torch.device, rate: float, timing: Timing) -> list[dict[str, Any]]:
    """Rows of a case: milliseconds (median), GB/s, share of the copy rate, and how much faster ours is than each.

    With graphs, `ms` is what the GPU takes and `call_ms` what a call from Python takes; without, there is `ms` alone.
    """
    graphs = timing.graphs and device.type == "cuda"
    # Backward passes run where their forward passes did, so what is captured is built on the stream of the capture.
    stream = torch.cuda.Stream(device) if graphs else None
    with torch.cuda.stream(stream):  # None: as it is
        programs = {name: program for name, program in case.build().items() if program is not None}
        memory = {name: megabytes(program, device) for name, program in programs.items()} if case.memory else {}
    calls = {}
    if graphs:
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            for name, program in programs.items():
                launched = bench.measure(program, items=1, unit="calls/s", device=device, warmup=5, iterations=15)
                calls[name] = launched.p50_ms
        programs = {name: captured(program, stream) for name, program in programs.items()}
    print(f"{case.op} {case.direction} {case.shape} {case.dtype}", flush=True)
    measured = bench.against_peers(
        programs, pairs=timing.pairs, iterations=timing.iterations, warmup=timing.warmup, items=1, unit="calls/s",
        device=device,
    )  # fmt: skip
    rows = []
    for entry in measured:
        milliseconds = entry["p50_ms"]
        row = {
            "op": case.op, "direction": case.direction, "shape": case.shape, "dtype": case.dtype,
            "program": entry["program"], "ms": milliseconds, "speedup": entry.get("ours_over_this"),
        }  # fmt: skip
        if calls:
            row["call_ms"] = calls[entry["program"]]
        if case.bytes:
            row["gb_per_s"] = case.bytes / milliseconds / 1e6
            row["copy_share"] = case.bytes / (milliseconds / 1e3) / rate
        if case.memory:
            row["peak_mib"] = memory[entry["program"]]
        rows.append(row)
    del programs
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def megabytes(program: Callable[[], Any], device: torch.device) -> float:
    """The most memory that a program has at once beyond what was there before, in MiB (CUDA only; else NaN)."""
    if device.type != "cuda":
        return float("nan")
    program()
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    program()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def captured(program: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], Any]:
    """The program as the replay of a CUDA graph: what the GPU takes, without the host's part."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            program()
    torch.cuda.synchronize(stream.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        program()
    return graph.replay
