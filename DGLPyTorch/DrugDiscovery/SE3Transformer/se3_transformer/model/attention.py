"""Multi-head attention over the edges into each node, and the block around it (Fuchs et al. 2020, arXiv:2006.10503)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..graph import Graph
from . import ops
from .basis import Basis
from .convolution import ConvSE3, ConvSE3FuseLevel, recomputed
from .fiber import Fiber, degree_to_dim
from .geometry import Geometry
from .linear import LinearSE3


class AttentionSE3(nn.Module):
    """Softmax over the edges into a node of <key, query> / sqrt(numbers in a key), then the weighted sum of values."""

    def __init__(self, num_heads: int, key_fiber: Fiber, value_fiber: Fiber):
        super().__init__()
        for degree, channels in value_fiber:
            if channels % num_heads:
                raise ValueError(f"{channels} value channels of degree {degree} cannot be split into {num_heads} heads")
        self.num_heads, self.key_fiber, self.value_fiber = num_heads, key_fiber, value_fiber
        self.scale = 1 / math.sqrt(key_fiber.num_features)

    def forward(
        self, value: Mapping[str, Tensor], key: Mapping[str, Tensor], query: Mapping[str, Tensor], graph: Graph
    ) -> dict[str, Tensor]:
        """Keys and values of edges, queries of nodes -> {degree: (N, value channels, 2 d + 1)}."""
        keys = self.key_fiber.to_attention_heads(key, self.num_heads)
        queries = self.key_fiber.to_attention_heads(query, self.num_heads)
        scores = (keys * queries[graph.dst]).sum(-1, dtype=_at_least_float(keys)) * self.scale
        weights = ops.segment_softmax_plain(scores, graph)[..., None, None]
        output = {}
        for degree, channels in self.value_fiber:
            split = value[str(degree)].unflatten(1, (self.num_heads, channels // self.num_heads))
            weighted = weights.to(split.dtype) * split
            summed = ops.segment_sum_plain(weighted, graph)
            output[str(degree)] = summed.reshape(graph.num_nodes, channels, degree_to_dim(degree))
        return output


def _at_least_float(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.half, torch.bfloat16) else tensor.dtype


class AttentionBlockSE3(nn.Module):
    """Keys and values by one convolution, queries by a linear map; the output is projected with the input beside it."""

    def __init__(
        self,
        fiber_in: Fiber,
        fiber_out: Fiber,
        fiber_edge: Fiber | None = None,
        num_heads: int = 4,
        channels_div: int = 2,
        use_layer_norm: bool = False,
        max_degree: int | None = None,
        fuse_level: ConvSE3FuseLevel = ConvSE3FuseLevel.FULL,
        low_memory: bool = False,
        radial_sharing: str = "all",
    ):
        super().__init__()
        self.fiber_in = fiber_in
        value_fiber = Fiber([(degree, channels // channels_div) for degree, channels in fiber_out])
        key_fiber = value_fiber.select(fiber_in.degrees)  # queries are linear maps, so they have the input's degrees
        if not key_fiber:
            raise ValueError(f"attention needs a degree that input {fiber_in} and output {fiber_out} share")
        self.value_fiber, self.key_fiber = value_fiber, key_fiber
        self.to_key_value = ConvSE3(
            fiber_in, value_fiber + key_fiber, fiber_edge or Fiber({}), pool=False, use_layer_norm=use_layer_norm,
            low_memory=low_memory, radial_sharing=radial_sharing,
        )  # fmt: skip
        self.to_key_value.packing = (value_fiber, key_fiber)
        self.to_query = LinearSE3(fiber_in, key_fiber)
        self.attention = AttentionSE3(num_heads, key_fiber, value_fiber)
        self.project = LinearSE3(value_fiber + fiber_in, fiber_out)

    def forward(
        self,
        node_features: Mapping[str, Tensor],
        edge_features: Mapping[str, Tensor],
        graph: Graph,
        basis: Geometry | Basis | None = None,
    ) -> dict[str, Tensor]:
        conv = self.to_key_value
        geometry = basis if isinstance(basis, Geometry) else Geometry(graph.relative_pos, conv.max_degree, basis)
        query = self.to_query(node_features)
        if conv.uses_frames(node_features, geometry):
            arguments = (self, node_features, edge_features, query, graph, geometry)
            attended = (
                recomputed(ops.attention_block, *arguments) if conv.low_memory else ops.attention_block(*arguments)
            )
        else:
            messages = conv(node_features, edge_features, graph, geometry)
            value, key = self._split(messages)
            attended = self.attention(value, key, query, graph)
        joined = {d: torch.cat([v, node_features[d]], 1) if d in node_features else v for d, v in attended.items()}
        return self.project(joined)

    def _split(self, messages: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values are the first channels of every degree, keys the rest."""
        value = {str(degree): messages[str(degree)][:, :channels] for degree, channels in self.value_fiber}
        key = {str(degree): messages[str(degree)][:, self.value_fiber[degree] :] for degree in self.key_fiber.degrees}
        return value, key
