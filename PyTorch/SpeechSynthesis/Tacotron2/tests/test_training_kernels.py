"""Training's loops on kernels against the plain ones in float64: outputs and the gradient of every parameter.

On a GPU, or on a CPU with TRITON_INTERPRET=1 (which test_interpreted.py does where Triton is installed).
"""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch

from tacotron2 import fused_recurrence
from tacotron2.masking import length_mask
from tacotron2.model import Tacotron2, Tacotron2Config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = (
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter computes with bf16 as if it were integers.
TYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
TINY = Tacotron2Config(
    num_symbols=20, num_mels=8, encoder=20, prenet=12, rnn=24, attention=10, location_filters=4, location_kernel=5,
    postnet=16,
)  # fmt: skip
ODD = Tacotron2Config(num_symbols=20, num_mels=8, encoder=72, prenet=12, rnn=68, attention=33, postnet=16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("config, symbols, frames", [(TINY, 9, 6), (ODD, 40, 4)])
def test_outputs_and_gradients(dtype, config, symbols, frames, monkeypatch):
    """Of the decoder as a whole, with the same dropout on both sides, padding, and a loss that reads everything."""
    torch.manual_seed(0)
    model = Tacotron2(config).to(DEVICE).train()
    for name, parameter in model.decoder.named_parameters():
        if "weight" in name:
            parameter.data.mul_(1.5)
    exact = copy.deepcopy(model.decoder).double()
    exact.fused = False
    batch = 3
    lengths = torch.tensor([symbols, symbols - 3, symbols // 2], device=DEVICE)
    memory = torch.randn(batch, symbols, config.encoder, device=DEVICE) * length_mask(lengths, symbols)[:, :, None]
    offsets = torch.randn(frames, batch, 4 * config.rnn, device=DEVICE)
    masks = [torch.rand(frames, batch, config.rnn, device=DEVICE) > 0.1 for _ in range(2)]
    scale, given = 1 / (1 - config.rnn_dropout), iter([*masks[0], *masks[1]])
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_: x * next(given) * scale)
    loops = iter(masks)
    monkeypatch.setattr(fused_recurrence, "kept", lambda *_: next(loops).to(torch.uint8))
    found = []
    for decoder, kind in ((exact, torch.float64), (model.decoder, dtype)):
        inputs = [
            x.to(torch.float64 if decoder is exact else torch.float32).requires_grad_() for x in (offsets, memory)
        ]
        assert fused_recurrence.applies(inputs[1], kind) == (decoder is not exact)
        hiddens, contexts, alignments = decoder._attend_all(inputs[0], inputs[1], lengths, kind)
        seconds = decoder._decode_all(inputs[0] * 2, kind)
        outputs = [hiddens, contexts, alignments, seconds]
        torch.manual_seed(1)
        loss = sum((x.double() * torch.randn_like(x, dtype=torch.float64)).sum() for x in outputs)
        loss.backward()
        names = [name for name, parameter in decoder.named_parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
        found.append((names, [*outputs, *(x.grad for x in inputs), *gradients]))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 8
    for name, expected, value in zip(
        [*"hcas", "offsets", "memory", *found[0][0]], found[0][1], found[1][1], strict=True
    ):
        assert value.shape == expected.shape
        gap = (value.double() - expected).norm() / expected.norm()
        assert gap < BOUND[dtype], (name, float(gap))
