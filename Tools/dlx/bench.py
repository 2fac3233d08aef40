"""Timing that can be compared: warm-up, synchronised clocks, percentiles, throughput from the total time.

    result = measure(lambda: model(images), items=256, unit="images/s", device="cuda", batch=256)
    both = compare({"ours": step, "peer": peer_step}, pairs=5, items=256, unit="images/s", device="cuda")

A difference between two programs is only worth saying when both ran in one process, one after the other and again
(A B A B): clocks, temperature and neighbours drift by more than most improvements. `compare` does that and gives the
ratio of every pair, so that the spread is seen with the median. Works without PyTorch for functions on the CPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .record import hardware, versions

__all__ = ["Comparison", "Measurement", "against_peers", "compare", "drain", "fed", "measure"]


@dataclass(frozen=True)
class Measurement:
    """Times of one call in milliseconds, items per second over the whole run, and the conditions."""

    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    throughput: float
    unit: str
    batch: int | None
    shape: list[int] | None
    device: str
    device_name: str
    precision: str
    mode: str
    warmup: int
    iterations: int
    items: float
    seconds: float
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.throughput:,.5g} {self.unit} · p50 {self.p50_ms:.4g} ms · p90 {self.p90_ms:.4g} · "
            f"p95 {self.p95_ms:.4g} · p99 {self.p99_ms:.4g} ({self.iterations} x {self.items:g} on {self.device_name})"
        )


@dataclass(frozen=True)
class Comparison:
    """Programs measured in turns. `ratios` hold, per round, a program's throughput over that of `baseline`."""

    baseline: str
    measurements: dict[str, Measurement]
    ratios: dict[str, list[float]]

    def median(self, name: str | None = None) -> float:
        """The median ratio of a program (the first by default): 1.10 is 10 % faster than the baseline."""
        return float(np.median(self.ratios[name or next(iter(self.ratios))]))

    def spread(self, name: str | None = None) -> tuple[float, float]:
        """The smallest and the largest ratio."""
        values = self.ratios[name or next(iter(self.ratios))]
        return min(values), max(values)

    def to_json(self) -> dict[str, Any]:
        summary = {
            name: {"median": self.median(name), "min": min(values), "max": max(values), "pairs": values}
            for name, values in self.ratios.items()
        }
        measurements = {name: measurement.to_json() for name, measurement in self.measurements.items()}
        return {"baseline": self.baseline, "ratio": summary, "measurements": measurements}

    def __str__(self) -> str:
        lines = [f"{name}: {measurement}" for name, measurement in self.measurements.items()]
        for name, values in self.ratios.items():
            low, high = self.spread(name)
            spread = f"{low:.3f} to {high:.3f} in {len(values)} pairs"
            lines.append(f"{name} / {self.baseline}: median {self.median(name):.3f}, {spread}")
        return "\n".join(lines)


def measure(
    fn: Callable[[], Any],
    *,
    items: float = 1,
    unit: str = "items/s",
    device: Any = "cpu",
    warmup: int = 10,
    iterations: int = 50,
    batch: int | None = None,
    shape: Sequence[int] | None = None,
    precision: str = "fp32",
    mode: str = "throughput",
) -> Measurement:
    """Time `iterations` calls of `fn`, each of which handles `items`, after `warmup` calls that do not count.

    mode "throughput" lets calls queue up on a GPU, as training does: times of single calls come from CUDA events, and
    the total from the first launch until the GPU is idle. mode "latency" waits after each call, as a server does.
    ValueError before anything runs if warmup or iterations is below 1 or warmup is not below iterations.
    """
    _check(warmup, iterations, items, unit, mode)
    timer = _timer(device, mode)
    _warm_up(fn, warmup, timer)
    times, seconds = timer.run(fn, iterations)
    return _measurement(times, seconds, timer, items=items, unit=unit, warmup=warmup, iterations=iterations,
                        batch=batch, shape=shape, precision=precision, mode=mode)  # fmt: skip


def compare(
    functions: dict[str, Callable[[], Any]],
    *,
    pairs: int = 5,
    items: float = 1,
    unit: str = "items/s",
    device: Any = "cpu",
    warmup: int = 10,
    iterations: int = 50,
    batch: int | None = None,
    shape: Sequence[int] | None = None,
    precision: str = "fp32",
    mode: str = "throughput",
) -> Comparison:
    """Measure two programs or more in turns, `pairs` times `iterations` calls each; the last one is the baseline."""
    if len(functions) < 2:
        raise ValueError(f"compare needs two programs or more, got {', '.join(functions) or 'none'}")
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}")
    _check(warmup, iterations, items, unit, mode)
    timer = _timer(device, mode)
    for fn in functions.values():
        _warm_up(fn, warmup, timer)
    times: dict[str, list[float]] = {name: [] for name in functions}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(pairs):
        for name, fn in functions.items():
            _warm_up(fn, 1, timer)  # the other program's data is in the caches now
            single, total = timer.run(fn, iterations)
            times[name] += single
            seconds[name].append(total)
    baseline = list(functions)[-1]
    measurements = {
        name: _measurement(times[name], sum(seconds[name]), timer, items=items, unit=unit, warmup=warmup,
                           iterations=iterations * pairs, batch=batch, shape=shape, precision=precision, mode=mode)
        for name in functions
    }  # fmt: skip
    ratios = {
        name: [base / own for own, base in zip(seconds[name], seconds[baseline], strict=True)]
        for name in functions
        if name != baseline
    }
    return Comparison(baseline, measurements, ratios)


def against_peers(
    programs: dict[str, Callable[[], Any]], *, pairs: int = 5, iterations: int = 50, **options: Any
) -> list[dict[str, Any]]:
    """Measure the first program, called ours, and each other one in turns with it, so that a ratio is of neighbours in
    time. One row a program: name, measurement, and for all but a lone one `ours_over_this` (median of the pairs)."""
    ours, *peers = programs
    measured: dict[str, Measurement] = {}
    ratios: dict[str, list[float]] = {}
    if not peers:
        measured[ours] = measure(programs[ours], iterations=iterations, **options)
    for peer in peers:
        pair = compare({ours: programs[ours], peer: programs[peer]}, pairs=pairs, iterations=iterations, **options)
        measured |= pair.measurements
        ratios[peer] = sorted(pair.ratios[ours])
    rows = []
    for name, measurement in measured.items():
        row: dict[str, Any] = {"program": name, **measurement.to_json()}
        if peers:
            row["ours_over_this"] = statistics.median(ratios[name]) if name in ratios else 1.0
        if name in ratios:
            row["ours_over_this_pairs"] = ratios[name]
        rows.append(row)
        print(f"{options.get('batch', ''):>6}  {name:24s} {measurement}", flush=True)
    return rows


def drain(loader: Any, device: Any, seconds: float = 6.0) -> tuple[float, int]:
    """(samples per second, samples) of a loader with `set_epoch` alone, after its first batches."""
    return _pull(loader, lambda batch: None, _timer(device, "latency"), 3, seconds)


def fed(loader: Any, step: Callable[[Any], Any], device: Any, *, warmup: int = 10, seconds: float = 8.0) -> float:
    """Samples per second of `step`, called with one batch of the loader after another."""
    return _pull(loader, step, _timer(device, "latency"), warmup, seconds)[0]


def _pull(
    loader: Any, consume: Callable[[Any], Any], timer: _HostTimer, warmup: int, seconds: float
) -> tuple[float, int]:
    count = step = epoch = 0
    clock = 0.0
    while True:
        loader.set_epoch(epoch)
        for batch in loader:
            consume(batch)
            step += 1
            if step == warmup:
                timer.synchronize()
                clock = time.perf_counter()
            elif step > warmup:
                count += len(batch[0])
                # The host runs ahead of the GPU by a few steps at most, since a loader's buffers are finite.
                if step % 5 == 0 and time.perf_counter() - clock > seconds:
                    timer.synchronize()
                    return count / (time.perf_counter() - clock), count
        epoch += 1


def _check(warmup: int, iterations: int, items: float, unit: str, mode: str) -> None:
    if warmup < 1 or iterations < 1:
        raise ValueError(f"warmup and iterations must be at least 1, got {warmup} and {iterations}")
    if warmup >= iterations:
        raise ValueError(
            f"warmup {warmup} is not below iterations {iterations}: warm-up calls come on top of the measured ones, "
            f"so give more iterations or less warm-up"
        )
    if not items > 0:
        raise ValueError(f"items must be above 0, got {items}")
    if not unit:
        raise ValueError("unit must say what is counted, such as images/s")
    if mode not in ("throughput", "latency"):
        raise ValueError(f"mode must be throughput or latency, got {mode!r}")


class _HostTimer:
    """Wall clock around each call."""

    device = "cpu"

    def synchronize(self) -> None:
        pass

    def name(self) -> str:
        return hardware()["cpu"]

    def run(self, fn: Callable[[], Any], iterations: int) -> tuple[list[float], float]:
        """Milliseconds of each call, and the seconds of all."""
        stamps = [time.perf_counter()]
        for _ in range(iterations):
            fn()
            self.synchronize()
            stamps.append(time.perf_counter())
        return (np.diff(stamps) * 1e3).tolist(), stamps[-1] - stamps[0]


class _SyncedTimer(_HostTimer):
    """Wall clock around each call and the wait for its end."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device = str(device)
        self._torch_device = device
        self._backend = getattr(torch, device.type)

    def synchronize(self) -> None:
        self._backend.synchronize(*([self._torch_device] if self._torch_device.type == "cuda" else []))

    def name(self) -> str:
        if self._torch_device.type == "cuda":
            return self._backend.get_device_name(self._torch_device)
        return self._torch_device.type


class _EventTimer(_SyncedTimer):
    """CUDA events between the calls, which queue up; wall clock for the whole."""

    def run(self, fn: Callable[[], Any], iterations: int) -> tuple[list[float], float]:
        with self._backend.device(self._torch_device):
            events = [self._backend.Event(enable_timing=True) for _ in range(iterations + 1)]
            self.synchronize()
            started = time.perf_counter()
            events[0].record()
            for event in events[1:]:
                fn()
                event.record()
            self.synchronize()
            seconds = time.perf_counter() - started
        return [first.elapsed_time(second) for first, second in zip(events, events[1:], strict=False)], seconds


def _timer(device: Any, mode: str) -> _HostTimer:
    if str(device) == "cpu":
        return _HostTimer()
    import torch

    device = torch.device(device)
    return _EventTimer(device) if device.type == "cuda" and mode == "throughput" else _SyncedTimer(device)


def _warm_up(fn: Callable[[], Any], calls: int, timer: _HostTimer) -> None:
    for _ in range(calls):
        fn()
    timer.synchronize()


def _measurement(times: list[float], seconds: float, timer: _HostTimer, **conditions: Any) -> Measurement:
    p50, p90, p95, p99 = (float(value) for value in np.percentile(times, [50, 90, 95, 99]))
    shape = conditions.pop("shape")
    return Measurement(
        p50_ms=p50, p90_ms=p90, p95_ms=p95, p99_ms=p99, mean_ms=seconds * 1e3 / len(times), seconds=seconds,
        throughput=conditions["items"] * len(times) / seconds, device=timer.device, device_name=timer.name(),
        shape=None if shape is None else [int(size) for size in shape], versions=versions(), **conditions,
    )  # fmt: skip
