"""From node features to one feature per graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from ..graph import Graph


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

    def forward(self, features: Mapping[str, Tensor], graph: Graph, **kwargs) -> Tensor:
        values = features[str(self.feat_type)]
        index = graph.batch.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
        pooled = values.new_zeros(graph.num_graphs, *values.shape[1:])
        if self.pool == "max":
            pooled = pooled.scatter_reduce(0, index, values, "amax", include_self=False)
        else:
            pooled = pooled.index_add(0, graph.batch, values)
            if self.pool == "avg":
                pooled = pooled / graph.graph_sizes.clamp(min=1).view(-1, 1, 1).to(pooled.dtype)
        return pooled.squeeze(-1) if self.feat_type == 0 else pooled
