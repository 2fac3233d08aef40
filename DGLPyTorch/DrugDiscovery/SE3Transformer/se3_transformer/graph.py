"""Graphs as plain tensors, and adapters for the graph objects of other libraries.

The core sums messages by destination, so a ``Graph`` keeps its edges sorted by destination; the order is computed once
and everything that belongs to edges is brought into it. N nodes, E edges, G graphs of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Graph:
    """A batch of directed graphs; ``src`` sends messages to ``dst``.

    ``edge_index`` (2, E) int64 [src, dst]; ``batch`` (N,) int64, which graph a node belongs to (None: one graph), in
    ascending order; ``relative_pos`` (E, 3) = position of dst - position of src. ``order`` (E,) is the permutation that
    sorted the caller's edges, None if they were sorted. ``degenerate``: see ``Geometry``; None promises that no edge
    has length zero.
    """

    edge_index: Tensor
    num_nodes: int
    batch: Tensor | None = None
    num_graphs: int | None = None
    relative_pos: Tensor | None = None
    order: Tensor | None = None
    degenerate: Tensor | bool | None = True
    _row_start: Tensor | None = field(default=None, init=False, repr=False)
    _by_source: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)
    _graph_start: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.edge_index.dim() != 2 or self.edge_index.shape[0] != 2:
            raise ValueError(f"edge_index must have shape (2, edges), got {tuple(self.edge_index.shape)}")
        if self.batch is None:
            self.batch = self.edge_index.new_zeros(self.num_nodes)
            self.num_graphs = 1 if self.num_graphs is None else self.num_graphs
        if len(self.batch) != self.num_nodes:
            raise ValueError(f"batch names {len(self.batch)} nodes, the graph has {self.num_nodes}")
        if self.relative_pos is not None and len(self.relative_pos) != self.num_edges:
            raise ValueError(f"relative_pos has {len(self.relative_pos)} rows, the graph has {self.num_edges} edges")
        if self.edge_index.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would be waited for
            for name, values in (("dst", self.edge_index[1]), ("batch", self.batch)):
                if (values.diff() < 0).any():
                    raise ValueError(f"{name} must be in ascending order; Graph.build sorts edges")
            if self.num_nodes and int(self.batch[0]) < 0:
                raise ValueError(f"batch names graph {int(self.batch[0])}")
        if self.num_graphs is None:
            self.num_graphs = int(self.batch.max()) + 1 if self.num_nodes else 0

    @classmethod
    def build(
        cls, src: Tensor, dst: Tensor, num_nodes: int, *, relative_pos: Tensor | None = None, is_sorted: bool = False,
        check: bool = True, **options: Any,
    ) -> Graph:  # fmt: skip
        """From edges in any order. ``check`` looks for node numbers out of range, which waits for a GPU."""
        if src.shape != dst.shape or src.dim() != 1:
            raise ValueError(
                f"src and dst must be vectors of one length, got {tuple(src.shape)} and {tuple(dst.shape)}"
            )
        if check and len(src):
            low, high = int(min(src.min(), dst.min())), int(max(src.max(), dst.max()))
            if low < 0 or high >= num_nodes:
                raise ValueError(f"edges name nodes {low} to {high}, the graph has {num_nodes}")
        order = None
        if not is_sorted:
            dst, order = dst.sort(stable=True)
            src = src[order]
            if relative_pos is not None and len(relative_pos) != len(order):
                raise ValueError(f"relative_pos has {len(relative_pos)} rows, the graph has {len(order)} edges")
            relative_pos = None if relative_pos is None else relative_pos[order]
        edge_index = torch.stack([src, dst]).long()
        return cls(edge_index, num_nodes, relative_pos=relative_pos, order=order, **options)

    @property
    def src(self) -> Tensor:
        return self.edge_index[0]

    @property
    def dst(self) -> Tensor:
        return self.edge_index[1]

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    # Derived tables are made when first asked for. (functools.cached_property holds a lock, which torch.compile cannot
    # look into.)

    @property
    def row_start(self) -> Tensor:
        """(N + 1,) int32: the edges into node n are row_start[n] ... row_start[n + 1] - 1."""
        if self._row_start is None:
            self._row_start = _starts(self.dst, self.num_nodes)
        return self._row_start

    @property
    def in_degrees(self) -> Tensor:
        """(N,) number of edges into each node."""
        return self.row_start.diff()

    @property
    def by_source(self) -> tuple[Tensor, Tensor]:
        """((E,) the edges in order of their source, (N + 1,) where each source's edges start), int32."""
        if self._by_source is None:
            ordered, order = self.src.sort(stable=True)
            self._by_source = order.int(), _starts(ordered, self.num_nodes)
        return self._by_source

    @property
    def graph_start(self) -> Tensor:
        """(G + 1,) int32: the nodes of graph g are graph_start[g] ... graph_start[g + 1] - 1."""
        if self._graph_start is None:
            self._graph_start = _starts(self.batch, self.num_graphs)
        return self._graph_start

    def edge_values(self, value: Tensor) -> Tensor:
        """A tensor of the caller's edges (E, ...) in this graph's order."""
        if value.shape[0] != self.num_edges:
            raise ValueError(f"an edge feature has {value.shape[0]} rows, the graph has {self.num_edges} edges")
        return value if self.order is None else value[self.order]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """The same graph on another device, where its derived tables are made again."""

        def move(value):
            return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value

        moved = Graph(
            move(self.edge_index), self.num_nodes, move(self.batch), self.num_graphs, move(self.relative_pos),
            move(self.order), move(self.degenerate),
        )  # fmt: skip
        return moved


def _on_host(tensor: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a GPU."""
    return tensor.device.type == "cpu"


def _starts(ordered: Tensor, count: int) -> Tensor:
    bounds = torch.arange(count + 1, device=ordered.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, bounds).int()


def as_graph(source: Any, relative_pos: Tensor | None = None) -> Graph:
    """A ``Graph`` from one of ours, a DGLGraph or anything with its ``edges()``, or a PyG ``Data`` or ``Batch``.

    DGL's way: ``edges()``, ``num_nodes()``, ``edata['rel_pos']`` (position of dst - position of src), and
    ``batch_num_nodes()`` where it is a batch. PyG's: ``edge_index``, ``num_nodes``, ``batch``, and ``rel_pos`` or
    ``pos``. ValueError where relative positions are missing.
    """
    if isinstance(source, Graph):
        graph = source
    elif callable(getattr(source, "edges", None)):
        graph = _from_dgl(source, relative_pos)
    elif getattr(source, "edge_index", None) is not None:
        graph = _from_pyg(source, relative_pos)
    else:
        raise ValueError(f"a {type(source).__name__} is neither a Graph nor like a DGLGraph or a PyG Data")
    if graph.relative_pos is None:
        raise ValueError("the graph has no relative positions: give edata['rel_pos'], rel_pos or pos")
    return graph


def _from_dgl(source: Any, relative_pos: Tensor | None) -> Graph:
    src, dst = source.edges()[:2]
    edata: Mapping[str, Tensor] = getattr(source, "edata", {})
    if relative_pos is None and "rel_pos" in edata:
        relative_pos = edata["rel_pos"]
    count = source.num_nodes() if callable(getattr(source, "num_nodes", None)) else int(source.number_of_nodes())
    batch, graphs = None, None
    if callable(getattr(source, "batch_num_nodes", None)):
        sizes = source.batch_num_nodes().to(src.device)
        graphs = len(sizes)
        batch = torch.repeat_interleave(torch.arange(graphs, device=src.device), sizes, output_size=count)
    return Graph.build(
        src.long(), dst.long(), count, relative_pos=relative_pos, batch=batch, num_graphs=graphs, check=_on_host(src)
    )


def _from_pyg(source: Any, relative_pos: Tensor | None) -> Graph:
    src, dst = source.edge_index
    if relative_pos is None:
        relative_pos = getattr(source, "rel_pos", None)
    positions = getattr(source, "pos", None)
    if relative_pos is None and positions is not None:
        relative_pos = positions[dst] - positions[src]
    count = getattr(source, "num_nodes", None)
    if count is None:
        raise ValueError("the graph object does not say num_nodes")
    return Graph.build(
        src, dst, int(count), relative_pos=relative_pos, batch=getattr(source, "batch", None),
        num_graphs=getattr(source, "num_graphs", None), check=_on_host(src),
    )  # fmt: skip
