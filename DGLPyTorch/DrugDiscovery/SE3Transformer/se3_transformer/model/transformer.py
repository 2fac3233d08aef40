"""The SE(3)-Transformer (Fuchs et al. 2020, arXiv:2006.10503) and its form with a pooled scalar output.

Constructor arguments, calls and module names follow NVIDIA's package, so that code written for it runs unchanged.
What differs: it needs neither DGL nor a GPU; ``tensor_cores`` and ``low_memory`` change neither weights nor results;
normalisation is right for fibers of mixed channel counts; sums of fibers keep all degrees; relative positions that
require a gradient get one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..graph import Graph, as_graph
from .attention import AttentionBlockSE3
from .basis import Basis
from .convolution import ConvSE3
from .fiber import Fiber
from .geometry import Geometry
from .linear import LinearSE3
from .norm import NormSE3
from .pooling import GPooling

POPULATE_EDGE = ("lin", "arcsin", "zero")  # what layers see of an edge's length
FINAL_LAYERS = ("conv", "lin")
# Options of protein-design codes' own copies of the package, with the value that the original has.
VARIANTS = {"sum_over_edge": True}


class Layers(nn.ModuleList):
    """Layers that are called in turn with the graph, the edge features and the geometry."""

    def forward(self, node_feats, edge_feats, graph: Graph, basis: Geometry) -> dict[str, Tensor]:
        for layer in self:
            node_feats = layer(node_feats, edge_feats, graph=graph, basis=basis)
        return node_feats


class SE3Transformer(nn.Module):
    """Attention blocks with norms, and a last convolution with self-interaction.

    ``return_type``: return the tensor of this degree instead of the dictionary of all. ``pooling`` (max, avg, sum):
    one row per graph, of degree ``return_type``, which defaults to 0. ``low_memory``: keys and values are computed in
    parts and recomputed in the backward pass. ``tensor_cores`` is accepted and has no effect, like other options of
    the reference's command line.

    Of the descendants in protein-design codes: ``populate_edge`` says what layers see of an edge's length r: "lin" r,
    "arcsin" arcsinh(max(r, 4) - 4) / 3 (RoseTTAFold2), "zero" 0; ``final_layer`` "lin" is a LinearSE3 in place of the
    last convolution. Others of theirs that would make another model are refused (``VARIANTS``).
    """

    def __init__(
        self,
        num_layers: int,
        fiber_in: Fiber,
        fiber_hidden: Fiber,
        fiber_out: Fiber,
        num_heads: int,
        channels_div: int,
        fiber_edge: Fiber | None = None,
        return_type: int | None = None,
        pooling: Literal["max", "avg", "sum"] | None = None,
        norm: bool = True,
        use_layer_norm: bool = True,
        tensor_cores: bool = False,
        low_memory: bool = False,
        radial_sharing: str = "all",
        populate_edge: Literal["lin", "arcsin", "zero"] = "lin",
        final_layer: Literal["conv", "lin"] = "conv",
        **kwargs: Any,
    ):
        super().__init__()
        for name, value, known in (
            ("populate_edge", populate_edge, POPULATE_EDGE), ("final_layer", final_layer, FINAL_LAYERS),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} {value!r} is not supported, only {', '.join(known)}")
        for name, only in VARIANTS.items():
            if kwargs.get(name, only) != only:
                raise ValueError(f"{name} {kwargs[name]!r} is not supported, only {only!r}")
        own = inspect.signature(SE3Transformer.__init__).parameters.keys() - {"self", "kwargs"}
        for name in kwargs.keys() - VARIANTS.keys():
            if close := difflib.get_close_matches(name, own, 1, 0.85):
                raise TypeError(f"unknown option {name!r}; did you mean {close[0]!r}?")
        if num_heads < 1 or channels_div < 1:
            raise ValueError(f"num_heads and channels_div must be at least 1, got {num_heads} and {channels_div}")
        if return_type is not None and return_type not in fiber_out.degrees:
            raise ValueError(f"return_type {return_type} is none of the output's degrees {fiber_out.degrees}")
        read = {0, *fiber_in.degrees, *(fiber_hidden.degrees if num_layers else ())}
        idle = [degree for degree in (fiber_edge or Fiber({})).degrees if degree not in read]
        if idle:
            raise ValueError(f"edge features of degree {idle[0]} would go unread: no layer's input has that degree")
        self.num_layers, self.num_heads, self.channels_div = num_layers, num_heads, channels_div
        self.fiber_in, self.fiber_hidden, self.fiber_out = fiber_in, fiber_hidden, fiber_out
        self.fiber_edge = Fiber({}) if fiber_edge is None else fiber_edge
        self.return_type, self.pooling, self.populate_edge = return_type, pooling, populate_edge
        self.max_degree = max(fiber_in.max_degree, fiber_hidden.max_degree, fiber_out.max_degree)
        options = {"use_layer_norm": use_layer_norm, "low_memory": low_memory, "radial_sharing": radial_sharing}
        layers: list[nn.Module] = []
        for _ in range(num_layers):
            layers.append(
                AttentionBlockSE3(fiber_in, fiber_hidden, self.fiber_edge, num_heads, channels_div, **options)
            )
            if norm:
                layers.append(NormSE3(fiber_hidden))
            fiber_in = fiber_hidden
        if final_layer == "conv":
            layers.append(ConvSE3(fiber_in, fiber_out, self.fiber_edge, self_interaction=True, **options))
        else:
            lost = [degree for degree in fiber_out.degrees if degree not in fiber_in.degrees]
            if lost:
                raise ValueError(f"a linear final layer cannot make degree {lost[0]}: the hidden fiber has none")
            layers.append(LinearSE3(fiber_in, fiber_out))
        self.graph_modules = Layers(layers)
        if pooling is not None:
            self.pooling_module = GPooling(pool=pooling, feat_type=return_type or 0)

    def forward(
        self,
        graph: Any,
        node_feats: Mapping[str, Tensor],
        edge_feats: Mapping[str, Tensor] | None = None,
        basis: Basis | Geometry | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """``graph``: see ``graph.as_graph``. ``node_feats`` {degree: (N, C, 2 d + 1)}, ``edge_feats`` {degree: (E, C,
        2 d + 1)} in the caller's order of edges. ``basis``: of ``get_basis``, to spare computing it.

        ValueError where features are missing or have another shape than the fibers say.
        """
        compiling = torch.compiler.is_compiling()
        graph, node_feats, edge_feats, geometry = self._prepare(graph, node_feats, edge_feats, basis, compiling)
        node_feats = self.graph_modules(node_feats, edge_feats, graph=graph, basis=geometry)
        if self.pooling is not None:
            return self.pooling_module(node_feats, graph=graph)
        return node_feats if self.return_type is None else node_feats[str(self.return_type)]

    @torch.compiler.disable
    def _prepare(
        self, graph: Any, node_feats: Mapping[str, Tensor], edge_feats: Mapping[str, Tensor] | None, basis: Any,
        everything: bool,
    ) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor], Geometry]:  # fmt: skip
        """Checked inputs in the graph's order, distances among the edge features, and the geometry.

        ``everything``: with all that layers would compute of it when they first need it.
        """
        graph = as_graph(graph)
        edge_feats = {str(degree): graph.edge_values(value) for degree, value in (edge_feats or {}).items()}
        node_feats = {str(degree): value for degree, value in node_feats.items()}
        _check(node_feats, self.fiber_in, graph.num_nodes, "node")
        _check(edge_feats, self.fiber_edge, graph.num_edges, "edge")
        if not isinstance(basis, Geometry):
            if basis is not None:
                basis = {key: graph.edge_values(value) for key, value in basis.items() if key[0].isdigit()}
            basis = Geometry(graph.relative_pos, self.max_degree, basis, graph.degenerate)
        distances = _seen_of(basis.distances, self.populate_edge)
        scalars = [edge_feats["0"], distances.to(edge_feats["0"].dtype)] if self.fiber_edge[0] else [distances]
        edge_feats["0"] = torch.cat(scalars, 1).to(next(iter(node_feats.values())).dtype)
        if everything:
            convolutions = [module for module in self.modules() if isinstance(module, ConvSE3)]
            if convolutions:
                basis.prepare(convolutions[0].uses_frames(node_feats, basis))
            _ = graph.row_start, graph.by_source, graph.graph_start
        return graph, node_feats, edge_feats, basis


def _seen_of(distances: Tensor, populate_edge: str) -> Tensor:
    if populate_edge == "arcsin":
        return torch.arcsinh(distances.clamp(min=4.0) - 4.0) / 3.0
    return torch.zeros_like(distances) if populate_edge == "zero" else distances


def _check(features: Mapping[str, Tensor], fiber: Fiber, rows: int, what: str) -> None:
    unread = sorted(set(features) - {str(degree) for degree in fiber.degrees})
    if unread:
        known = ", ".join(map(str, fiber.degrees)) or "none"
        raise ValueError(f"{what} features of degree {unread[0]} are not of the model's fiber (its degrees: {known})")
    for degree, channels in fiber:
        expected = (rows, channels, 2 * degree + 1)
        found = features.get(str(degree))
        if found is None or tuple(found.shape) != expected:
            got = "none" if found is None else f"shape {tuple(found.shape)}"
            raise ValueError(f"{what} features of degree {degree} must have shape {expected}, got {got}")


class SE3TransformerPooled(nn.Module):
    """A transformer with pooled scalars and a two-layer head: (graphs,) or (graphs, output_dim) predictions."""

    def __init__(
        self,
        fiber_in: Fiber,
        fiber_out: Fiber,
        fiber_edge: Fiber,
        num_degrees: int,
        num_channels: int,
        output_dim: int,
        **kwargs: Any,
    ):
        super().__init__()
        kwargs["pooling"] = kwargs.get("pooling") or "max"
        self.transformer = SE3Transformer(
            fiber_in=fiber_in, fiber_hidden=Fiber.create(num_degrees, num_channels), fiber_out=fiber_out,
            fiber_edge=fiber_edge, return_type=0, **kwargs,
        )  # fmt: skip
        width = fiber_out[0]
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, output_dim))

    def forward(
        self,
        graph: Any,
        node_feats: Mapping[str, Tensor],
        edge_feats: Mapping[str, Tensor] | None = None,
        basis: Basis | Geometry | None = None,
    ) -> Tensor:
        return self.mlp(self.transformer(graph, node_feats, edge_feats, basis)).squeeze(-1)


def set_kernels(model: nn.Module, fused: bool | None) -> nn.Module:
    """Select the GPU kernels (True or None: where they apply) or plain PyTorch (False) in every layer of a model."""
    for module in model.modules():
        if isinstance(module, ConvSE3 | NormSE3 | GPooling):
            module.fused = fused
    return model
