"""One optimiser step, eager or as a CUDA graph: no flags, no printing, no host synchronisation.

A step sees one or more micro-batches. The gradient is that of the mean over all their samples, however many each
holds (user case O28: micro-batches with losses (1, 2, 3, 4) and (9, 11) average to 5.0, not 6.25).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .dist import World
from .optim import ModelEma
from .precision import LossScaler

Micro = TypeVar("Micro")


@dataclass
class TrainState:
    """All that a step changes. ``forward`` is what is called: the model, its DDP wrapper or compilation.

    ``max_norm`` limits the norm of all gradients together (Pascanu et al. 2013); None does not. ``pool`` is the memory
    that all graphs of this state share: they replay one after the other.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[..., Any] | None = None
    precision: str = "fp32"
    scaler: LossScaler | None = None
    ema: ModelEma | None = None
    max_norm: float | None = None
    step: int = 0
    pool: Any = None

    def __call__(self, *inputs: Any) -> Any:
        return (self.forward or self.model)(*inputs)


def wrap(model: nn.Module, world: World, compiled: bool = False) -> Callable[..., Any]:
    """What a step calls: the model, compiled if asked, within DDP where there are several processes."""
    forward: Any = torch.compile(model) if compiled else model
    if world.size == 1:
        return forward
    if world.device.type != "cuda":
        return nn.parallel.DistributedDataParallel(forward, gradient_as_bucket_view=True)
    # Gradients are added on the stream that was current when DDP was made. The default stream could not be captured,
    # and a capture on another stream than this one would wait for it at every parameter.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward = nn.parallel.DistributedDataParallel(
            forward, device_ids=[world.device.index], gradient_as_bucket_view=True
        )
    torch.cuda.current_stream().wait_stream(side)
    forward.capture_stream = side
    return forward


def update(
    state: TrainState, batch: Sequence[Micro], counts: Sequence[int | Tensor], loss_of: Callable[[Micro], Tensor]
) -> Tensor:
    """One optimiser update. ``loss_of`` gives a micro-batch's mean loss, ``counts`` how many samples it is the mean of.

    Returns the mean loss as a tensor on the device, not waited for.
    """
    state.optimizer.zero_grad(set_to_none=True)
    total = sum(counts)
    mean_loss: Tensor | None = None
    for index, (micro, count) in enumerate(zip(batch, counts, strict=True)):
        # Only the last backward of a step exchanges gradients between processes.
        quiet = index < len(batch) - 1 and hasattr(state.forward, "no_sync")
        with state.forward.no_sync() if quiet else contextlib.nullcontext():
            loss = loss_of(micro) * (count / total)
            (state.scaler.scale(loss) if state.scaler else loss).backward()
        mean_loss = loss.detach() if mean_loss is None else mean_loss + loss.detach()
    if state.max_norm is not None:
        if state.scaler:
            state.scaler.unscale()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), state.max_norm, foreach=True)
    if state.scaler:
        state.scaler.step(state.optimizer)
    else:
        state.optimizer.step()
    if state.ema:
        state.ema.update()
    state.step += 1
    return mean_loss


class GraphedStep:
    """A training step captured once as a CUDA graph and replayed: its launch cost falls to almost nothing.

    ``step(inputs)`` is captured; ``inputs`` is any nesting of tuples, lists and dicts of tensors. All later inputs must
    have the shapes of the first; a number may stand for a scalar. Model, optimiser and EMA state are those of
    ``state``, changed in place, so checkpoints work as before; what the warm-up steps change is put back.
    """

    WARMUP = 3
    WARMUP_DDP = 11  # DDP lays out its buckets anew and times itself in the first steps

    def __init__(self, state: TrainState, step: Callable[[Any], Tensor], inputs: Any):
        self.state = state
        self.inputs = pytree.tree_map(lambda leaf: leaf.clone(memory_format=torch.preserve_format), inputs)
        self.leaves, self.structure = pytree.tree_flatten(self.inputs)
        snapshot = self._snapshot()
        stream = getattr(state.forward, "capture_stream", None) or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.WARMUP_DDP if hasattr(state.forward, "no_sync") else self.WARMUP):
                step(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        state.optimizer.zero_grad(set_to_none=True)
        state.pool = state.pool or torch.cuda.graph_pool_handle()
        # NCCL's watchdog thread asks after its events meanwhile, which is no part of the capture.
        with torch.cuda.graph(self.graph, pool=state.pool, stream=stream, capture_error_mode="thread_local"):
            self.loss = step(self.inputs)
        self._restore(snapshot)

    def _tensors(self) -> list[Tensor]:
        tensors = list(self.state.model.parameters()) + list(self.state.model.buffers())
        if self.state.ema:
            tensors += list(self.state.ema.module.parameters()) + list(self.state.ema.module.buffers())
        return tensors

    def _snapshot(self) -> tuple:
        values = [tensor.detach().clone() for tensor in self._tensors()]
        optimizer = {
            parameter: {key: value.clone() for key, value in entry.items() if isinstance(value, Tensor)}
            for parameter, entry in self.state.optimizer.state.items()
        }
        scale = self.state.scaler.state_dict() if self.state.scaler else {}
        return values, optimizer, scale, self.state.step, torch.cuda.get_rng_state()

    @torch.no_grad()
    def _restore(self, snapshot: tuple) -> None:
        """Put back all values in place: the graph holds the addresses."""
        values, optimizer, scale, step, random_state = snapshot
        for tensor, value in zip(self._tensors(), values, strict=True):
            tensor.copy_(value)
        for parameter, entry in self.state.optimizer.state.items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    old = optimizer.get(parameter, {}).get(key)
                    value.zero_() if old is None else value.copy_(old)
        if self.state.scaler:
            self.state.scaler.load_state_dict(scale)
        self.state.step = step
        torch.cuda.set_rng_state(random_state)

    def __call__(self, inputs: Any) -> Tensor:
        """Replay on new inputs. The returned loss is overwritten by the next call."""
        leaves, structure = pytree.tree_flatten(inputs)
        if structure != self.structure:
            raise ValueError(f"captured for inputs {self.structure}, got {structure}")
        for own, given in zip(self.leaves, leaves, strict=True):
            if not isinstance(given, Tensor):
                own.fill_(given)
            elif given.shape != own.shape:
                raise ValueError(f"captured for inputs of shape {tuple(own.shape)}, got {tuple(given.shape)}")
            else:
                own.copy_(given, non_blocking=True)
        self.graph.replay()
        self.state.step += 1
        return self.loss
