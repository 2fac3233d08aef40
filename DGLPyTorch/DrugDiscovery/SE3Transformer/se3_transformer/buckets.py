"""Batches padded to a few sizes, so that a CUDA graph or a compiled model serves batches of any size.

The padding is a further graph of its own: nodes with zero features and edges of length one among them. Nothing leads
from it to the real graphs, so their outputs are those of the unpadded batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import Graph
from .molecules import Batch


def bucket(count: int, steps: int = 8, least: int = 64) -> int:
    """The next size: multiples of 1 / ``steps`` of the power of two below ``count``, but of 16 at least."""
    if count <= least:
        return least
    step = max(16, (1 << (count - 1).bit_length() - 1) // steps)
    return -(-count // step) * step


def pad(batch: Batch, num_nodes: int, num_edges: int, num_graphs: int | None = None) -> Batch:
    """The batch with exactly these numbers of nodes, edges and (real) graphs, and one more graph for the padding.

    At least one node is added. Rows of targets are filled with nan. ValueError where the batch is larger.
    """
    graph = batch.graph
    num_graphs = graph.num_graphs if num_graphs is None else num_graphs
    nodes, edges, graphs = (
        num_nodes - graph.num_nodes, num_edges - graph.num_edges, num_graphs + 1 - graph.num_graphs,
    )  # fmt: skip
    if nodes < 1 or edges < 0 or graphs < 1:
        raise ValueError(
            f"{graph.num_nodes} nodes, {graph.num_edges} edges and {graph.num_graphs} graphs do not fit into "
            f"{num_nodes} (one is the padding's), {num_edges} and {num_graphs}"
        )
    device = graph.edge_index.device
    # Spread over the padding's nodes, since a node's edges are worked through one after the other.
    place = graph.num_nodes + torch.arange(edges, device=device) * nodes // max(edges, 1)
    edge_index = torch.cat([graph.edge_index, place.expand(2, -1)], 1)
    batch_index = F.pad(graph.batch, (0, nodes), value=num_graphs)
    unit = torch.tensor([0.0, 1.0, 0.0], dtype=graph.relative_pos.dtype, device=device).expand(edges, 3)
    padded = Graph(
        edge_index, num_nodes, batch_index, num_graphs + 1, torch.cat([graph.relative_pos, unit]),
        degenerate=graph.degenerate,
    )  # fmt: skip

    def rows(features: dict[str, Tensor], count: int) -> dict[str, Tensor]:
        return {key: F.pad(value, (0, 0, 0, 0, 0, count)) for key, value in features.items()}

    targets = batch.targets
    if targets is not None:
        targets = F.pad(targets, (0, 0) * (targets.dim() - 1) + (0, graphs), value=float("nan"))
    return Batch(padded, rows(batch.node_feats, nodes), rows(batch.edge_feats, edges), targets)


def pad_to_bucket(batch: Batch, steps: int = 8) -> Batch:
    """``pad`` to the next bucket of nodes and edges."""
    graph = batch.graph
    return pad(batch, bucket(graph.num_nodes + 1, steps), bucket(graph.num_edges, steps))


def to_tensors(batch: Batch) -> dict[str, Tensor]:
    """The batch as a flat dictionary of tensors, for code that copies or captures nestings of tensors.

    ValueError unless the batch promises that no edge has length zero: looking for one would wait for the device.
    """
    graph = batch.graph
    if graph.degenerate is not None:
        raise ValueError("the batch must promise that no edge has length zero (Graph.degenerate is None)")
    tensors = {"edge_index": graph.edge_index, "batch": graph.batch, "relative_pos": graph.relative_pos}
    tensors |= {f"node:{degree}": value for degree, value in batch.node_feats.items()}
    tensors |= {f"edge:{degree}": value for degree, value in batch.edge_feats.items()}
    return tensors | ({} if batch.targets is None else {"targets": batch.targets})


def from_tensors(tensors: dict[str, Tensor], num_graphs: int) -> Batch:
    """The batch again. What it derives (where each node's edges begin, frames) is made anew, inside a capture too."""
    feats = {
        kind: {key.removeprefix(f"{kind}:"): value for key, value in tensors.items() if key.startswith(f"{kind}:")}
        for kind in ("node", "edge")
    }
    count = len(tensors["batch"])
    graph = Graph(tensors["edge_index"], count, tensors["batch"], num_graphs, tensors["relative_pos"], degenerate=None)
    return Batch(graph, feats["node"], feats["edge"], tensors.get("targets"))
