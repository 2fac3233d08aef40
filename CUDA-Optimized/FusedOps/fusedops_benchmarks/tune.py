"""Measure other rows of the kernels' tuning tables: `python -m fusedops_benchmarks.tune norm_forward --sizes 4096`.

The tables are at the top of `fusedops/ops/*_kernels.py`. For every size each candidate takes the table's place, and one
call is timed as the replay of a CUDA graph; the record lists all, the fastest first. Compiling takes longer than
measuring: `--workers` processes do it beforehand, each a share, since Triton keeps what it compiles on disk.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedops
from dlx import bench
from dlx.record import Record
from fusedops.ops import cross_entropy, layer_norm, rms_norm

from .harness import backward_of, captured

TASK = "CUDA-Optimized/FusedOps"
ELEMENTS = 1 << 26  # of a measured matrix


@dataclass(frozen=True)
class Search:
    """A table of a kernels' module, what may stand in it for a size, and the call that is measured."""

    module: str
    table: str
    candidates: Callable[[int], Iterator[tuple]]
    build: Callable[[int, int, torch.device], Callable[[], Any]]  # size, rows, device
    passes: int  # over the matrix: how many bytes are moved at least
    without: str | None = None  # a table that comes before this one, emptied meanwhile


def threads_that_fit(size: int, most: int = 64) -> list[int]:
    """Warps whose threads hold from 4 to `most` elements of a row each."""
    return [warps for warps in (1, 2, 4, 8, 16, 32) if 4 <= size / (32 * warps) <= most]


def norm_forward_rows(size: int) -> Iterator[tuple]:
    width = 1 << (size - 1).bit_length()
    for together, warps in itertools.product((1, 2, 4), threads_that_fit(width)):
        if together * width > 16384:
            continue
        yield size, together * width, warps, 0, 1
        for per_processor, stages in itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4)):
            if per_processor * warps <= 64:
                yield size, together * width, warps, per_processor, stages


def norm_backward_rows(size: int) -> Iterator[tuple]:
    width = 1 << (size - 1).bit_length()
    for together, warps in itertools.product((1, 2, 4), threads_that_fit(width, 32)):
        if together * width > 8192:
            continue
        for per_processor, stages, again in itertools.product((1, 2, 4, 8), (1, 2), (False, True)):
            if per_processor * warps <= 64:
                yield size, together * width, warps, per_processor, stages, again


def norm_apart_rows(size: int) -> Iterator[tuple]:
    for warps, per_processor, rows, columns in itertools.product((8, 16, 32), (1, 2, 4), (16, 32, 64), (32, 64, 128)):
        if 8 <= size / (32 * warps) <= 32 and per_processor * warps <= 64:
            yield size, warps, per_processor, rows, columns


def xentropy_rows(size: int) -> Iterator[tuple]:
    for warps, per_processor, stages in itertools.product((8, 16, 32), (1, 2, 4), (1, 2, 3)):
        if per_processor * warps <= 64 and size / (32 * warps) <= 64:
            yield size, warps, per_processor, stages


def normed(size: int, rows: int, device: torch.device, gradient: bool, rms: bool) -> tuple[Tensor, ...]:
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": gradient}
    inputs = torch.randn(rows, size, **options), torch.ones(size, **options), torch.zeros(size, **options)
    return inputs[:2] if rms else inputs


def norm_forward(size: int, rows: int, device: torch.device) -> Callable[[], Any]:
    x, weight, bias = normed(size, rows, device, False, False)
    return lambda: layer_norm(x, size, weight, bias)


def norm_backward(size: int, rows: int, device: torch.device) -> Callable[[], Any]:
    inputs = normed(size, rows, device, True, False)
    return backward_of(lambda: layer_norm(inputs[0], size, *inputs[1:]), inputs, torch.randn_like(inputs[0]))


def rms_backward(size: int, rows: int, device: torch.device) -> Callable[[], Any]:
    inputs = normed(size, rows, device, True, True)
    return backward_of(lambda: rms_norm(inputs[0], size, inputs[1]), inputs, torch.randn_like(inputs[0]))


def xentropy(size: int, rows: int, device: torch.device) -> Callable[[], Any]:
    logits = torch.randn(rows, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, size, (rows,), device=device)
    return lambda: torch.autograd.grad(cross_entropy(logits.view_as(logits), target, inplace=True), logits)


SEARCHES = {
    "norm_forward": Search("norm_kernels", "FORWARD", norm_forward_rows, norm_forward, 2),
    "norm_backward": Search("norm_kernels", "BACKWARD", norm_backward_rows, norm_backward, 3),
    "norm_apart": Search("norm_kernels", "APART", norm_apart_rows, norm_backward, 3, "BACKWARD"),
    "rms_backward": Search("norm_kernels", "BACKWARD", norm_backward_rows, rms_backward, 3),
    "xentropy": Search("xentropy_kernels", "ROWS", xentropy_rows, xentropy, 2),
}


def tried(name: str, size: int, row: tuple, device: torch.device, elements: int) -> Callable[[], Any] | str:
    """The call with this row as the table, or why it cannot be."""
    search = SEARCHES[name]
    module = importlib.import_module(f"fusedops.ops.{search.module}")
    setattr(module, search.table, (row,))
    if search.without:
        setattr(module, search.without, ())
    try:
        call = search.build(size, max(1, elements // size), device)
        call()
    except Exception as error:  # out of registers or shared memory: Triton has errors of its own
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return call


def compile_share(name: str, size: int, rows: list[tuple], device: str) -> None:
    """What a worker does; few rows of the matrix are enough for compiling."""
    for row in rows:
        tried(name, size, row, torch.device(device), 4096 * size)
        torch.cuda.empty_cache()


def measure(name: str, size: int, device: torch.device, elements: int) -> list[dict[str, Any]]:
    """One entry a candidate, the fastest first; first of all the table as it is."""
    search = SEARCHES[name]
    module = importlib.import_module(f"fusedops.ops.{search.module}")
    table = getattr(module, search.table)
    before = search.without and getattr(module, search.without)
    present = next((row for row in table if size <= row[0]), None)
    found = []
    try:
        for row in dict.fromkeys([*([] if present is None else [(size, *present[1:])]), *search.candidates(size)]):
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            with torch.cuda.stream(stream):
                call = tried(name, size, row, device, elements)
            entry = {
                "search": name,
                "size": size,
                "row": list(row),
                "ms": None,
                "present": row[1:] == (present or ())[1:],
            }
            if isinstance(call, str):
                entry["error"] = call
            else:
                program = call if stream is None else captured(call, stream)
                taken = bench.measure(program, items=1, unit="calls/s", device=device, warmup=3, iterations=15)
                entry |= {"ms": taken.p50_ms, "gb_per_s": search.passes * 2 * elements / taken.p50_ms / 1e6}
            found.append(entry)
            del call
    finally:
        setattr(module, search.table, table)
        if search.without:
            setattr(module, search.without, before)
    return sorted(found, key=lambda entry: entry["ms"] or float("inf"))


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="fusedops_benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("searches", nargs="+", choices=SEARCHES, help="which tables")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024, 4096, 8192, 16384], help="widths, or classes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of the measured matrix")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--output", type=Path, default=Path("runs/fusedops_tune.json"), help="the record")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    record = Record.start(task=TASK, verb="benchmark", config=config)
    if options.workers:
        shares = [
            (name, size, rows[start :: options.workers], options.device)
            for name, size in itertools.product(options.searches, options.sizes)
            for rows in [list(SEARCHES[name].candidates(size))]
            for start in range(min(options.workers, len(rows)))
        ]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, context) as pool:
            for done in [pool.submit(compile_share, *share) for share in shares]:
                done.result()
    entries = []
    with fusedops.use("auto" if device.type == "cuda" else "triton"):
        for name, size in itertools.product(options.searches, options.sizes):
            ranked = measure(name, size, device, options.elements)
            entries += ranked
            for entry in [*ranked[:4], *(e for e in ranked[4:] if e["present"])]:
                mark = " (in the table)" if entry["present"] else ""
                print(f"{name} {size}: {entry['row']} {entry['ms'] or float('nan'):.4f} ms{mark}", flush=True)
            record.attach("rows", entries)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            record.save(options.output)
    return record.finish().save(options.output)


if __name__ == "__main__":
    main()
