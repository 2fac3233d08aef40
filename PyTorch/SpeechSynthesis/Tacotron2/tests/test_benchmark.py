"""The benchmark verb at small sizes on a CPU: rows, checks against the plain programs, refusals; and the peers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tacotron2 import benchmark, plain, registry
from tacotron2.decoding import dropout
from tacotron2.model import Tacotron2, Tacotron2Config
from tacotron2.registry import Architecture
from tacotron2.waveglow import WaveGlowConfig

try:
    import torchaudio  # noqa: F401

    HAS_TORCHAUDIO = True
except (ImportError, OSError):  # it is not there, or made for another PyTorch
    HAS_TORCHAUDIO = False
SMALL = "--warmup 1 --iterations 2 --pairs 1 --frames 6 --text_length 9 --precision fp32 --device cpu".split()
TINY = Tacotron2Config(encoder=16, prenet=8, rnn=16, postnet=8, attention=8)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    vocoder = WaveGlowConfig(channels=8, upsample_groups=80, condition=8, flows=4, layers=2)
    monkeypatch.setitem(registry.ARCHITECTURES, "tiny_voice", Architecture(TINY, 0))
    monkeypatch.setitem(registry.ARCHITECTURES, "tiny_vocoder", Architecture(vocoder, 0))


def rows_of(tmp_path, *words: str) -> list[dict]:
    output = tmp_path / "bench" / "record.json"
    benchmark.main([*SMALL, *words, "--output", str(output)])
    return json.loads(output.read_text())["attachments"]["rows"]


def test_decode(tmp_path):
    words = ["--mode", "decode", "--arch", "tiny_voice", "--batch_sizes", "[1, 2]", "--peers", "[plain, torchaudio]"]
    rows = rows_of(tmp_path, *words)
    assert [row["program"] for row in rows] == ["steps", "plain", "torchaudio"] * 2
    for row in rows:
        if row["program"] == "torchaudio" and not HAS_TORCHAUDIO:
            assert "Error: " in row["skipped"]
        else:
            assert row["throughput"] > 0 and row["unit"] == "mel frames/s" and row["items"] == 6 * row["batch_size"]
    assert rows[0]["largest_difference"] < 1e-4 < rows[0]["size"] and rows[0]["ours_over_this"] == 1.0


@pytest.mark.parametrize("arch, peers", [("tiny_vocoder", ["unfolded"]), ("hifigan", [])])
def test_vocoder(tmp_path, arch, peers):
    rows = rows_of(tmp_path, "--mode", "vocoder", "--arch", arch, "--peers", f"[{', '.join(peers)}]")
    assert [row["program"] for row in rows] == ["plain", *peers]
    assert all(row["items"] == 6 * 256 and row["largest_difference"] <= 1e-4 * row["size"] for row in rows)
    assert rows[0]["size"] > 0.5  # sound, not what fresh weights let fade


def test_pipeline(tmp_path):
    assert len(benchmark.TEXT) == 128
    words = ["--mode", "pipeline", "--arch", "tiny_voice", "--vocoder", "tiny_vocoder", "--peers", "[plain]"]
    rows = rows_of(tmp_path, *words, "--text", "Hello.")
    assert [row["program"] for row in rows] == ["ours", "plain"]
    for row in rows:
        assert row["p99_ms"] >= row["p50_ms"] > 0 and row["acoustic_ms"] > 0 and row["vocoder_ms"] > 0


@pytest.mark.parametrize("arch", ["tiny_voice", "tiny_vocoder"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training(tmp_path, arch, precision):
    words = ["--mode", "training", "--arch", arch, "--peers", "[plain]", "--segment", "512"]
    rows = rows_of(tmp_path, *words, "--precision", precision)[-2:]
    assert [row["program"] for row in rows] == ["ours", "plain"] and all(row["throughput"] > 0 for row in rows)
    if arch == "tiny_voice":
        assert rows[0]["largest_difference"] < 1e-4 and rows[0]["unit"] == "mel frames/s"


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(SystemExit):
        benchmark.main(["--mode", "decode", "--peers", "[graph]"])
    with pytest.raises(ValueError, match="engine graph needs a CUDA device"):
        benchmark.main(["--arch", "tiny_voice", "--engines", "[graph]", *SMALL])
    with pytest.raises(ValueError, match="engine graph needs a CUDA device"):
        benchmark.main(["--mode", "training", "--arch", "tiny_voice", "--engine", "graph", *SMALL])


def test_the_plain_training_is_ours():
    """Outputs and gradients in float64, with the same dropout of the prenet and none elsewhere."""
    torch.manual_seed(0)
    model = Tacotron2(TINY).double().eval()
    text, mel = torch.randint(1, 148, (2, 7)), torch.randn(2, 80, 5).double()
    inputs = (text, torch.tensor([7, 4]), mel, torch.tensor([5, 3]))
    keep = dropout(model, 5, 2, torch.Generator().manual_seed(0))
    results = []
    for forward in (model, lambda *given: plain.teacher_forced(model, *given)):
        found = forward(*inputs, keep)
        model.zero_grad()
        (found.refined.square().sum() + found.mel.square().sum() + found.gate.sum()).backward()
        results.append([*found, *(parameter.grad.clone() for parameter in model.parameters())])
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-9, rtol=1e-9)


def test_weights_for_torchaudio_come_back():
    """The names are those that `convert` reads; torchaudio itself is asked on a machine that has it."""
    from tacotron2.convert import to_canonical

    model = Tacotron2(TINY)
    there = plain.to_torchaudio(model)
    assert {"embedding.weight", "encoder.lstm.bias_hh_l0_reverse", "postnet.convolutions.4.1.weight"} <= set(there)
    back = to_canonical(there)
    assert set(back) == set(model.state_dict())
    assert all(torch.equal(value, back[name]) for name, value in model.state_dict().items())


@pytest.mark.skipif(not HAS_TORCHAUDIO, reason="needs the package torchaudio")
@pytest.mark.filterwarnings("ignore")
def test_torchaudio_says_the_same(monkeypatch):
    """The peer has our weights: without dropout it makes our frames."""
    torch.manual_seed(0)
    model = Tacotron2(replace(TINY, dropout=0.0)).eval().requires_grad_(False)
    model.decoder.gate.bias.fill_(benchmark.NEVER)
    text, lengths = torch.randint(1, 148, (2, 9)), torch.full((2,), 9)
    expected = plain.decode_fixed(model, text, lengths, torch.Generator(), 12)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *args, **options: x)
    found = plain.torchaudio_decoder(model, 12)(text, lengths)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
