"""One optimiser step, eager or as a CUDA graph: no flags, no printing, no host synchronisation.

A step sees ``accumulation`` micro-batches. The gradient is that of the mean over all their samples, however many each
holds (user case O28: micro-batches with losses (1, 2, 3, 4) and (9, 11) average to 5.0, not 6.25).

N images per micro-batch, H height, W width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dlx.precision import LossScaler, autocast

from .loss import classification_loss, mixup
from .optim import ModelEma

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """uint8 images (0-255) to float32 ``(x / 255 - mean) / std`` on whatever device they are; floats pass through."""

    def __init__(self, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD):
        super().__init__()
        scale = 1.0 / (255.0 * torch.tensor(std).view(1, -1, 1, 1))
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("offset", -torch.tensor(mean).view(1, -1, 1, 1) * 255.0 * scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images
        return torch.addcmul(self.offset, images.to(self.scale.dtype), self.scale)


@dataclass
class TrainState:
    """All that a step reads and changes. ``forward`` is what is called: the model, its DDP wrapper or compilation."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    normalize: Normalize = field(default_factory=Normalize)
    forward: Callable[[Tensor], Tensor] | None = None
    precision: str = "fp32"
    label_smoothing: float = 0.0
    scaler: LossScaler | None = None
    ema: ModelEma | None = None
    step: int = 0
    channels_last: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        return (self.forward or self.model)(images)


Batch = list[tuple[Tensor, Tensor]]  # micro-batches of (images N 3 H W, labels N)


def accumulate_gradients(state: TrainState, batch: Batch, mix: Tensor | None) -> Tensor:
    """Add the gradients of all micro-batches; returns the mean loss over their samples."""
    total = sum(len(labels) for _, labels in batch)
    mean_loss = None
    for index, (images, labels) in enumerate(batch):
        # Only the last backward of a step exchanges gradients between processes.
        quiet = index < len(batch) - 1 and hasattr(state.forward, "no_sync")
        with state.forward.no_sync() if quiet else contextlib.nullcontext():
            images = state.normalize(images)
            if state.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            if mix is not None:
                images = mixup(images, mix)
            with autocast(state.precision, images.device):
                logits = state(images)
            loss = classification_loss(logits, labels, state.label_smoothing, mix) * (len(labels) / total)
            (state.scaler.scale(loss) if state.scaler else loss).backward()
        mean_loss = loss.detach() if mean_loss is None else mean_loss + loss.detach()
    return mean_loss


def train_step(state: TrainState, batch: Batch, mix: Tensor | None = None) -> Tensor:
    """One optimiser update over the micro-batches. Returns the mean loss as a tensor on the device, not waited for."""
    state.optimizer.zero_grad(set_to_none=True)
    loss = accumulate_gradients(state, batch, mix)
    if state.scaler:
        state.scaler.step(state.optimizer)
    else:
        state.optimizer.step()
    if state.ema:
        state.ema.update()
    state.step += 1
    return loss


class GraphedStep:
    """``train_step`` captured once as a CUDA graph and replayed: the launch cost of a step falls to almost nothing.

    All batches must have the shapes of the first. Model, optimiser and EMA state are those of ``state``, changed in
    place, so checkpoints work as before; what the warm-up steps change is put back.
    """

    WARMUP = 3

    def __init__(self, state: TrainState, batch: Batch, mixes: bool = False):
        self.state = state
        self.inputs = [(images.clone(memory_format=torch.preserve_format), labels.clone()) for images, labels in batch]
        self.mix = torch.ones((), device=batch[0][0].device) if mixes else None
        snapshot = self._snapshot()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.WARMUP):
                train_step(state, self.inputs, self.mix)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        state.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.loss = train_step(state, self.inputs, self.mix)
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

    def __call__(self, batch: Batch, mix: float | None = None) -> Tensor:
        """Replay on a new batch. The returned loss is overwritten by the next call."""
        for (images, labels), (own_images, own_labels) in zip(batch, self.inputs, strict=True):
            if images.shape != own_images.shape:
                raise ValueError(f"captured for images of shape {tuple(own_images.shape)}, got {tuple(images.shape)}")
            own_images.copy_(images, non_blocking=True)
            own_labels.copy_(labels, non_blocking=True)
        if self.mix is not None:
            self.mix.fill_(1.0 if mix is None else mix)
        self.graph.replay()
        self.state.step += 1
        return self.loss
