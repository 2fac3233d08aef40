"""What the layers call: the way of edge frames, by kernels or in plain PyTorch, and the rules for when it is taken.

``backend`` decides: a module's ``fused`` is False (plain PyTorch in the basis of paths), None (kernels where they
apply) or True (edge frames everywhere, in plain PyTorch where there are no kernels). Kernels apply on a GPU with
Triton, to fp32, bf16 and fp16; TRITON_INTERPRET=1 runs them on a CPU, for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Graph
from . import frame_math
from .frame_tables import FrameTables

if TYPE_CHECKING:
    from .attention import AttentionBlockSE3
    from .convolution import ConvSE3
    from .fiber import Fiber
    from .geometry import Geometry

EDGE_MULTIPLE = 16  # of the columns that the kernels see
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def segment_sum_plain(values: Tensor, graph: Graph) -> Tensor:
    """(E, ...) -> (N, ...): the sum over the edges into each node."""
    return values.new_zeros(graph.num_nodes, *values.shape[1:]).index_add(0, graph.dst, values)


def segment_softmax_plain(scores: Tensor, graph: Graph) -> Tensor:
    """(E, H) -> (E, H): for each head, softmax over the edges into each node."""
    index = graph.dst[:, None].expand_as(scores)
    largest = scores.new_zeros(graph.num_nodes, scores.shape[1]).scatter_reduce(
        0, index, scores.detach(), "amax", include_self=False
    )
    weights = (scores - largest[graph.dst]).exp()
    return weights / segment_sum_plain(weights, graph)[graph.dst]


@functools.cache
def _has_kernels(device_type: str) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device_type == "cuda" or interpreted) and importlib.util.find_spec("triton") is not None


def kernels_apply(values: Tensor) -> bool:
    """Whether the kernels take tensors of this device and type."""
    return values.dtype in DTYPES and _has_kernels(values.device.type)


def backend(values: Tensor, fused: bool | None) -> ModuleType | None:
    """The operations to use: ``fast_ops``, ``frame_math``, or None for the basis of paths."""
    if fused is False:
        return None
    if kernels_apply(values):
        from . import fast_ops  # imports Triton

        return fast_ops
    return frame_math if fused else None


def compute_dtype(values: Tensor) -> torch.dtype:
    """The type that a product of these values has, under autocast or not."""
    if torch.is_autocast_enabled(values.device.type) and values.dtype != torch.float64:
        return torch.get_autocast_dtype(values.device.type)
    return values.dtype


def supports(hidden: int) -> bool:
    """Whether the kernels take radial profiles of this width."""
    return hidden >= 16 and hidden & (hidden - 1) == 0


def segment_sum(values: Tensor, start: Tensor, index: Tensor, fused: bool | None) -> Tensor:
    """(rows, ...) -> (segments, ...): sums over rows start[s] ... start[s + 1] - 1; ``index`` names each row's segment.

    By a kernel without atomics where it applies.
    """
    if fused is False or not kernels_apply(values):
        return values.new_zeros(len(start) - 1, *values.shape[1:]).index_add(0, index, values)
    from . import fast_ops

    return fast_ops.segment_sum(values.flatten(1), start, index).unflatten(1, values.shape[1:])


def norm(values: Tensor, weight: Tensor, bias: Tensor, eps: float, clamp: float) -> Tensor:
    """One degree of ``NormSE3`` by the kernel."""
    from . import fast_ops

    return fast_ops.norm(values, weight, bias, eps, clamp)


def packed_messages(
    conv: ConvSE3, node_feats: Mapping[str, Tensor], edge_feats: Mapping[str, Tensor], graph: Graph, geometry: Geometry,
    tables: FrameTables,
) -> Tensor:  # fmt: skip
    """All messages of a convolution by way of the edges' frames, one packed row per edge: (E, numbers of a message)."""
    radial, first = conv.conv.radial_func, next(iter(node_feats.values()))
    dtype, ops = compute_dtype(first), backend(first, conv.fused)
    padded = -(-graph.num_edges // EDGE_MULTIPLE) * EDGE_MULTIPLE
    hidden = F.pad(radial(edge_feats["0"].squeeze(-1)).to(dtype), (0, 0, 0, 0, 0, padded - graph.num_edges))
    weights = ops.mix_rows(radial.weights, *tables.weights, dtype)
    x = _into_frames(conv, node_feats, edge_feats, graph, geometry, tables, dtype, ops, padded)
    parts: dict[int, Tensor] = {}
    start = 0
    for trunk, group, count, blocks, rows in tables.trunks:
        part = ops.conv(x, hidden[:, trunk], weights[start : start + count], blocks, rows)
        parts[group] = _add_rows(parts[group], part) if group in parts else part
        start += count
    y = torch.cat([parts[group] for group in sorted(parts)]) if len(parts) > 1 else parts[0]
    out = tables.outputs
    packed = ops.from_frame(y, geometry.rotations, out.columns, out.rows, out.spec, out.width)
    if geometry.degenerate is None:
        return packed
    some = geometry.degenerate  # no direction, so no frame: the basis of paths has only J = 0 there
    features = {degree: value[some] for degree, value in conv.sources(node_feats, edge_feats, graph.src).items()}
    messages = conv.conv(features, edge_feats["0"][some].squeeze(-1), geometry.part(some))
    rows = torch.cat([messages[str(degree)].flatten(1) for degree in conv.fiber_out.degrees], 1)[:, out.order]
    return packed.index_copy(0, some, rows.to(packed.dtype))


def _add_rows(total: Tensor, part: Tensor) -> Tensor:
    """Sum of matrices whose rows begin alike: a trunk of low input degrees reaches fewer components."""
    if len(total) < len(part):
        total, part = part, total
    return torch.cat([total[: len(part)] + part, total[len(part) :]])


def _into_frames(
    conv,
    node_feats,
    edge_feats,
    graph: Graph,
    geometry: Geometry,
    tables: FrameTables,
    dtype: torch.dtype,
    ops,
    padded: int,
) -> Tensor:
    """The sources' features in the frames: (rows, padded)."""
    if any(degree and conv.fiber_edge[degree] for degree in tables.input_degrees):
        features, gather = conv.sources(node_feats, edge_feats, graph.src), (None, None, None)
    else:
        features, gather = node_feats, (graph.src, *graph.by_source)
    x = torch.cat([features[str(degree)].to(dtype).flatten(1) for degree in tables.input_degrees], 1)
    packing = tables.inputs
    arguments = (geometry.rotations, packing.columns, packing.rows, packing.spec, tables.input_rows, padded)
    return ops.to_frame(x, *gather, *arguments)


def unpack(packed: Tensor, fiber: Fiber) -> dict[str, Tensor]:
    """(rows, numbers) with degrees one after the other -> {degree: (rows, C, 2 d + 1)}."""
    sizes = [channels * (2 * degree + 1) for degree, channels in fiber]
    parts = packed.split(sizes, 1)
    return {
        str(degree): part.unflatten(1, (channels, 2 * degree + 1))
        for (degree, channels), part in zip(fiber, parts, strict=True)
    }


def attention_block(
    block: AttentionBlockSE3, node_feats: Mapping[str, Tensor], edge_feats: Mapping[str, Tensor],
    query: Mapping[str, Tensor], graph: Graph, geometry: Geometry,
) -> dict[str, Tensor]:  # fmt: skip
    """Keys, values and attention of a block without unpacking them: {degree: (N, value channels, 2 d + 1)}."""
    attention, conv = block.attention, block.to_key_value
    heads = attention.num_heads
    tables = conv.frame_tables(next(iter(node_feats.values())).device, heads)
    kv = packed_messages(conv, node_feats, edge_feats, graph, geometry, tables)
    q = block.key_fiber.to_attention_heads(query, heads).flatten(1).to(kv.dtype)
    sizes = (heads, block.value_fiber.num_features // heads, block.key_fiber.num_features // heads)
    ops = backend(kv, conv.fused)
    out = ops.attention(q, kv, graph.row_start, graph.dst, *sizes, attention.scale).unflatten(1, (heads, sizes[1]))
    widths = [channels // heads * (2 * degree + 1) for degree, channels in block.value_fiber]
    return {
        str(degree): part.unflatten(2, (channels // heads, 2 * degree + 1)).flatten(1, 2)
        for (degree, channels), part in zip(block.value_fiber, out.split(widths, 2), strict=True)
    }
