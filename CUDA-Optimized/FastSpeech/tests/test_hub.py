"""torch.hub entries: fresh, from a file of either layout, symbols as the voice reads them; nothing needs a network."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlx import testing
from fastspeech import hub, pretrained, registry
from fastspeech.convert import to_nvidia

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def offline(tmp_path):
    with testing.offline(tmp_path) as locked:
        yield locked


def test_fresh_weights_need_nothing(offline):
    voice = hub.nvidia_fastspeech(pretrained=False, arch="fastspeech_compact")
    assert voice.training and sum(p.numel() for p in voice.parameters()) == 5_973_073
    utils = hub.nvidia_fastspeech_utils(voice)
    symbols, lengths = utils.prepare_input_sequence(["Hello world.", "Hi"])
    assert voice.front_end.symbols.decode(symbols[0].tolist()) == " hello world."
    assert lengths.tolist() == [13, 4] and symbols[1, 4:].tolist() == [0] * 9
    mel, mel_lengths, durations = voice.eval().infer(symbols, lengths, speed=0.9)
    assert mel.shape[1] == 80 and mel.shape[2] == int(mel_lengths.max()) and torch.equal(durations.sum(1), mel_lengths)
    for speed in (math.nan, 0.0, -1.0, torch.tensor([1.0, math.inf])):
        with pytest.raises(ValueError, match="a speed must be above 0"):
            voice.infer(symbols, lengths, speed=speed)
    with pytest.raises(ValueError, match="symbols must be from 0 to 147, got 1 to 148"):
        voice.infer(torch.tensor([[1, 148]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="none of fp32"):
        hub.nvidia_fastspeech(pretrained=False, model_math="int8")
    with pytest.raises(ValueError, match="no weights of FastSpeech are published"):
        hub.nvidia_fastspeech()


def test_both_layouts_load(offline, tmp_path):
    torch.manual_seed(0)
    model = registry.build("fastspeech").eval()
    state = model.state_dict()
    torch.save({"step": 3, "model": {f"module.{k}": v for k, v in to_nvidia(state, 64).items()}}, tmp_path / "n.pt")
    torch.save(state, tmp_path / "ours.pt")
    text, lengths = torch.randint(1, 148, (1, 6)), torch.tensor([6])
    with torch.no_grad():
        expected = model(text, lengths)
    for name in ("n.pt", "ours.pt"):
        voice = hub.nvidia_fastspeech(checkpoint=tmp_path / name)
        assert not voice.training and not voice.leads
        assert torch.equal(voice.infer(text, lengths)[0], expected.mel)
        utils = hub.nvidia_fastspeech_utils(voice)
        assert voice.front_end.symbols.decode(utils.prepare_input_sequence("Hi")[0][0].tolist()) == "hi"
    half = hub.nvidia_fastspeech(checkpoint=tmp_path / "ours.pt", model_math="bf16")
    assert half.infer(text, lengths)[0].dtype == torch.bfloat16


def test_what_is_no_voice_is_named(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no FastSpeech among its 1 tensors"):
        pretrained.load(tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no folder, no file"):
        pretrained.load("nothing.here")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        pretrained.load(tmp_path)


@pytest.mark.skipif(not (ROOT / "hubconf.py").is_file(), reason="needs the repository's hubconf.py")
def test_the_entries_are_listed_and_import_nothing_else():
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import hubconf
assert not [name for name in sys.modules if name.startswith("fastspeech")]
model = hubconf.nvidia_fastspeech(pretrained=False, arch="fastspeech_compact")
print(sorted(name for name in sys.modules if name in ("fastspeech", "tacotron2", "convnets", "ssd")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and ast.literal_eval(done.stdout) == ["fastspeech"], done.stderr
