"""Operations of the layers: plain PyTorch, and the GPU kernels with the rules for when they are used.

The kernels need Triton and a GPU, and take fp32, bf16 and fp16 (``TRITON_INTERPRET=1`` runs them on a CPU, for tests).
"""

from __future__ import annotations

from torch import Tensor

from .graph import Graph


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
    total = segment_sum_plain(weights, graph)
    return weights / total[graph.dst]


def use_kernels(values: Tensor) -> bool:
    return False
