"""Training steps on one made-up batch, for `benchmark`: ours, and the same model trained plainly or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dlx import optim
from dlx.precision import LossScaler, autocast

from . import registry
from .data import Batch
from .loss import FastSpeechLoss
from .step import TrainState, capture, fuse, train_step

if TYPE_CHECKING:
    from .benchmark import BenchmarkConfig


def made_batch(config: BenchmarkConfig, batch: int, mels: int, device: torch.device) -> Batch:
    """Texts and spectrograms of full length; symbols share the frames as evenly as they can."""
    generator = torch.Generator().manual_seed(config.seed)
    text = torch.randint(1, registry.SYMBOLS, (batch, config.text_length), generator=generator)
    durations = torch.full_like(text, config.frames // config.text_length)
    durations[:, : config.frames % config.text_length] += 1
    mel = torch.randn(batch, mels, config.frames, generator=generator)
    lengths = (torch.full((batch,), config.text_length), torch.full((batch,), config.frames))
    return Batch(*(tensor.to(device) for tensor in (text, lengths[0], durations, mel, lengths[1])))


def training_step(config: BenchmarkConfig, name: str, batch: int, device: torch.device) -> Callable[[], Any]:
    """A call that makes one optimiser step: "ours" (captured on a GPU), "graph_compiled" (compiled, then captured),
    "graph_fused" (its blocks compiled, then captured), "compiled" or "plain"."""
    torch.manual_seed(config.seed)
    model = registry.build(config.arch).to(device).train()
    inputs = made_batch(config, batch, model.config.num_mels, device)
    if name == "plain":
        return _plain_step(config, model, inputs)
    optimizer = optim.build_optimizer(model, "adam", lr=1e-4, momentum=0.9, weight_decay=0.0)
    scaler = LossScaler(model.named_parameters(), enabled=config.precision == "fp16")
    options: dict[str, Any] = {"precision": config.precision, "scaler": scaler, "max_norm": 1.0}
    if name in ("compiled", "graph_compiled"):
        options["forward"] = torch.compile(model)
    if name == "graph_fused":
        fuse(model)
    state = TrainState(model, optimizer, **options)
    if name in ("ours", "graph_compiled", "graph_fused") and device.type == "cuda":
        graphed = capture(state, [inputs])
        return lambda: graphed([inputs])
    return lambda: train_step(state, [inputs])


def _plain_step(config: BenchmarkConfig, model: torch.nn.Module, inputs: Batch) -> Callable[[], Any]:
    """As a reader of the paper would write it: autocast, Adam, clipped gradients."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, (0.9, 0.98), 1e-9)
    scaler = torch.amp.GradScaler(inputs.mel.device.type, enabled=config.precision == "fp16")
    loss = FastSpeechLoss()

    def step() -> None:
        optimizer.zero_grad()
        with autocast(config.precision, inputs.mel.device):
            found = model(inputs.text, inputs.text_lengths, inputs.durations, inputs.mel.shape[2])
        total = loss(found, inputs.mel, inputs.mel_lengths, inputs.durations, inputs.text_lengths).total
        scaler.scale(total).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step
