"""Equivariant convolution: messages along edges by the kernels of Tensor Field Networks (Thomas et al. 2018,
arXiv:1802.08219), with radial profiles as weights.

For an edge e, output degree o and channel c:  out[c] = sum over i, c', J of R_e[c, c', J] B_J(e)^T x_src[c'], where B_J
are the equivariant maps from degree i to o and R_e comes from the edge's invariants. Two ways give the same result:
plain PyTorch in the basis of paths J (it writes R, E x C_out x C_in x F numbers), and, on a GPU, kernels in the frame
of the edge that never write it (``ops``). Selected by ``fused``.

There is one set of parameters for every way. The reference package has four layouts, by its fuse level; its state
dicts are converted when they are loaded (``convert``).

N nodes, E edges, C channels, F paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import convert
from ..graph import Graph
from . import ops
from .basis import Basis
from .fiber import Fiber, degree_to_dim
from .frame_tables import FrameTables, head_columns, make_tables, plain_columns
from .geometry import Geometry
from .linear import mix_channels
from .radial import RadialProfile

LOW_MEMORY_NUMBERS = 2**24  # radial weights that low-memory mode holds at a time


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value; what it computes on the way is computed again in the backward pass instead of kept."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class ConvSE3FuseLevel(Enum):
    """The reference package's levels. They change neither the parameters nor the result here."""

    FULL = 2
    PARTIAL = 1
    NONE = 0


class VersatileConvSE3(nn.Module):
    """The kernels of all pairs of degrees: features of edges' sources -> messages. See ``RadialProfile``."""

    def __init__(
        self, fiber_in: Fiber, fiber_out: Fiber, edge_dim: int, use_layer_norm: bool = False, mid_dim: int = 32,
        sharing: str = "all",
    ):  # fmt: skip
        super().__init__()
        self.fiber_in, self.fiber_out = fiber_in, fiber_out
        self.radial_func = RadialProfile(fiber_in, fiber_out, edge_dim, mid_dim, use_layer_norm, sharing)

    def forward(self, features: Mapping[str, Tensor], invariants: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """Features {degree: (E, C_in, 2 i + 1)}, invariants (E, edge_dim) -> {degree: (E, C_out, 2 o + 1)}."""
        hidden = self.radial_func(invariants)
        weights = self.radial_func.weights
        messages: dict[str, Tensor] = {}
        for pair in self.radial_func.pairs:
            source = features[str(pair.degree_in)]
            radial = F.linear(hidden[:, pair.trunk], weights[pair.rows])
            radial = radial.view(len(source), pair.channels_out, pair.channels_in * pair.paths)
            dim_out = degree_to_dim(pair.degree_out)
            basis = geometry.pair(pair.degree_in, pair.degree_out).to(source.dtype)
            mapped = source @ basis.reshape(len(source), degree_to_dim(pair.degree_in), pair.paths * dim_out)
            mapped = mapped.view(len(source), pair.channels_in * pair.paths, dim_out)  # (E, C_in * F, 2 o + 1)
            message = radial @ mapped
            key = str(pair.degree_out)
            messages[key] = messages[key] + message if key in messages else message
        return messages


class ConvSE3(nn.Module):
    """Messages, optionally with the destination's own features and summed over the edges into each node.

    ``fiber_edge``: channels of the edge features without the distance, which is added to degree 0. Edge features of a
    higher degree d join the source's channels where ``fiber_in`` has d. ``self_interaction`` adds a linear map of the
    destination's features to each message. ``low_memory`` computes messages in parts and again in the backward pass.
    ``fuse_level``, ``max_degree`` and ``allow_fused_output`` are accepted for callers of the reference package.
    ``fused`` is True, False or None: None takes the kernels where they apply.
    """

    def __init__(
        self,
        fiber_in: Fiber,
        fiber_out: Fiber,
        fiber_edge: Fiber,
        pool: bool = True,
        use_layer_norm: bool = False,
        self_interaction: bool = False,
        max_degree: int | None = None,
        fuse_level: ConvSE3FuseLevel = ConvSE3FuseLevel.FULL,
        allow_fused_output: bool = False,
        low_memory: bool = False,
        radial_sharing: str = "all",
    ):
        super().__init__()
        self.fiber_in, self.fiber_out, self.fiber_edge = fiber_in, fiber_out, fiber_edge
        self.pool, self.self_interaction, self.low_memory = pool, self_interaction, low_memory
        self.max_degree = max(fiber_in.max_degree, fiber_out.max_degree)
        self.fused: bool | None = None
        self.packing: tuple[Fiber, Fiber] | None = None  # values and keys, where an attention block owns this
        self._tables: dict[str, FrameTables] = {}
        sources = Fiber([(degree, channels + (fiber_edge[degree] if degree else 0)) for degree, channels in fiber_in])
        self.conv = VersatileConvSE3(sources, fiber_out, fiber_edge[0] + 1, use_layer_norm, sharing=radial_sharing)
        if self_interaction:
            self.to_kernel_self = nn.ParameterDict(
                {
                    str(degree): nn.Parameter(torch.randn(channels, fiber_in[degree]) / fiber_in[degree] ** 0.5)
                    for degree, channels in fiber_out
                    if degree in fiber_in
                }
            )

    def convert_state_dict(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Bring this layer's entries of a reference layout into ours, in place."""
        convert.convert_convolution(self.conv.radial_func, state_dict, prefix)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self.convert_state_dict(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        node_feats: Mapping[str, Tensor],
        edge_feats: Mapping[str, Tensor],
        graph: Graph,
        basis: Geometry | Basis | None = None,
    ) -> dict[str, Tensor]:
        """Node features {degree: (N, C, 2 d + 1)}; edge features with the distance as last scalar. Edges or nodes out.

        Rows of edges are in the order of ``graph``.
        """
        geometry = basis if isinstance(basis, Geometry) else Geometry(graph.relative_pos, self.max_degree, basis)
        messages = self.messages(node_feats, edge_feats, graph, geometry)
        return {degree: self._finish(degree, value, node_feats, graph) for degree, value in messages.items()}

    def uses_frames(self, features: Mapping[str, Tensor], geometry: Geometry) -> bool:
        """Whether this call goes by way of the edges' frames."""
        first = next(iter(features.values()))
        # Given bases are to be used, and gradients of positions come from the basis of paths alone.
        allowed = not geometry.has_own_basis and not geometry.relative_pos.requires_grad
        return allowed and ops.supports(self.conv.radial_func.mid_dim) and ops.backend(first, self.fused) is not None

    def frame_tables(self, device: torch.device, heads: int | None = None) -> FrameTables:
        """The tables of the way by frames, made once per device; messages packed by attention heads if given."""
        radial = self.conv.radial_func
        key = f"{device} {radial.weights.dtype} {radial.sharing} {heads}"
        if key not in self._tables:
            self._tables[key] = self._make_tables(device, heads)
        return self._tables[key]

    @torch.compiler.disable
    def _make_tables(self, device: torch.device, heads: int | None) -> FrameTables:
        radial = self.conv.radial_func
        if heads is None:
            columns = plain_columns(self.fiber_out)
        else:
            columns = head_columns(*self.packing, heads)
        exact = radial.weights.dtype == torch.float64
        return make_tables(radial.fiber_in, radial.fiber_out, radial.sharing, columns, device, exact)

    def messages(
        self, node_feats: Mapping[str, Tensor], edge_feats: Mapping[str, Tensor], graph: Graph, geometry: Geometry
    ) -> dict[str, Tensor]:
        """{degree: (E, C_out, 2 o + 1)}."""
        if self.uses_frames(node_feats, geometry):
            tables = self.frame_tables(next(iter(node_feats.values())).device)
            arguments = (self, node_feats, edge_feats, graph, geometry, tables)
            packed = recomputed(ops.packed_messages, *arguments) if self.low_memory else ops.packed_messages(*arguments)
            return ops.unpack(packed, self.fiber_out)
        if not self.low_memory:
            return self._part(node_feats, edge_feats, graph.src, geometry)
        numbers = max(1, len(self.conv.radial_func.weights))  # per edge
        size = max(1, LOW_MEMORY_NUMBERS // numbers)
        parts = []
        for edges in torch.arange(graph.num_edges, device=graph.src.device).split(size):
            parts.append(recomputed(self._some, node_feats, edge_feats, graph, geometry, edges))
        return {degree: torch.cat([part[degree] for part in parts]) for degree in parts[0]}

    def _some(
        self,
        node_feats: Mapping[str, Tensor],
        edge_feats: Mapping[str, Tensor],
        graph: Graph,
        geometry: Geometry,
        edges: Tensor,
    ) -> dict[str, Tensor]:
        """Messages of some of the edges. Their geometry is made here: it, too, is computed again and not kept."""
        some = {degree: value[edges] for degree, value in edge_feats.items()}
        return self._part(node_feats, some, graph.src[edges], geometry.part(edges))

    def sources(
        self, node_feats: Mapping[str, Tensor], edge_feats: Mapping[str, Tensor], src: Tensor
    ) -> dict[str, Tensor]:
        """What the kernels act on: the features of each edge's source, with the edge's own where it has that degree."""
        features = {}
        for degree in map(str, self.fiber_in.degrees):
            features[degree] = node_feats[degree][src]
            if degree != "0" and self.fiber_edge[degree]:
                features[degree] = torch.cat([features[degree], edge_feats[degree]], 1)
        return features

    def _part(self, node_feats, edge_feats, src: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        invariants = edge_feats["0"].squeeze(-1)
        return self.conv(self.sources(node_feats, edge_feats, src), invariants, geometry)

    def _finish(self, degree: str, messages: Tensor, node_feats: Mapping[str, Tensor], graph: Graph) -> Tensor:
        kernel = self.to_kernel_self[degree] if self.self_interaction and degree in self.to_kernel_self else None
        if not self.pool:
            return messages if kernel is None else messages + mix_channels(node_feats[degree], kernel)[graph.dst]
        output = ops.segment_sum(messages, graph.row_start, graph.dst, self.fused)
        if kernel is not None:  # once per incoming edge
            own = mix_channels(node_feats[degree], kernel)
            output = output + own * graph.in_degrees.view(-1, 1, 1).to(own.dtype)
        return output
