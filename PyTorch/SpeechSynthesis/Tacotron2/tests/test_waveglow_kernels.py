"""WaveGlow on kernels against the plain one in float64.

On a GPU, or on a CPU with TRITON_INTERPRET=1 (which test_interpreted.py does where Triton is installed).
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from dlx.precision import autocast
from dlx.speech.mel import MelConfig
from tacotron2.fast_waveglow import FastWaveGlow, spreading
from tacotron2.vocoding import WaveGlowVocoder
from tacotron2.waveglow import NormedConv, WaveGlow, WaveGlowConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = (
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter computes with bf16 as if it were integers.
TYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
TINY = WaveGlowConfig(num_mels=8, flows=5, early_every=2, layers=3, channels=32, hop_length=32, window=120)
SHARED = WaveGlowConfig(
    num_mels=8, flows=3, layers=2, channels=16, hop_length=32, window=128, upsample_groups=8, condition=16
)
MEL = MelConfig(8000, 128, 32, 128, 8, 0, 4000)


@pytest.fixture(autouse=True)
def exact_products():
    autocast("fp32", DEVICE)  # cuDNN's default is tf32


def model_of(config: WaveGlowConfig) -> WaveGlow:
    torch.manual_seed(0)
    model = WaveGlow(config)
    for module in model.modules():
        if isinstance(module, NormedConv):
            module.weight_g.data.mul_(torch.rand_like(module.weight_g) + 0.5)
    for flow in model.flows:
        torch.nn.init.normal_(flow.wn.end.weight, std=0.1)
    return model.to(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    gap = (found.double() - expected).abs().max() / expected.abs().max()
    assert gap < BOUND[dtype], float(gap)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("config", [TINY, SHARED])
@torch.no_grad()
def test_sound_is_the_plain_sound(dtype, config):
    """Whole and in a batch of unequal lengths; a second and third call of a shape are replays on a GPU."""
    fast, exact = FastWaveGlow(model_of(config).prepare(dtype)), model_of(config).prepare().double()
    frames = 37
    mel = torch.randn(2, 8, frames, device=DEVICE)
    noise = torch.randn(1, 8, frames * 4, device=DEVICE)
    lengths = torch.tensor([frames, 21], device=DEVICE)
    expected = exact.infer(mel.double(), 0.7, lengths=lengths, noise=noise.double())
    for _ in range(1 if INTERPRETED else 3):
        close(fast.infer(mel, 0.7, noise, lengths), expected, dtype)
    close(fast.infer(mel, 0.7, noise), exact.infer(mel.double(), 0.7, noise=noise.double()), dtype)
    other = exact.infer(2 * mel[:1].double(), 0.7, noise=noise.double())
    close(fast.infer(2 * mel[:1], 0.7, noise), other, dtype)


@pytest.mark.parametrize("config", [TINY, SHARED])
@torch.no_grad()
def test_the_spectrogram_is_spread_by_one_product(config):
    model = model_of(config).prepare().double()
    mel = torch.randn(2, 8, 9, device=DEVICE).double()
    matrix, bias = spreading(model.upsample, config)
    spread = -(-config.window // config.hop_length)
    assert matrix.shape == (8 * spread, 4 * 64) and bias.shape == (4 * 64,)
    seen = F.pad(mel, (spread - 1, 0)).unfold(2, spread, 1).permute(0, 2, 1, 3).flatten(2)
    rows = (seen @ matrix + bias).view(2, 36, 64).transpose(1, 2)
    assert torch.allclose(model.narrow(rows), model.condition(mel), atol=1e-12)


@torch.no_grad()
def test_the_vocoder_takes_it_where_it_can():
    mel = torch.randn(1, 8, 40, device=DEVICE)
    fast = WaveGlowVocoder(model_of(TINY), MEL, sigma=0.7, seed=3)
    plain = WaveGlowVocoder(model_of(TINY), MEL, sigma=0.7, seed=3, engine="plain")
    assert fast.fast is not None and plain.fast is None
    assert torch.allclose(fast(mel), plain(mel), atol=1e-4)
    assert torch.allclose(fast.window(mel[:, :, 8:], 8), plain.window(mel[:, :, 8:], 8), atol=1e-4)
    assert WaveGlowVocoder(model_of(TINY).double(), MEL).fast is None
    with pytest.raises(ValueError, match="unknown engine 'quick'; known: auto, plain, fused"):
        WaveGlowVocoder(model_of(TINY), MEL, engine="quick")
    with pytest.raises(ValueError, match="a prepared WaveGlow"):
        FastWaveGlow(model_of(TINY))


@pytest.mark.parametrize("dtype", TYPES)
def test_gates_and_their_gradient(dtype):
    """Against float64; the condition is a part of a wider tensor, as a coupling's layers have it."""
    from tacotron2.gating import gate

    torch.manual_seed(0)
    summed = torch.randn(2, 12, 301, device=DEVICE).to(dtype).requires_grad_()
    wide = torch.randn(2, 36, 301, device=DEVICE).to(dtype).requires_grad_()
    outer = torch.randn(2, 6, 301, device=DEVICE).to(dtype)
    found = gate(summed, wide.chunk(3, 1)[1])
    assert type(found.grad_fn).__name__ == "_GateBackward"
    expected = gate(*(x.detach().double().requires_grad_() for x in (summed, wide.chunk(3, 1)[1])))
    close(found.float(), expected.detach(), dtype)
    found.backward(outer)
    exact = [x.detach().double().requires_grad_() for x in (summed, wide)]
    gate(exact[0], exact[1].chunk(3, 1)[1]).backward(outer.double())
    close(summed.grad.float(), exact[0].grad, dtype)
    close(wide.grad.float(), exact[1].grad, dtype)
