"""Measure operators and optimizers against their peers: `dlx run FusedOps benchmark -- --ops norm`.

Every case runs ours and each peer in turns in one process. Writes NAME.json (the record, with all rows) and NAME.png,
to results/ of the task unless told otherwise (to runs/ in a container, where results/ cannot be written), with a name
that says the device.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import statistics
from pathlib import Path
from typing import Any

import torch

import fusedops_benchmarks
from dlx.files import atomic_path
from dlx.record import Record

from .harness import QUICK, Timing, copy_rate, measure_case

TASK = "CUDA-Optimized/FusedOps"
RESULTS = Path(__file__).parents[1] / "results"


def modules() -> list[str]:
    """The names of the measurements, from the modules bench_*."""
    found = (module.name for module in pkgutil.iter_modules(fusedops_benchmarks.__path__))
    return sorted(name.removeprefix("bench_") for name in found if name.startswith("bench_"))


def default_output() -> Path:
    """The task's results/, or where that cannot be written runs/, which scripts/docker/run.sh mounts."""
    folder = RESULTS if RESULTS.is_dir() else RESULTS.parent
    return RESULTS if os.access(folder, os.W_OK) else Path("runs/fusedops_benchmark")


def file_name(device: torch.device, ops: list[str], *, quick: bool, graphs: bool) -> str:
    """What a run's files are called: the device, what was measured where it is not all, and how."""
    made_by = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    words = [re.sub(r"[^a-z0-9]+", "-", made_by.lower().removeprefix("nvidia ")).strip("-")]
    words += ["benchmark"] if sorted(ops) == modules() else sorted(ops)
    return "-".join(words + ["launches"] * (not graphs and device.type == "cuda") + ["quick"] * quick)


def measure(
    name: str, device: torch.device, rate: float, *, quick: bool, timing: Timing, match: str = ""
) -> list[dict[str, Any]]:
    """The rows of an operator's cases that `match` is found in; a case that cannot run leaves a row that says why."""
    rows = []
    for case in importlib.import_module(f".bench_{name}", fusedops_benchmarks.__name__).cases(device, quick):
        if not re.search(match, f"{case.op} {case.direction} {case.shape} {case.dtype}"):
            continue
        try:
            rows += measure_case(case, device, rate, timing)
        except RuntimeError as error:  # out of memory, a peer that does not compile
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(f"  cannot be measured: {reason}", flush=True)
            where = {"op": case.op, "direction": case.direction, "shape": case.shape, "dtype": case.dtype}
            rows.append({**where, "program": "none", "ms": None, "speedup": None, "error": reason})
    return rows


def best_peers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Per case, how many times faster ours is than the fastest other program."""
    found: dict[str, float] = {}
    for row in rows:
        if row["program"] != "fusedops" and row["speedup"] is not None:
            key = " ".join((row["op"], row["direction"], row["shape"], row["dtype"]))
            found[key] = min(found.get(key, float("inf")), row["speedup"])
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel per operator: GB/s of every program, or calls per second where bytes are not the measure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(f"{row['op']} {row['direction']}", []).append(row)
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 3 * len(panels)), squeeze=False, layout="constrained")
    for axis, (title, own) in zip(axes[:, 0], panels.items(), strict=True):
        shapes = list(dict.fromkeys(f"{row['shape']} {row['dtype']}" for row in own))
        programs = list(dict.fromkeys(row["program"] for row in own))
        for index, program in enumerate(programs):
            values = {
                f"{r['shape']} {r['dtype']}": r.get("gb_per_s", 1e3 / r["ms"]) for r in own if r["program"] == program
            }
            places = [place + index * 0.8 / len(programs) for place, shape in enumerate(shapes) if shape in values]
            axis.bar(places, [values[shape] for shape in shapes if shape in values], 0.8 / len(programs), label=program)
        axis.set_xticks([place + 0.3 for place in range(len(shapes))], shapes, fontsize=6, rotation=15)
        axis.set_title(title)
        axis.set_ylabel("GB/s" if "gb_per_s" in own[0] else "calls/s")
        axis.legend(fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="fusedops_benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=modules(), choices=modules(), help="which (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few calls: does it work?")
    parser.add_argument("--match", default="", help="only cases in whose line this regular expression is found")
    parser.add_argument("--iterations", type=int, default=Timing.iterations, help="timed calls per turn")
    parser.add_argument("--pairs", type=int, default=Timing.pairs, help="turns of ours and each peer")
    parser.add_argument("--warmup", type=int, default=Timing.warmup, help="calls before each turn that do not count")
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True,
        help="on a GPU, compare replays of CUDA graphs, which leave the host out; else calls from Python",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=default_output(), help="folder for the results")
    parser.add_argument("--name", help="name of the record and the picture (default: says device and operators)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    record = Record.start(task=TASK, verb="benchmark", config=config)
    timing = QUICK if options.quick else Timing(options.iterations, options.pairs, options.warmup, options.graphs)
    rate = copy_rate(device, options.quick)
    record.metric("copy_rate", rate / 1e9, "GB/s")
    options.output.mkdir(parents=True, exist_ok=True)
    name = options.name or file_name(device, options.ops, quick=options.quick, graphs=options.graphs)
    rows: list[dict[str, Any]] = []
    for op in options.ops:
        rows += measure(op, device, rate, quick=options.quick, timing=timing, match=options.match)
        record.attach("rows", rows)
        path = record.save(options.output / f"{name}.json")  # what has been measured is kept if a later one fails
    best = best_peers(rows)
    for case, ratio in best.items():
        record.metric(f"speedup.{case}", ratio, "")
    if best:
        record.metric("speedup.median", statistics.median(best.values()), "")
    record.finish().save(path)
    plot([row for row in rows if row["ms"] is not None], path.with_suffix(".png"))
    print(f"copy {rate / 1e9:,.0f} GB/s; wrote {path}")
    return path


if __name__ == "__main__":
    main()
