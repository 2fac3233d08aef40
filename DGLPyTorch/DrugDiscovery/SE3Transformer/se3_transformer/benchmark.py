"""Measure training and inference, side by side with the plain PyTorch form of the same model in the same process.

    ./dlx bench SE3Transformer -- --mode training --graphs "[bonds, full]" --batch_sizes "[240]"
    ./dlx bench SE3Transformer -- --mode inference --graphs "[bonds]" --batch_sizes "[800]"
    ./dlx bench SE3Transformer -- --mode scaling                     time and memory over 2^10 ... 2^20 edges
    ./dlx bench SE3Transformer -- --mode kernels                     FLOP/s of every kernel, against plain PyTorch
    ./dlx bench SE3Transformer -- --mode tiles                       other tile sizes of the convolution's kernels
    ./dlx bench SE3Transformer -- --mode training --batch_sizes "[8]" --device cpu --num_layers 2 --num_degrees 2

Programs: `ours` (kernels, captured as a CUDA graph on a GPU), `ours-eager`, `plain` (edge kernels written out, as
NVIDIA's code does), `plain-graph`. Writes one JSON record; the README's tables are generated from results/.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dlx import bench, dist, step
from dlx import config as configs
from dlx.inference import GraphedModel
from dlx.precision import LossScaler, autocast
from dlx.record import Record

from . import buckets, chemistry, kernel_benchmark, qm9
from .graph import Graph
from .model import set_kernels
from .molecules import EDGE_DIM, NODE_DIM, Batch, Collator, Molecules, flatten
from .options import CONFIGS, TASK, ModelOptions, build_model

PROGRAMS = ("ours", "ours-eager", "plain", "plain-graph")


@dataclass
class BenchmarkConfig(ModelOptions):
    """Throughput, memory, and how both grow. Everything is measured in this process, programs in turns."""

    mode: Literal["training", "inference", "scaling", "kernels", "tiles"] = configs.field("inference", help="what")
    graphs: list[str] = configs.field(["bonds"], help="bonds (38 directed edges a molecule), full (18 x 17)")
    batch_sizes: list[int] = configs.field([240], help="molecules per call", ge=1)
    programs: list[str] = configs.field(["ours", "plain"], help=f"of {', '.join(PROGRAMS)}; the last is the baseline")
    data: Literal["synthetic", "qm9"] = configs.field("synthetic", help="18 atoms and 19 bonds each, or QM9")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("bf16", help="of the matrix products")
    min_edges: int = configs.field(10, help="of mode scaling: 2 to this power", ge=4)
    max_edges: int = configs.field(20, help="of mode scaling: 2 to this power", ge=4)
    warmup: int = configs.field(5, help="calls that do not count", ge=1)
    iterations: int = configs.field(20, help="timed calls per turn", ge=1)
    pairs: int = configs.field(3, help="turns of each program", ge=1)
    seed: int = configs.field(1, help="of weights and geometries", ge=0)
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")
    output: str = configs.field("runs/benchmark.json", help="the record")

    def __post_init__(self) -> None:
        for name in self.programs:
            if name not in PROGRAMS:
                raise ValueError(f"unknown program {name!r}; known: {', '.join(PROGRAMS)}")
        for name in self.graphs:
            if name not in ("bonds", "full"):
                raise ValueError(f"graphs must be bonds or full, got {name!r}")


def synthetic_molecules(count: int, seed: int = 0) -> Molecules:
    """Molecules of QM9's mean size: 18 atoms in a chain with two further bonds, 38 directed edges."""
    generator = np.random.default_rng(seed)
    pieces = []
    for index in range(count):
        numbers = generator.choice(np.array([1, 6, 7, 8, 9], np.uint8), 18)
        positions = np.cumsum(generator.normal(size=(18, 3)) * 0.3 + 0.7, 0)
        chain = np.stack([np.arange(17), np.arange(1, 18), generator.integers(0, 4, 17)], 1)
        bonds = np.concatenate([chain, [[0, 5, 0], [7, 12, 0]]])
        molecule = chemistry.Molecule(str(index), numbers, positions, bonds.astype(np.int64))
        pieces.append(qm9.molecule_arrays(molecule, generator.normal(size=1), index))
    return Molecules(flatten(pieces))


def make_batch(config: BenchmarkConfig, graph: str, size: int, device: torch.device) -> Batch:
    """A padded batch on the device."""
    if config.data == "qm9":
        order = np.random.default_rng(config.seed).permutation(qm9.COUNT)[:size]
        molecules = qm9.load().take(order)
    else:
        molecules = synthetic_molecules(size, config.seed)
    targets = np.random.default_rng(config.seed).normal(size=(size, 1))
    return buckets.pad_to_bucket(Collator(molecules, graph, targets, device)(np.arange(size)))


class Program:
    """A model and a batch as a callable of no arguments: `name` is one of PROGRAMS."""

    def __init__(self, config: BenchmarkConfig, name: str, batch: Batch, device: torch.device, training: bool):
        torch.manual_seed(config.seed)
        self.config, self.device = config, device
        self.num_graphs = batch.graph.num_graphs
        model = build_model(config.model_options()).to(device).train(training)
        self.model = set_kernels(model, None if name.startswith("ours") else False)
        graphed = name in ("ours", "plain-graph") and device.type == "cuda"
        tensors = buckets.to_tensors(batch)
        self.call = self._training(tensors, graphed) if training else self._inference(tensors, graphed)

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Batch]:
        batch = buckets.from_tensors(tensors, self.num_graphs)
        with autocast(self.config.precision, self.device):
            return self.model(batch.graph, batch.node_feats, batch.edge_feats), batch

    def loss(self, tensors: dict[str, Tensor]) -> Tensor:
        outputs, batch = self.forward(tensors)
        return (outputs[:-1].float() - batch.targets[:-1, 0]).abs().mean()  # the last graph is padding

    def _training(self, tensors: dict[str, Tensor], graphed: bool) -> Callable[[], Any]:
        on_gpu = self.device.type == "cuda"
        options = {"fused": True, "capturable": True} if on_gpu else {"foreach": True}
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, **options)
        scaler = LossScaler(self.model.named_parameters()) if self.config.precision == "fp16" else None
        state = step.TrainState(self.model, optimizer, precision=self.config.precision, scaler=scaler)

        def train(inputs: dict[str, Tensor]) -> Tensor:
            return step.update(state, [inputs], [1], self.loss)

        if not graphed:
            return lambda: train(tensors)
        captured = step.GraphedStep(state, train, tensors)
        return lambda: captured(tensors)

    def _inference(self, tensors: dict[str, Tensor], graphed: bool) -> Callable[[], Any]:
        names = list(tensors)

        def predict(*values: Tensor) -> Tensor:
            return self.forward(dict(zip(names, values, strict=True)))[0]

        if graphed:
            captured = GraphedModel(predict, *tensors.values())
            return lambda: captured(*tensors.values())

        def call() -> Tensor:
            with torch.inference_mode():
                return predict(*tensors.values())

        return call


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that are allocated at most during a call, beyond what was there before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure_models(config: BenchmarkConfig, graph: str, size: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows for every program at one batch size; ratios are per turn, over the last program."""
    batch = make_batch(config, graph, size, device)
    training = config.mode == "training"
    memory = {}
    for name in config.programs:  # eager, alone on the device: a captured graph holds its memory all the time
        eager = Program(config, "plain" if name.startswith("plain") else "ours-eager", batch, device, training)
        eager.call()
        memory[name] = peak_memory(eager.call, device)
        del eager
    programs = {name: Program(config, name, batch, device, training).call for name in config.programs}
    options: dict[str, Any] = {
        "items": size, "unit": "molecules/s", "device": device, "warmup": config.warmup, "batch": size,
        "iterations": config.iterations, "shape": [batch.graph.num_nodes, batch.graph.num_edges],
        "precision": config.precision,
    }  # fmt: skip
    if len(programs) == 1:
        measured = {name: bench.measure(call, **options) for name, call in programs.items()}
        ratios: dict[str, list[float]] = {}
    else:
        compared = bench.compare(programs, pairs=config.pairs, **options)
        measured, ratios = compared.measurements, compared.ratios
    rows = []
    for name, measurement in measured.items():
        row = {"program": name, "graph": graph, "batch_size": size, "mode_of_run": config.mode, **measurement.to_json()}
        row["molecules_per_ms"] = measurement.throughput / 1000
        row["bytes_per_molecule"] = None if memory[name] is None else memory[name] / size
        if name in ratios:
            row["over_baseline"] = statistics.median(ratios[name])
            row["over_baseline_pairs"] = sorted(ratios[name])
        rows.append(row)
        per = "" if memory[name] is None else f"  {memory[name] / size / 2**20:.2f} MiB/molecule"
        print(f"{graph:5s} batch {size:5d}  {name:12s} {measurement}{per}", flush=True)
    return rows


def random_batch(edges: int, device: torch.device, seed: int) -> Batch:
    """One graph of nodes with 16 edges each."""
    generator = torch.Generator().manual_seed(seed)
    nodes = max(2, edges // 16)
    dst = torch.arange(edges) * nodes // edges
    src = (dst + torch.randint(1, nodes, (edges,), generator=generator)) % nodes
    relative = torch.randn(edges, 3, generator=generator)
    graph = Graph(torch.stack([src, dst]), nodes, None, 1, relative, degenerate=None)
    feats = {"0": torch.randn(nodes, NODE_DIM, 1, generator=generator)}
    batch = Batch(graph, feats, {"0": torch.randn(edges, EDGE_DIM, 1, generator=generator)}, torch.zeros(1, 1))
    return batch.to(device)


def measure_scaling(config: BenchmarkConfig, device: torch.device) -> list[dict[str, Any]]:
    """Time and memory of a training step over the number of edges, with the exponents of their growth."""
    rows = []
    for power in range(config.min_edges, config.max_edges + 1):
        batch = buckets.pad(random_batch(2**power, device, config.seed), max(2, 2**power // 16) + 1, 2**power)
        for name in config.programs:
            try:
                program = Program(config, name, batch, device, True)
                program.call()
                memory = peak_memory(program.call, device)
                found = bench.measure(
                    program.call, items=2**power, unit="edges/s", device=device, warmup=2,
                    iterations=max(3, config.iterations // 4), precision=config.precision,
                )  # fmt: skip
            except torch.OutOfMemoryError:
                print(f"2^{power} edges  {name}: out of memory", flush=True)
                rows.append({"program": name, "edges": 2**power, "out_of_memory": True})
                continue
            rows.append({"program": name, "edges": 2**power, "bytes": memory, **found.to_json()})
            print(f"2^{power:2d} edges  {name:12s} {found}", flush=True)
            del program
    for name in config.programs:
        timed = [row for row in rows if row["program"] == name and "p50_ms" in row]
        for first, second in zip(timed, timed[1:], strict=False):
            second["exponent"] = math.log2(second["p50_ms"] / first["p50_ms"])
    return rows


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(BenchmarkConfig, args, configs_dir=CONFIGS, prog="benchmark")
    with dist.init(config.device) as world:
        record = Record.start(TASK, "benchmark", configs.to_dict(config), seed=config.seed)
        if config.mode == "scaling":
            rows = measure_scaling(config, world.device)
        elif config.mode in ("kernels", "tiles"):
            measure = kernel_benchmark.measure_kernels if config.mode == "kernels" else kernel_benchmark.measure_tiles
            rows = measure(config, world.device)
        else:
            chosen = [(graph, size) for graph in config.graphs for size in config.batch_sizes]
            rows = [row for graph, size in chosen for row in measure_models(config, graph, size, world.device)]
        record.attach("rows", rows)
        record.finish()
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)
        print(f"record: {path}")
    return record.fields


if __name__ == "__main__":
    main()
