"""Training at full size on a GPU: the step as a CUDA graph, half precision, a short run of a recipe."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from dlx import optim
from dlx import record as records
from dlx.precision import autocast
from fastspeech import registry, train
from fastspeech.data import Batch
from fastspeech.step import TrainState, capture, fuse, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def batch(seed: int, rows: int = 4, symbols: int = 40, frames: int = 200) -> Batch:
    """Items of different lengths in one shape."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([symbols - 5 * row for row in range(rows)])
    durations = torch.randint(1, frames // symbols + 1, (rows, symbols), generator=generator)
    durations *= torch.arange(symbols) < lengths[:, None]
    text = torch.randint(1, 148, (rows, symbols), generator=generator) * (durations > 0)
    mel_lengths = durations.sum(1)
    mel = torch.randn(rows, 80, frames, generator=generator) - 5
    mel *= (torch.arange(frames) < mel_lengths[:, None])[:, None]
    return Batch(*(tensor.cuda() for tensor in (text, lengths, durations, mel, mel_lengths)))


def state(precision: str, dropout: bool = False) -> TrainState:
    torch.manual_seed(0)
    model = registry.build("fastspeech").cuda().train()
    for module in model.modules():
        if hasattr(module, "dropout") and not dropout:
            module.dropout = 0.0
    optimizer = optim.build_optimizer(model, "adam", lr=1e-4, momentum=0.9, beta2=0.98, weight_decay=0.0)
    return TrainState(model, optimizer, precision=precision, max_norm=1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_captured_step_is_the_step(precision):
    eager, graphed = state(precision), state(precision)
    step = capture(graphed, [batch(0)])
    for index in range(4):
        expected, found = train_step(eager, [batch(index)]), step([batch(index)])
        assert found.item() == pytest.approx(expected.item(), rel=1e-3 if precision == "fp32" else 2e-2)
    assert graphed.step == eager.step == 4
    for one, two in zip(eager.model.parameters(), graphed.model.parameters(), strict=True):
        assert (one - two).abs().max() < 5e-4  # four steps of 1e-4, whose signs rounding may turn


def test_compiled_blocks_in_a_captured_step():
    """What `--fuse true` does: the losses of the plain step, within what bf16 rounds."""
    eager, graphed = state("bf16"), state("bf16")
    fuse(graphed.model)
    step = capture(graphed, [batch(0)])
    for index in range(4):
        expected, found = train_step(eager, [batch(index)]), step([batch(index)])
        assert found.item() == pytest.approx(expected.item(), rel=2e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_is_drawn_anew_in_each_replay(fused):
    graphed = state("bf16", dropout=True)
    if fused:
        fuse(graphed.model)
    optim.set_learning_rate(graphed.optimizer, 0.0)
    step = capture(graphed, [batch(0)])
    assert len({step([batch(0)]).item() for _ in range(4)}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_near_to_single(dtype):
    """The error is at most twice that of autocast, which keeps sums and norms in float32."""
    model = state("fp32").model.eval().requires_grad_(False)
    given = batch(1)
    inputs = (given.text, given.text_lengths, given.durations, given.mel.shape[2])
    exact = copy.deepcopy(model).double()(*inputs).mel
    half = copy.deepcopy(model).to(dtype)(*inputs).mel
    with autocast("bf16" if dtype == torch.bfloat16 else "fp16", "cuda"):
        mixed = model(*inputs).mel
    error, allowed = ((found.double() - exact).square().mean().sqrt() for found in (half, mixed))
    assert error <= 2 * allowed and torch.equal(half == 0, exact == 0)
    with autocast("fp32", "cuda"):
        single = model(*inputs).mel
    assert (single.double() - exact).abs().max() < 2e-3


def test_a_recipe_runs_with_graphs(tmp_path):
    options = "--data synthetic --batch_size 32 --max_steps 60 --warmup_steps 10 --device cuda --log_every 20"
    train.main(["--config", "compact", *options.split(), "--output_dir", str(tmp_path)])
    fields = records.load(tmp_path).fields
    losses = [loss for _, loss in fields["curve"]["train.loss"]]
    assert fields["status"] == "finished" and np.isfinite(losses).all() and losses[-1] < losses[0]
