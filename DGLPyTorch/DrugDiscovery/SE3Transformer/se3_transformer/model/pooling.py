"""From node features to one feature per graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from ..graph import Graph
from . import ops


class GPooling(nn.Module):
    """Maximum, average or sum over the nodes of every graph of one degree's features: (graphs, channels, 2 d + 1).

    The last axis is dropped for scalars. A graph without nodes gives zeros. ValueError for a maximum over components
    that turn with the frame.
    """

    def __init__(self, feat_type: int = 0, pool: Literal["max", "avg", "sum"] = "max"):
        super().__init__()
        if pool not in ("max", "avg", "sum"):
            raise ValueError(f"pooling must be max, avg or sum, got {pool!r}")
        if pool == "max" and feat_type != 0:
            raise ValueError(f"max pooling of degree {feat_type} would not be equivariant; use avg or sum")
        self.feat_type, self.pool = feat_type, pool
        self.fused: bool | None = None

    def forward(self, features: Mapping[str, Tensor], graph: Graph, **kwargs) -> Tensor:
        values = features[str(self.feat_type)]
        if self.pool == "max":
            index = graph.batch.view(-1, 1, 1).expand_as(values)
            empty = values.new_zeros(graph.num_graphs, *values.shape[1:])
            pooled = empty.scatter_reduce(0, index, values, "amax", include_self=False)
        else:
            pooled = ops.segment_sum(values, graph.graph_start, graph.batch, self.fused)
            if self.pool == "avg":
                sizes = graph.graph_start.diff().clamp(min=1)
                pooled = pooled / sizes.view(-1, 1, 1).to(pooled.dtype)
        return pooled.squeeze(-1) if self.feat_type == 0 else pooled
