"""Single kernels at the shapes of the published configuration: time, FLOP/s, bytes/s, other tile sizes.

The convolution's products per edge, for fibers with C_i and C_o channels: a block m needs 2 * H * inputs * outputs
FLOP (four times as many for m > 0), once forward and twice backward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlx import bench

from .graph import Graph
from .model import Fiber, frame_math, frame_tables, ops
from .model.frames import rotation_to_axis, wigner_matrices
from .model.radial import RadialProfile

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EDGES = {"bonds": 38, "full": 306}  # of a molecule
FORWARD = [(64, 64, 4), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 128, 8), (64, 32, 4), (128, 128, 8)]
BACKWARD_INPUT = [(64, 32, 4), (64, 32, 8), (64, 64, 4), (64, 16, 4), (32, 32, 4), (128, 32, 8), (128, 16, 8)]
BACKWARD_WEIGHT = [
    (32, 4, 64, 2, 8), (64, 4, 64, 2, 8), (64, 2, 64, 2, 4), (64, 2, 64, 4, 4), (32, 4, 64, 4, 8), (128, 4, 64, 2, 8),
    (64, 4, 32, 2, 4), (32, 8, 32, 2, 8),
]  # fmt: skip


class Case:
    """Keys and values of one layer: tensors of every operation, and their FLOP and bytes."""

    def __init__(self, config: BenchmarkConfig, edges: int, device: torch.device):
        torch.manual_seed(config.seed)
        hidden = Fiber.create(config.num_degrees, config.num_channels)
        half = config.num_channels // config.channels_div
        self.edges, self.heads = edges, config.num_heads
        self.value_fiber = self.key_fiber = Fiber.create(config.num_degrees, half)
        radial = RadialProfile(hidden, self.value_fiber + self.key_fiber, 5)
        self.plan = frame_tables.plan_of(radial)
        self.trunk = self.plan.trunks[0]
        dtype = DTYPES[config.precision]
        self.nodes = max(2, edges // 2)
        dst = torch.arange(edges, device=device) * self.nodes // edges
        self.graph = Graph(torch.stack([dst.flip(0), dst]), self.nodes)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype).requires_grad_()

        self.x, self.h = rand(self.plan.inputs.rows, edges), rand(edges, radial.mid_dim)
        self.w = rand(len(self.trunk.index), radial.mid_dim)
        self.features, self.y = rand(self.nodes, hidden.num_features), rand(self.trunk.rows, edges)
        self.q = rand(self.nodes, self.key_fiber.num_features)
        self.kv = rand(edges, self.value_fiber.num_features + self.key_fiber.num_features)
        self.weights = radial.weights.detach().to(device).requires_grad_()
        matrices = wigner_matrices(rotation_to_axis(torch.randn(edges, 3, device=device)), hidden.max_degree)
        self.rotations = torch.cat([matrix.flatten(1) for matrix in matrices], 1)
        self.hidden, self.dtype, self.device = hidden, dtype, device
        products = sum(b.inputs * b.outputs * (4 if b.m else 1) for b in self.trunk.blocks)
        self.flop = 2 * radial.mid_dim * products * edges  # of the convolution, forward

    def calls(self, module: Any) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
        """Every operation of a module, with the tensors that get a gradient."""
        columns = frame_tables.plain_columns(self.hidden)
        packing = frame_tables.Packing(columns, self.plan.input_rows(), self.device)
        table, rows, spec, width = packing.columns, packing.rows, packing.spec, packing.width
        size = self.value_fiber.num_features // self.heads
        graph, gather = self.graph, (self.graph.src, *self.graph.by_source)
        tables = [table.to(self.device) for table in self.plan.weight_tables(False)]
        return {
            "conv": (
                lambda: module.conv(self.x, self.h, self.w, self.trunk.numbers, self.trunk.rows),
                [self.x, self.h, self.w],
            ),
            "to_frame": (
                lambda: module.to_frame(
                    self.features, *gather, self.rotations, table, rows, spec, self.plan.inputs.rows, self.edges
                ),
                [self.features],
            ),
            "from_frame": (lambda: module.from_frame(self.y, self.rotations, table, rows, spec, width), [self.y]),
            "mix_rows": (lambda: module.mix_rows(self.weights, *tables, self.dtype), [self.weights]),
            "attention": (
                lambda: module.attention(self.q, self.kv, graph.row_start, graph.dst, self.heads, size, size, 0.1),
                [self.q, self.kv],
            ),
        }


def _with_backward(call: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], Any]:
    weight = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaves, weight)


def measure_kernels(config: BenchmarkConfig, device: torch.device) -> list[dict[str, Any]]:
    """Forward, and forward with backward, of every operation: by kernels and in plain PyTorch, in turns."""
    rows = []
    for graph, molecules in itertools.product(config.graphs, config.batch_sizes):
        case = Case(config, EDGES[graph] * molecules, device)
        fast = ops.backend(case.x, None)
        if fast is None:
            raise ValueError(f"there are no kernels for {case.dtype} on {device}")
        ours, plain = case.calls(fast), case.calls(frame_math)
        for name, (call, leaves) in ours.items():
            programs = {
                "forward": {"ours": call, "plain": plain[name][0]},
                "step": {"ours": _with_backward(call, leaves), "plain": _with_backward(plain[name][0], leaves)},
            }
            for part, both in programs.items():
                found = bench.compare(
                    both, pairs=config.pairs, items=case.edges, unit="edges/s", device=device, warmup=config.warmup,
                    iterations=config.iterations, precision=config.precision,
                )  # fmt: skip
                milliseconds = found.measurements["ours"].p50_ms
                row = {"kernel": name, "part": part, "edges": case.edges, **found.to_json()}
                text = (
                    f"{name:10s} {part:8s} {case.edges:7d} edges  {milliseconds:8.4f} ms  {found.median():6.2f} x plain"
                )
                if name == "conv":
                    row["tflops"] = case.flop * (1 if part == "forward" else 3) / milliseconds / 1e9
                    text += f"  {row['tflops']:.0f} TFLOP/s"
                rows.append(row)
                print(text, flush=True)
    return rows


@contextlib.contextmanager
def _tiles(name: str, tiles: tuple[int, ...]) -> Iterator[None]:
    from .model import conv_kernels

    old = getattr(conv_kernels, name)
    setattr(conv_kernels, name, tiles)
    try:
        yield
    finally:
        setattr(conv_kernels, name, old)


def measure_tiles(config: BenchmarkConfig, device: torch.device) -> list[dict[str, Any]]:
    """The convolution's three kernels with other tiles: what `conv_kernels.FORWARD` and its neighbours should be."""
    from .model import conv_kernels

    rows = []
    for graph, molecules in itertools.product(config.graphs, config.batch_sizes):
        case = Case(config, EDGES[graph] * molecules, device)
        x, h, w, dy = (tensor.detach() for tensor in (case.x, case.h, case.w, torch.randn_like(case.y)))
        blocks, count = tuple(case.trunk.numbers), case.trunk.rows
        calls = {
            "FORWARD": (FORWARD, lambda x=x, h=h, w=w, b=blocks, n=count: conv_kernels.conv_forward(x, h, w, b, n)),
            "BACKWARD_INPUT": (
                BACKWARD_INPUT, lambda dy=dy, x=x, h=h, w=w, b=blocks: conv_kernels.conv_backward_input(dy, x, h, w, b),
            ),
            "BACKWARD_WEIGHT": (
                BACKWARD_WEIGHT,
                lambda dy=dy, x=x, h=h, w=w, b=blocks: conv_kernels.conv_backward_weight(dy, x, h, w.shape[0], b),
            ),
        }  # fmt: skip
        for name, (candidates, call) in calls.items():
            for tiles in candidates:
                with _tiles(name, tiles):
                    try:
                        found = bench.measure(
                            call, items=case.edges, unit="edges/s", device=device, warmup=config.warmup,
                            iterations=config.iterations,
                        )  # fmt: skip
                    except Exception as error:  # too much shared memory: Triton has an error class of its own
                        print(f"{name} {tiles}: {type(error).__name__}", flush=True)
                        continue
                rate = case.flop / found.p50_ms / 1e9
                rows.append(
                    {"kernel": name, "tiles": list(tiles), "edges": case.edges, "tflops": rate, **found.to_json()}
                )
                print(f"{case.edges:7d} edges  {name:16s} {str(tiles):22s} {found.p50_ms:8.4f} ms  {rate:6.0f} TFLOP/s")
    return rows
