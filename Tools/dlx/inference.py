"""Models made ready for inference: batch norms folded into convolutions, low precision, CUDA graph.

Folding is exact algebra: ``norm(conv(x)) = conv'(x)`` with ``w' = w * gain / deviation``. On a GPU the sum with the
shortcut and the ReLU then happen inside cuDNN's convolution, so each activation map is written once and never re-read
for a norm.

N batch, C channels, H height, W width.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inputs import Stem
from .norm import ACTIVATIONS, BatchNormAct, Pending


class ConvAct(nn.Module):
    """``act(conv(x) + bias + residual)``: takes the place of a BatchNormAct, with its convolution inside."""

    def __init__(self, convolution: nn.Conv2d, norm: BatchNormAct):
        super().__init__()
        scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
        weight = convolution.weight.double() * scale.view(-1, 1, 1, 1)
        bias = norm.bias.double() - norm.running_mean.double() * scale
        if convolution.bias is not None:
            bias = bias + convolution.bias.double() * scale
        self.conv = copy.deepcopy(convolution)
        self.conv.weight = nn.Parameter(weight.to(convolution.weight.dtype), requires_grad=False)
        self.conv.bias = nn.Parameter(bias.to(convolution.weight.dtype), requires_grad=False)
        self.act = norm.act

    def normalize(self, x: Tensor) -> Tensor:
        """Without the activation: what a shortcut's norm gives."""
        if self.conv.kernel_size == (7, 7) and Stem.applies(x):
            return Stem.convolve(x, self.conv.weight, self.conv.bias)
        return self.conv(x)

    def forward(self, x: Tensor, residual: Tensor | Pending | None = None) -> Tensor:
        if isinstance(residual, Pending):
            residual = residual.finish()
        if self._fuses(x):
            conv = self.conv
            place = (conv.stride, conv.padding, conv.dilation, conv.groups)
            if residual is None:
                return torch.cudnn_convolution_relu(x, conv.weight, conv.bias, *place)
            return torch.cudnn_convolution_add_relu(x, conv.weight, residual, 1.0, conv.bias, *place)
        y = self.normalize(x)
        return ACTIVATIONS[self.act](y if residual is None else y + residual)

    def _fuses(self, x: Tensor) -> bool:
        return (
            x.is_cuda
            and self.act == "relu"
            and type(self.conv) is nn.Conv2d
            and self.conv.kernel_size != (7, 7)
            and not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
        )

    def fork(self, x: Tensor, residual: Tensor | Pending | None = None) -> tuple[Tensor, Tensor]:
        y = self(x, residual)
        return y, y

    def pooled(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self(x), kernel_size=3, stride=2, padding=1)


def fold(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode in which each BatchNormAct that follows a convolution has taken it in."""
    model = copy.deepcopy(model).eval()
    for parent in list(model.modules()):
        previous: tuple[str, nn.Module] | None = None
        for name, child in list(parent.named_children()):
            if isinstance(child, BatchNormAct) and previous and isinstance(previous[1], nn.Conv2d):
                setattr(parent, name, ConvAct(previous[1], child))
                setattr(parent, previous[0], nn.Identity())
            previous = (name, child)
    return model.requires_grad_(False)


@functools.cache
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """One for all: what is allocated on a stream is kept for that stream."""
    return torch.cuda.Stream(device)


class GraphedModel:
    """A model captured as a CUDA graph for inputs of one shape. The output is overwritten by the next call.

    ``pool``: memory for what lies between input and output (`torch.cuda.graph_pool_handle()`), which graphs may share
    that replay one after the other; then the next call of any of them may overwrite an output.
    """

    def __init__(self, model: Callable[..., Any], *examples: Tensor, warmup: int = 3, pool: Any = None):
        self.inputs = [example.clone(memory_format=torch.preserve_format) for example in examples]
        stream = _warm_up_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(warmup):
                model(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool), torch.inference_mode():
            self.output = model(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for own, given in zip(self.inputs, inputs, strict=True):
            if given.shape != own.shape:
                raise ValueError(f"captured for shape {tuple(own.shape)}, got {tuple(given.shape)}")
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.output


class Replayed:
    """``model`` for inputs of several shapes: called as it is where a shape is new, from its second time on a CUDA
    graph, since a graph costs more to make than a call. At most ``keep`` graphs are held, the last used, in one memory.

    On a CPU every call is the model's own. The output of a replay may be overwritten by the next one.
    """

    def __init__(self, model: Callable[..., Any], keep: int = 8):
        self.model, self.keep = model, keep
        self.graphs: dict[tuple[Any, ...], GraphedModel | None] = {}
        self.pool: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self.model(*inputs)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        known = shapes in self.graphs
        graph = self.graphs.pop(shapes, None)
        if known and graph is None:
            with torch.cuda.device(inputs[0].device):
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                graph = GraphedModel(self.model, *inputs, warmup=1, pool=self.pool)
        self.graphs[shapes] = graph  # the last used comes last
        while len(self.graphs) > self.keep:
            del self.graphs[next(iter(self.graphs))]
        return self.model(*inputs) if graph is None else graph(*inputs)


def optimize(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Folded, in ``dtype`` and channels_last. Call it under ``torch.inference_mode()``."""
    return fold(model).to(dtype=dtype, memory_format=torch.channels_last)
