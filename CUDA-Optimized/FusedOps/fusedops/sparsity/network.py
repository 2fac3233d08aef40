"""Permute the channels of a network so that 2:4 masks keep more of its weights, without changing what it computes.

The channels of each tensor in the graph (by torch.fx) belong to a class. Layers that mix channels (Linear, Conv)
begin a new one; what works on each channel alone keeps it, batch norms with their parameters; sums join the classes
of their terms. A class that meets the network's input or output, or an operation that is not known here, keeps its
order. For all others one order is sought that suits the layers which read it, and it is applied to them and to
whatever makes the channels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fusedops.sparsity.permutation import kept_magnitude, search_for_good_permutation

__all__ = ["permute_model"]

PER_CHANNEL_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Mish,
    nn.Identity, nn.Dropout, nn.Dropout2d,
)  # fmt: skip
POOLING_MODULES = (
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)  # fmt: skip
PER_CHANNEL_FUNCTIONS = (
    F.relu, F.gelu, F.silu, F.leaky_relu, F.dropout, torch.relu, torch.sigmoid, torch.tanh,
)  # fmt: skip
POOLING_FUNCTIONS = (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d)
PER_CHANNEL_METHODS = ("relu", "relu_", "sigmoid", "tanh", "contiguous", "clone")
JOINING = (operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Channels:
    """A class of channels: layers that read it, make it, or have parameters by channel; joined classes know their
    root.
    """

    size: int = 0
    fixed: bool = False
    pooled: bool = False
    readers: list[nn.Module] = field(default_factory=list)
    makers: list[nn.Module] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)
    joined_to: Channels | None = None

    def in_one_place(self) -> bool:
        """Whether all agree on which dimension it is: the last for Linear, the second for convolutions and pooling."""
        layers = self.readers + self.makers
        if not any(isinstance(layer, nn.Linear) for layer in layers):
            return True
        return not self.pooled and not any(isinstance(layer, CONVOLUTIONS) for layer in layers)

    def root(self) -> Channels:
        return self if self.joined_to is None else self.joined_to.root()


def permute_model(
    model: nn.Module,
    is_sparse: Callable[[nn.Module], bool] = lambda layer: True,
    optimizer: torch.optim.Optimizer | None = None,
    verbose: Callable[[str], None] = lambda line: None,
    **search: Any,
) -> float:
    """Permute in place; -> by how much the kept magnitude of the layers grew, as a share (0 where nothing could be
    done).

    ``is_sparse``: which layers will be masked, and so are looked at. ``optimizer``: its state by element is permuted
    likewise. ``search``: arguments of `search_for_good_permutation`. A model that torch.fx cannot trace is left as it
    is.
    """
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:  # noqa: BLE001 - fx raises whatever the model's own code raises on its proxies
        verbose(f"no permutation: torch.fx cannot trace the model ({type(error).__name__}: {error})")
        return 0.0
    before = after = 0.0
    for channels in _classes(model, graph):
        readers = [layer for layer in channels.readers if is_sparse(layer)]
        if channels.fixed or not readers or not channels.makers or channels.size % 4 or not channels.in_one_place():
            continue
        matrix = torch.cat(
            [layer.weight.detach().movedim(1, -1).reshape(-1, channels.size).float() for layer in readers]
        )
        order = search_for_good_permutation(matrix, **search)
        before += kept_magnitude(matrix)
        after += kept_magnitude(matrix, order)
        _apply(channels, order, optimizer)
    verbose(f"permutation: kept magnitude of the layers that allow it {before:.6g} -> {after:.6g}")
    return after / before - 1 if before else 0.0


def _classes(model: nn.Module, graph: fx.Graph) -> list[Channels]:
    modules = dict(model.named_modules())
    calls: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[id(modules[node.target])] = calls.get(id(modules[node.target]), 0) + 1
    of_node: dict[fx.Node, Channels] = {}
    every: list[Channels] = []
    owners: dict[int, int] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for node in graph.nodes:
        inputs = [of_node[argument].root() for argument in node.all_input_nodes]
        module = modules.get(node.target) if node.op == "call_module" else None
        once = module is not None and calls[id(module)] == 1
        once = once and all(owners[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
        result = _follow(node, module if once else None, inputs)
        of_node[node] = result
        every.append(result)
    return [channels for channels in every if channels.joined_to is None and channels.size]


def _follow(node: fx.Node, module: nn.Module | None, inputs: list[Channels]) -> Channels:
    """The class of a node's channels, given those of its inputs; takes note of what reads and makes them."""
    if module is not None and (
        isinstance(module, nn.Linear) or (isinstance(module, CONVOLUTIONS) and module.groups == 1)
    ):
        inputs[0].readers.append(module)
        inputs[0].size = inputs[0].size or module.weight.shape[1]
        inputs[0].fixed |= inputs[0].size != module.weight.shape[1]
        return Channels(module.weight.shape[0], makers=[module])
    if module is not None and isinstance(module, NORMS):
        inputs[0].norms.append(module)
        inputs[0].fixed |= inputs[0].size != module.num_features
        return inputs[0]
    if module is not None and isinstance(module, PER_CHANNEL_MODULES):
        return inputs[0]
    function = node.target if node.op == "call_function" else None
    if (module is not None and isinstance(module, POOLING_MODULES)) or function in POOLING_FUNCTIONS:
        inputs[0].pooled = True
        return inputs[0]
    if function in PER_CHANNEL_FUNCTIONS or (node.op == "call_method" and node.target in PER_CHANNEL_METHODS):
        return inputs[0]
    if function in JOINING and inputs:
        return _joined(inputs)
    for channels in inputs:
        channels.fixed = True
    return Channels(0, fixed=True)


def _joined(inputs: list[Channels]) -> Channels:
    first = inputs[0]
    for other in inputs[1:]:
        if other is first:
            continue
        first.fixed |= other.fixed or first.size != other.size
        first.pooled |= other.pooled
        for name in ("readers", "makers", "norms"):
            getattr(first, name).extend(getattr(other, name))
        other.joined_to = first
    return first


@torch.no_grad()
def _apply(channels: Channels, order: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    work = [(layer.weight, 1) for layer in channels.readers]
    for layer in channels.makers:
        work += [(tensor, 0) for tensor in (layer.weight, layer.bias) if tensor is not None]
    for norm in channels.norms:
        tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        work += [(tensor, 0) for tensor in tensors if tensor is not None]
    for tensor, dimension in work:
        indexes = order.to(tensor.device)
        tensor.copy_(tensor.index_select(dimension, indexes))
        state = optimizer.state.get(tensor, {}) if optimizer is not None else {}
        for value in state.values():
            if isinstance(value, Tensor) and value.shape == tensor.shape and value.dim():
                value.copy_(value.index_select(dimension, indexes))
