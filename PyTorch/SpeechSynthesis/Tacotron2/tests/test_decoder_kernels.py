"""The fused decoder against the plain one: each kernel, and speech as a whole.

On a GPU, or on a CPU with TRITON_INTERPRET=1 (which test_interpreted.py does where Triton is installed).
"""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from tacotron2.decoding import FastDecoder, decode, decode_plainly, dropout
from tacotron2.fused_decoding import FusedStepper
from tacotron2.masking import length_mask
from tacotron2.model import Tacotron2, Tacotron2Config, attend
from tacotron2.recurrence import lstm_cell
from tacotron2.stepper import Stepper

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = (
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter computes with bf16 as if it were integers.
TYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TINY = Tacotron2Config(
    num_symbols=20, num_mels=8, encoder=20, prenet=12, rnn=24, attention=10, location_filters=4, location_kernel=5,
    postnet=16,
)  # fmt: skip
ODD = Tacotron2Config(
    num_symbols=20, num_mels=33, encoder=136, prenet=130, rnn=136, attention=72, location_kernel=31, postnet=16
)


@pytest.fixture(scope="module")
def kernels():
    from tacotron2 import decoder_kernels

    return decoder_kernels


def drawn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1)
    assert gap < BOUND[dtype], float(gap)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batch, sizes, outputs", [(1, (80,), 256), (3, (300, 20), 81), (17, (130,), 10)])
def test_linear(kernels, dtype, batch, sizes, outputs):
    torch.manual_seed(0)
    inputs = tuple(drawn(batch, size + 3, dtype=dtype)[:, :size] for size in sizes)  # rows apart
    weight, bias = drawn(outputs, sum(sizes), dtype=dtype) / 10, drawn(outputs, dtype=dtype)
    keep = (torch.rand(batch, outputs, device=DEVICE) > 0.5).to(dtype) * 2
    exact = torch.cat(inputs, 1).double() @ weight.double().T
    out = torch.zeros(batch, outputs + 7, device=DEVICE, dtype=dtype)
    close(kernels.linear(out, inputs, weight, bias)[:, :outputs], exact + bias.double(), dtype)
    assert not out[:, outputs:].any()  # nothing is written beyond its place
    close(kernels.linear(out, inputs, weight, keep=keep)[:, :outputs], exact.relu() * keep.double(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batch, width, sizes", [(1, 1024, (16, 32)), (2, 24, (12, 20)), (19, 136, (130, 33))])
def test_lstm(kernels, dtype, batch, width, sizes):
    torch.manual_seed(0)
    inputs = tuple(drawn(batch, size, dtype=dtype) for size in (*sizes, width))
    weight = (drawn(4 * width, sum(sizes) + width) / 8).to(dtype)
    bias, old = drawn(4 * width), drawn(batch, width)
    hidden, cell = torch.empty_like(inputs[2]), torch.empty_like(old)
    kernels.lstm(hidden, cell, inputs, kernels.interleaved(weight), kernels.interleaved(bias), old)
    product = torch.cat(inputs, 1).double() @ weight.double().T
    expected = lstm_cell(bias.double().expand(batch, -1).cpu(), product.cpu(), old.double().cpu())
    close(hidden.cpu(), expected[0], dtype)
    close(cell.cpu(), expected[1], dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("symbols, width, attention, taps", [(7, 20, 10, 5), (70, 136, 72, 31), (600, 64, 16, 31)])
def test_attention(kernels, dtype, symbols, width, attention, taps):
    """Against the plain step in float64: context, weights and their total, with padding."""
    torch.manual_seed(0)
    batch = 2
    lengths = torch.tensor([symbols, symbols // 2 + 1], device=DEVICE)
    outside = ~length_mask(lengths, symbols)
    memory, projected = drawn(batch, symbols, width, dtype=dtype), drawn(batch, symbols, attention, dtype=dtype)
    query, score = drawn(batch, attention, dtype=dtype), drawn(attention, dtype=dtype)
    kernel = (drawn(attention, 2, taps) / 4).to(dtype)
    history = torch.rand(batch, 2, symbols, device=DEVICE).to(dtype).float()
    context, weights = memory.new_empty(batch, width), history.new_empty(batch, symbols)
    total = torch.empty_like(weights)
    given = (memory, projected, outside)
    last, before = history.unbind(1)
    kernels.attend((context, weights, total), query, last, before, given, kernel.flatten(1).T.contiguous(), score)
    exact = [value.double() for value in (query, history, projected.transpose(1, 2), memory)]
    expected, shares = attend(*exact, outside, kernel.double(), score.double()[None])
    close(context, expected, dtype)
    close(weights, shares, dtype)
    close(total, history[:, 1].double() + shares, dtype)
    assert not weights[outside].any()


def model_of(config: Tacotron2Config, dtype: torch.dtype, gate: float = -20.0, gain: float = 2) -> Tacotron2:
    torch.manual_seed(0)
    model = Tacotron2(config).eval()
    for name, parameter in model.decoder.named_parameters():
        if "weight" in name:
            parameter.data.mul_(gain)  # frames that differ
    model.decoder.gate.bias.data.fill_(gate)
    return model.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("config, batch", [(TINY, 1), (TINY, 3), (ODD, 2)])
@torch.no_grad()
def test_a_block_is_the_plain_block(dtype, config, batch):
    """Two blocks one after the other, so that the state goes over, too; float64 says who is right."""
    model, symbols, steps = model_of(config, dtype), 13, 3
    exact, plain, fused = Stepper(copy.deepcopy(model).double()), Stepper(model), FusedStepper(model)
    lengths = torch.tensor([symbols, 5, 9][:batch], device=DEVICE)
    memory = drawn(batch, symbols, config.encoder, dtype=dtype) * length_mask(lengths, symbols)[:, :, None]
    keep = dropout(model, 2 * steps, batch, torch.Generator().manual_seed(1))
    found = []
    for stepper, given in ((exact, memory.double()), (plain, memory), (fused, memory)):
        source, state = stepper.source(given, lengths), stepper.start(given)
        blocks = []
        for part in keep.split(steps):
            state, block = stepper.block(state, source, part)
            blocks.append([value.clone() for value in block])
        found.append([*state, *(torch.cat(parts) for parts in zip(*blocks, strict=True))])
    for expected, simple, value in zip(*found, strict=True):
        assert value.dtype == simple.dtype and value.shape == expected.shape
        error, allowed = ((given.double() - expected).abs().max() for given in (value, simple))
        assert error <= 2 * allowed + BOUND[dtype] * expected.abs().max().clamp(min=1), (float(error), float(allowed))


@pytest.mark.filterwarnings("ignore:items")
@torch.no_grad()
def test_speech_is_the_plain_speech():
    """Gates that fire at their own steps, in float32; block by block against layer by layer."""
    model = model_of(TINY, torch.float32, gate=-1.0, gain=3)
    text, lengths = torch.randint(1, 20, (3, 9), device=DEVICE), torch.tensor([9, 5, 7], device=DEVICE)

    def said(decoder, speak=decode):
        return speak(decoder, text, lengths, generator=torch.Generator().manual_seed(3), limit=40)

    expected = said(model, decode_plainly)
    found = said(FastDecoder(model, engine="fused", block=8))
    assert torch.equal(found.lengths, expected.lengths) and found.reached_limit == expected.reached_limit
    assert len(set(found.lengths.tolist())) > 1
    mask = length_mask(found.lengths, expected.mel.shape[2])[:, None]
    assert F.l1_loss(found.refined * mask, expected.refined * mask) < 1e-4
    assert F.l1_loss(found.alignments, expected.alignments) < 1e-5
