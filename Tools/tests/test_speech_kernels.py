"""The convolution kernel and HiFi-GAN on it, against PyTorch in float64.

They run on a GPU, or without one through Triton's interpreter:
``TRITON_INTERPRET=1 pytest tests/test_speech_kernels.py``.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from dlx.speech import fast_vocoder  # noqa: E402
from dlx.speech.mel import MelConfig  # noqa: E402
from dlx.speech.vocoder import GriffinLim, HifiGan, HifiGanConfig  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = (
    []
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
# The interpreter computes with bf16 as if it were integers.
TYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CONFIG = HifiGanConfig(64, (4, 2), (8, 4), (3, 5), (1, 3), num_mels=10)
MEL = MelConfig(8000, 32, 8, 32, 10, 0, 4000, padding="same")


def close(found, expected, dtype):
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1)
    assert gap < BOUND[dtype], float(gap)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs, outputs, taps, dilation", [(16, 16, 3, 1), (20, 33, 5, 3), (64, 1, 7, 2)])
def test_convolution(dtype, inputs, outputs, taps, dilation):
    """With a mask, two summands, a scale and a leaky ReLU; float64 on the same values is the truth."""
    from dlx.speech.conv_kernels import Packed, convolve

    torch.manual_seed(0)
    conv = torch.nn.Conv1d(inputs, outputs, taps, dilation=dilation, padding=dilation * (taps // 2)).to(DEVICE, dtype)
    x = torch.randn(2, 150, inputs, device=DEVICE).to(dtype)
    first, second = (torch.randn(2, 150, outputs, device=DEVICE).to(dtype) for _ in range(2))
    limits = torch.tensor([75, 31], device=DEVICE, dtype=torch.int32)
    mask = torch.arange(150, device=DEVICE) < 2 * limits[:, None]
    exact = conv.double()((x.double() * mask[:, :, None]).transpose(1, 2)).transpose(1, 2)
    rows = F.pad(x, (0, -inputs % 16))
    packed = Packed.of(conv, dtype)
    value, active = convolve(rows, packed, limits, 2, add=(first, second), scale=0.5, slope=0.1)
    expected = (exact + first.double() + second.double()) / 2
    close(value, expected, dtype)
    close(active, F.leaky_relu(expected, 0.1), dtype)
    expected = exact + first.double()
    value, active = convolve(rows, packed, limits, 2, add=(first,), raw=first)  # in place
    assert value is first and active is None
    close(first, expected, dtype)


@pytest.mark.parametrize("rate, padding", [(8, 4), (2, 1), (5, 2)])
def test_transposed_convolution(rate, padding):
    from dlx.speech.conv_kernels import Packed, convolve

    torch.manual_seed(0)
    up = torch.nn.ConvTranspose1d(16, 6, 2 * rate, rate, padding).to(DEVICE)
    x = torch.randn(2, 19, 16, device=DEVICE)
    limits = torch.full((2,), 19, device=DEVICE, dtype=torch.int32)
    found, _ = convolve(x, Packed.transposed(up), limits)
    expected = up.double()(x.double().transpose(1, 2))[:, :, : 19 * rate]
    found = found.view(2, 19 * rate, 6).transpose(1, 2)[:, :, : expected.shape[2]]
    close(found, expected, torch.float32)


def small(dtype=torch.float32):
    torch.manual_seed(0)
    model = HifiGan(CONFIG, MEL).eval()
    for parameter in model.parameters():  # as they come, the output would be next to nothing
        parameter.data *= 2
    return model.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@torch.no_grad()
def test_hifigan(dtype):
    """Whole and in a batch of unequal lengths; a third call of a shape is a replay on a GPU."""
    fast, exact = fast_vocoder.FastHifiGan(small(dtype)), small(dtype).double()
    mel, lengths = torch.randn(2, 10, 37, device=DEVICE), torch.tensor([37, 20], device=DEVICE)
    expected = exact(mel.to(dtype).double(), lengths)
    assert expected.abs().mean() > 0.01
    for _ in range(1 if INTERPRETED else 3):
        found = fast(mel, lengths)
        assert found.dtype == torch.float32 and not found[1, 160:].any()
        close(found, expected, dtype)
    close(fast(mel[:, :, :21]), exact(mel[:, :, :21].to(dtype).double()), dtype)


def test_what_the_kernels_do_not_take_stays():
    from dlx.speech.conv_kernels import Packed

    with pytest.raises(ValueError, match="the kernel does not take"):
        Packed.of(torch.nn.Conv1d(4, 4, 4, padding=2))
    with pytest.raises(ValueError, match="the kernel does not take"):
        Packed.transposed(torch.nn.ConvTranspose1d(4, 4, 4, 4))
    double = small(torch.float64)
    assert fast_vocoder.optimize(double, torch.float64) is double
    assert isinstance(fast_vocoder.optimize(small()), fast_vocoder.FastHifiGan)
    narrow = HifiGan(HifiGanConfig(32, (4, 2), (8, 4), (3,), (1,), num_mels=10), MEL).to(DEVICE)
    assert fast_vocoder.optimize(narrow) is narrow
    other = GriffinLim(MEL)
    assert fast_vocoder.optimize(other) is other
