"""Sweep over numbers of workers and batch sizes: speed of training or inference, in one JSON.

    ./dlx bench rn50_mxnet -- -n 1,2 -b 8,16,32 -i 20 -e 2 -w 5 -o sweep.json -- --arch resnet18 --data synthetic
    ./dlx bench rn50_mxnet -- --mode pred -b 1,8 -- --arch resnet50 --data synthetic

Every point is a run of its own (`runner`), whose log is read: images/s of each iteration. `-w` iterations at the start
of each epoch do not count. Speeds are averaged harmonically (the same as all images over all time); percentiles are of
the time of an iteration.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dlx import runlog
from dlx.record import Record

from .options import TASK

PERCENTILES = (50, 90, 95, 99)


def numbers(text: str) -> list[int]:
    """`1,4,8` as a list of numbers above 0."""
    try:
        found = [int(piece) for piece in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, as in 1,2,4") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return found


def at_least(least: int) -> Callable[[str], int]:
    """A type of whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def summarize(speeds: list[float], batch: int) -> dict[str, Any]:
    """Harmonic mean of images/s, and percentiles of the milliseconds that ``batch`` images took in an iteration."""
    if not speeds:
        raise ValueError("no iteration is left to count; give more iterations or less warm-up")
    times = [batch / speed * 1e3 for speed in speeds]
    row: dict[str, Any] = {"images_per_second": statistics.harmonic_mean(speeds), "iterations": len(speeds)}
    return row | {f"p{q}_ms": float(np.percentile(times, q)) for q in PERCENTILES}


def counted(entries: list[dict[str, Any]], key: str, warmup: int) -> list[float]:
    """The values of ``key`` in a log, without the first ``warmup`` of each epoch."""
    epochs: dict[int, list[float]] = {}
    for entry in entries:
        if entry.get("type") == "LOG" and key in entry["data"] and isinstance(entry["step"], list):
            epochs.setdefault(entry["step"][0], []).append(float(entry["data"][key]))
    return [value for values in epochs.values() for value in values[warmup:]]


def measure(workers: int, batch: int, options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """One point: run it, read its log. ValueError with the run's last lines where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "rn50_mxnet.runner", "-n", str(workers), "-b", str(batch), "--",
            "--mode", options.mode, "--log_every", "1", "--resume", "none", "--output_dir", folder, *rest,
            "--num_samples", str(options.iterations * batch * workers),
        ]  # fmt: skip
        command += ["--epochs", str(options.epochs), "--warmup_epochs", "0"] if options.mode == "train" else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{workers} workers, batch {batch}: " + "\n".join(done.stderr.splitlines()[-5:]))
        entries = list(runlog.read(Path(folder) / runlog.FILE_NAME))
    speeds = counted(entries, "train.ips" if options.mode == "train" else "pred.ips", options.warmup)
    row = {"mode": options.mode, "workers": workers, "batch_size": batch}
    return row | summarize(speeds, batch * workers)


def parser() -> argparse.ArgumentParser:
    """The options, those of the sweep only; what follows `--` goes to `train`."""
    found = argparse.ArgumentParser(prog="benchmark", description="Speed over workers and batch sizes.")
    found.add_argument("-n", "--workers", type=numbers, default=[1], help="workers, as in 1,2")
    found.add_argument("-b", "--batch_sizes", type=numbers, default=[32], help="images per worker, as in 8,16,32")
    found.add_argument("-i", "--iterations", type=at_least(1), default=20, help="of an epoch")
    found.add_argument("-e", "--epochs", type=at_least(1), default=1, help="of training")
    found.add_argument("-w", "--warmup", type=at_least(0), default=5, help="iterations of an epoch that do not count")
    found.add_argument("-o", "--output", default="runs/benchmark.json", help="the JSON")
    found.add_argument("--mode", choices=("train", "pred"), default="train", help="training or inference")
    found.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- OPTIONS", help="options of train")
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser().parse_args(arguments)
    if options.iterations <= options.warmup:
        parser().error(f"-w {options.warmup} leaves nothing of -i {options.iterations} iterations")
    rest = options.rest[1:] if options.rest[:1] == ["--"] else options.rest
    if not any(word.startswith("--data") for word in rest):
        rest = ["--data", "synthetic", *rest]
    record = Record.start(TASK, "benchmark", vars(options) | {"rest": rest})
    rows = []
    for workers in options.workers:
        for batch in options.batch_sizes:
            rows.append(measure(workers, batch, options, rest))
            print(
                " ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items()),
                flush=True,
            )
    best = max(rows, key=lambda row: row["images_per_second"])
    record.metric("throughput.best", best["images_per_second"], "images/s", "MAXIMIZE")
    record.attach("rows", rows)
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    record.finish().save(path)
    print(f"record: {path}")
    return record.fields


if __name__ == "__main__":
    main()
