"""Speaking from files: order, seeds, files that play, streams that equal the whole, errors before anything runs."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlx import checkpoint as checkpoints
from dlx.files import sha256
from dlx.speech import vocoder as vocoders
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.symbols import SymbolTable
from dlx.speech.vocoder import GriffinLim, HifiGan, HifiGanConfig
from tacotron2 import infer, pretrained, registry
from tacotron2.streaming import Growing, hifigan_reach
from tacotron2.synthesis import Synthesizer
from tacotron2.vocoding import WaveGlowVocoder
from tacotron2.waveglow import WaveGlow, WaveGlowConfig

ARCH, VOCODER = "tacotron2_compact", "waveglow_compact"


def lively(arch: str = ARCH, symbols: int = 148) -> torch.nn.Module:
    """A fresh acoustic model that stops somewhere, or a vocoder that is more than a rotation."""
    torch.manual_seed(0)
    model = registry.build(arch, symbols)
    if arch == VOCODER:
        for flow in model.flows:
            torch.nn.init.normal_(flow.wn.end.weight, std=0.02)
        return model
    for name, parameter in model.decoder.named_parameters():
        if "weight" in name:
            parameter.data.mul_(2)
    model.decoder.gate.bias.data.fill_(-0.5)
    return model


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> Path:
    """A checkpoint as training writes it."""
    folder = tmp_path_factory.mktemp("voice")
    metadata = pretrained.describe(ARCH, MelConfig(), FrontEnd())
    state = {"model": lively().state_dict()}
    checkpoints.Checkpoints(folder / "checkpoints").save(7, model=state, metadata=metadata)
    return folder


@pytest.fixture(scope="module")
def waveglow(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("waveglow") / "waveglow.pt"
    torch.save({"state_dict": {f"module.{key}": value for key, value in lively(VOCODER).state_dict().items()}}, path)
    return path


def synthesizer(voice: Path, vocoder=None, **options) -> Synthesizer:
    options = {"limit": 40, "chunk": 30, "dtype": torch.float64} | options  # so that rounding decides nothing
    return Synthesizer(pretrained.load_voice(voice), vocoder or GriffinLim(iterations=2), **options)


TEXTS = ["One sheep.", "Two sheep went home, and then they slept.", "Three."]


@pytest.mark.filterwarnings("ignore:items")
def test_order_and_independence_of_batches(voice):
    spoken = synthesizer(voice, batch_size=8, threshold=0.38)(TEXTS)
    assert [speech.text for speech in spoken] == TEXTS
    assert [len(speech.chunks) for speech in spoken] == [1, 2, 1]
    assert " ".join(chunk.text for chunk in spoken[1].chunks).startswith("two sheep went home, and")
    single = synthesizer(voice, batch_size=1, threshold=0.38)(TEXTS)
    assert len({chunk.frames for speech in spoken for chunk in speech.chunks}) > 1
    for one, other in zip(spoken, single, strict=True):
        assert [chunk.frames for chunk in one.chunks] == [chunk.frames for chunk in other.chunks]
        assert np.allclose(one.mel, other.mel, atol=1e-3)
        frames = sum(chunk.frames for chunk in one.chunks)
        silence = round(0.15 * 22050) * (len(one.chunks) - 1)
        assert len(one.audio) == frames * 256 + silence and one.mel.shape == (80, frames)
        for chunk in one.chunks:
            assert chunk.alignment.shape[0] == chunk.frames and chunk.alignment.sum(1) == pytest.approx(1, abs=1e-4)
    other = synthesizer(voice, seed=1, threshold=0.38)(TEXTS[:1])[0]
    assert other.mel.shape != spoken[0].mel.shape or not np.allclose(other.mel, spoken[0].mel, atol=1e-3)


@pytest.mark.filterwarnings("ignore:items", "ignore:cut at the limit")
@pytest.mark.parametrize("kind", ["griffin-lim", "hifigan", "waveglow", "denoised"])
def test_streams_are_the_whole(voice, kind):
    torch.manual_seed(1)
    if kind == "griffin-lim":
        vocoder = GriffinLim(iterations=2)
    elif kind == "hifigan":
        vocoder = HifiGan(HifiGanConfig(channels=32)).eval()
    else:
        model = WaveGlow(WaveGlowConfig(flows=4, layers=3, channels=16))
        for flow in model.flows:
            torch.nn.init.normal_(flow.wn.end.weight, std=0.1)
        vocoder = WaveGlowVocoder(model, MelConfig(), strength=0.1 if kind == "denoised" else 0.0)
    speaker = synthesizer(voice, vocoder, limit=90)
    whole = speaker(TEXTS[1:2])[0]
    pieces = list(speaker.stream(TEXTS[1]))
    assert len(pieces) >= (4 if kind == "hifigan" else 3)
    assert np.abs(whole.audio).max() > 1e-3
    joined = np.concatenate(pieces)
    assert joined.shape == whole.audio.shape and np.abs(joined - whole.audio).max() < 2e-3 * np.abs(whole.audio).max()


def test_growing_waits_for_what_it_depends_on():
    """A moving sum over 2 to each side, fed one by one."""
    kernel = torch.ones(1, 1, 5, dtype=torch.float64)

    def smooth(window: torch.Tensor, first: int) -> torch.Tensor:
        return torch.nn.functional.conv1d(window, kernel, padding=2)

    x = torch.randn(1, 1, 23, dtype=torch.float64)
    growing, found = Growing(smooth, 2, minimum=3), []
    for place in range(23):
        piece = growing.push(x[:, :, place : place + 1], last=place == 22)
        found += [] if piece is None else [piece]
        done = sum(part.shape[2] for part in found)
        assert done == 23 if place == 22 else done % 3 == 0 and done > place - 2 - 3
        assert growing.kept.shape[2] <= 2 * 2 + 3 + 3
    assert torch.allclose(torch.cat(found, 2), smooth(x, 0))
    assert Growing(smooth, 2).push(None, last=True) is None


def test_the_reach_of_hifigan():
    """No gradient from farther away, and some from near the border."""
    torch.manual_seed(0)
    model = HifiGan(HifiGanConfig(channels=16)).double()
    mel = torch.randn(1, 80, 61, dtype=torch.float64, requires_grad=True)
    model(mel)[0, 30 * 256 : 31 * 256].sum().backward()
    frames = mel.grad[0].abs().amax(0).nonzero()[:, 0]
    reach = hifigan_reach(HifiGanConfig())
    assert 30 - reach <= frames.min() <= 30 - reach + 3 and 30 + reach - 3 <= frames.max() <= 30 + reach


@pytest.mark.filterwarnings("ignore:items")
def test_files(voice, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"\xef\xbb\xbf" + b"One sheep.\r\n\r\nNo. 2 costs $5.\r\n")
    args = ["--checkpoint", str(voice), "-i", str(lines), "-o", str(tmp_path / "out"), "--vocoder", "griffin-lim"]
    content = infer.main([*args, "--limit", "30", "--device", "cpu"])
    assert json.loads((tmp_path / "out" / "infer.json").read_text()) == content
    assert [entry["text"] for entry in content["texts"]] == ["One sheep.", "No. 2 costs $5."]
    assert content["texts"][1]["chunks"][0]["text"] == "number two costs five dollars."
    assert content["real_time_factor"] > 0 and content["arch"] == ARCH
    for number, entry in enumerate(content["texts"], 1):
        assert entry["audio"] == f"{number:04d}.wav" and isinstance(entry["chunks"][0]["reached_limit"], bool)
        with wave.open(str(tmp_path / "out" / entry["audio"])) as file:  # user case O23
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
            assert file.getnframes() == sum(chunk["frames"] for chunk in entry["chunks"]) * 256
        assert (tmp_path / "out" / entry["picture"]).read_bytes()[:4] == b"\x89PNG"
    again = infer.main([*args, "--limit", "30", "--device", "cpu", "--pictures", "false", "--batch_size", "1"])
    assert [entry["seconds"] for entry in again["texts"]] == [entry["seconds"] for entry in content["texts"]]
    assert "times as fast as it is heard" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:cut at the limit")
def test_streaming_verb(voice, waveglow, tmp_path, capsys):
    args = ["--checkpoint", str(voice), "--text", "One sheep.", "--output_dir", str(tmp_path), "--device", "cpu"]
    content = infer.main([*args, "--vocoder", str(waveglow), "--limit", "20", "--stream", "true"])
    entry = content["texts"][0]
    assert entry["pieces"] >= 1 and 0 < entry["first_piece_seconds"]
    assert "first sound after" in capsys.readouterr().out
    with wave.open(str(tmp_path / "0001.wav")) as file:
        assert file.getnframes() / 22050 == pytest.approx(entry["seconds"], abs=1e-3)


def test_errors_come_early(voice, waveglow, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("the model ran")

    monkeypatch.setattr("tacotron2.synthesis.decode", refuse)
    lines = tmp_path / "lines.txt"
    base = ["--checkpoint", str(voice), "--vocoder", "griffin-lim", "-o", str(tmp_path / "out"), "--device", "cpu"]
    lines.write_text("fine\n\n...\n日本\n", encoding="utf-8")
    with pytest.warns(UserWarning), pytest.raises(ValueError) as caught:
        infer.main([*base, "-i", str(lines)])
    assert f"{lines}:3: nothing of" in str(caught.value) and f"{lines}:4: nothing of" in str(caught.value)
    lines.write_text("naïve 日本\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"lines.txt:1: .*日.*cannot be written in ASCII"):
        infer.main([*base, "-i", str(lines), "--strict", "true"])
    for text, message in ((b"", "holds no text"), (b"\xff\xfe", "not UTF-8")):
        lines.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            infer.main([*base, "-i", str(lines)])
    with pytest.raises(ValueError, match="there is no such text file"):
        infer.main([*base, "-i", str(tmp_path / "gone.txt")])
    with pytest.raises(SystemExit):
        infer.main(base)
    with pytest.raises(ValueError, match="holds a tacotron2_compact, which is no vocoder"):
        pretrained.load_vocoder(voice)
    with pytest.raises(ValueError, match="holds a waveglow_compact, which is a vocoder"):
        pretrained.load_voice(waveglow)


def test_vocoders_must_agree(voice):
    """User case O21."""
    other = MelConfig(hop_length=200, fmax=7600, sample_rate=16000)
    with pytest.raises(ValueError) as caught:
        synthesizer(voice, GriffinLim(other))
    for difference in ("sample_rate: 22050 and 16000", "hop_length: 256 and 200", "fmax: 8000.0 and 7600"):
        assert difference in str(caught.value)


def test_the_alphabet_travels_with_the_checkpoint(tmp_path):
    """User case O16."""
    front_end = FrontEnd(SymbolTable.of_letters("абвгде"), "basic")
    metadata = pretrained.describe(ARCH, MelConfig(), front_end)
    state = {"model": lively(symbols=len(front_end.symbols)).state_dict()}
    folder = checkpoints.Checkpoints(tmp_path / "run" / "checkpoints").save(1, model=state, metadata=metadata)
    for source in (tmp_path / "run", folder):
        found = pretrained.load_voice(source)
        assert found.front_end == front_end and found.front_end.encode("Где")
    with pytest.raises(ValueError, match="different symbol tables"):
        found.front_end.require_same(FrontEnd(SymbolTable.of_letters("абвгдж"), "basic"))
    checkpoints.Checkpoints(tmp_path / "bare").save(1, model=state, metadata={"arch": ARCH})
    with pytest.raises(ValueError, match="does not say its preprocessing"):
        pretrained.load(tmp_path / "bare")
    with pytest.raises(ValueError, match="there is no checkpoint in this folder"):
        (tmp_path / "empty").mkdir()
        pretrained.load(tmp_path / "empty")


def test_published_weights_have_cards(tmp_path, monkeypatch):
    """A card beside its file gives architecture, symbols and spectrograms; the file is verified."""
    folder = tmp_path / "PyTorch" / "SpeechSynthesis" / "Tacotron2" / "weights"
    folder.mkdir(parents=True)
    for arch, front_end in ((ARCH, FrontEnd()), (VOCODER, None)):
        path = folder / f"{arch}.test.safetensors"
        save_file({name: value.half() for name, value in lively(arch).state_dict().items()}, path)
        card = pretrained.describe(arch, MelConfig(), front_end) | {
            "name": f"{arch}.test", "task": "PyTorch/SpeechSynthesis/Tacotron2", "licence": "", "credit": "",
            "source": {"kind": "file", "path": path.name}, "sha256": sha256(path), "size": path.stat().st_size,
            "metric": {},
        }  # fmt: skip
        (folder / f"{arch}.test.json").write_text(json.dumps(card))
    monkeypatch.setenv("DLX_ROOT", str(tmp_path))
    found = pretrained.load_voice(f"{ARCH}.test")
    assert found.arch == ARCH and found.front_end == FrontEnd() and found.extra["licence"] == ""
    assert found.model.decoder.mel.weight.dtype == torch.float32
    vocoder = pretrained.load_vocoder(f"{VOCODER}.test", sigma=0.5, strength=0.0, seed=3)
    assert isinstance(vocoder, WaveGlowVocoder) and (vocoder.sigma, vocoder.seed, vocoder.denoiser) == (0.5, 3, None)
    with pytest.raises(ValueError, match=rf"no name of published weights \({ARCH}.test, {VOCODER}.test\)"):
        pretrained.load(f"{ARCH}.tset")


def test_vocoders_by_name(tmp_path):
    assert isinstance(pretrained.load_vocoder("griffin-lim", mel=MelConfig(n_fft=2048)), GriffinLim)
    model = HifiGan(HifiGanConfig())
    torch.save({"generator": model.state_dict()}, tmp_path / "generator.pth")
    assert isinstance(pretrained.load_vocoder(tmp_path / "generator.pth"), HifiGan)
    with pytest.raises(ValueError, match="unknown weights 'hifigan'"):
        pretrained.load_vocoder("hifigan")
    assert vocoders.GRIFFIN_LIM == "griffin-lim"
