"""Exported parts against the models, over batches and lengths (O35), and a whole sentence said by onnxruntime."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from dlx import export as exports
from dlx.serve import OnnxModel
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.symbols import SymbolTable
from tacotron2 import export, pretrained
from tacotron2.decoding import decode, dropout
from tacotron2.model import Tacotron2, Tacotron2Config
from tacotron2.parts import LoopLSTM, SymbolicLSTM, tacotron2_parts, waveglow_parts
from tacotron2.waveglow import WaveGlow, WaveGlowConfig

TINY = Tacotron2Config(
    num_symbols=20, num_mels=8, encoder=16, prenet=12, rnn=24, attention=10, location_filters=4, location_kernel=5,
    postnet=16,
)  # fmt: skip
WAVE = WaveGlowConfig(num_mels=8, flows=3, early_every=2, layers=2, channels=8, hop_length=32, window=128)
MEL = MelConfig(sample_rate=8000, n_fft=128, hop_length=32, win_length=128, num_mels=8, fmax=4000)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="lacks a C++ compiler (g++)")


def voice() -> pretrained.Found:
    torch.manual_seed(0)
    model = Tacotron2(TINY).eval()
    for name, parameter in model.decoder.named_parameters():
        if "weight" in name:
            parameter.data.mul_(2)
    model.decoder.gate.bias.data.fill_(-20)
    front_end = FrontEnd(SymbolTable.of_letters("abcdefgh"), "basic")
    return pretrained.Found(model, "tacotron2", MEL, front_end, "tiny")


def waveglow() -> pretrained.Found:
    torch.manual_seed(0)
    model = WaveGlow(WAVE).eval()
    for flow in model.flows:
        torch.nn.init.normal_(flow.wn.end.weight, std=0.1)
    return pretrained.Found(model, "waveglow", MEL, None, "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every part as ONNX, compared with the model at batch 1 and 3 and lengths 7 and 31 on the way."""
    folder = tmp_path_factory.mktemp("onnx")
    entries = export.export(voice(), folder, "onnx") | export.export(waveglow(), folder, "onnx")
    assert set(entries) == {"encoder.onnx", "step.onnx", "postnet.onnx", "waveglow.onnx"}
    assert all(entry["difference"] < 1e-4 for entry in entries.values())
    return folder


def test_graphs_of_any_batch_and_length(folder):
    """Sizes that nothing was compared with on export."""
    for found in (voice(), waveglow()):
        for name, part in export.reference(found).items():
            model = OnnxModel(folder / f"{name}.onnx")
            for batch, length in ((1, 1), (2, 50), (5, 12)):
                inputs = part.example(batch, length, seed=4)
                with torch.no_grad():
                    expected = part.module(*inputs)
                expected = (expected,) if isinstance(expected, torch.Tensor) else expected
                values = model(*(value.numpy() for value in inputs))
                for output, ours in zip(part.outputs, expected, strict=True):
                    np.testing.assert_allclose(values[output], ours.numpy(), rtol=0, atol=1e-4)


def test_metadata_and_names(folder):
    metadata = exports.read_metadata(folder / "step.onnx")
    assert metadata["part"] == "step" and metadata["preprocessing"]["mel"]["hop_length"] == 32
    assert FrontEnd.from_dict(metadata["preprocessing"]["front_end"]) == voice().front_end
    assert exports.read_metadata(folder / "waveglow.onnx")["arch"] == "waveglow"


@pytest.mark.filterwarnings("ignore:items")
def test_a_sentence_said_by_onnxruntime(folder):
    """The loop that a caller writes: encoder, steps, postnet; padded items, as `decode` says them."""
    model = voice().model
    text, lengths, frames = torch.randint(1, 20, (2, 9)), torch.tensor([9, 5]), 12
    expected = decode(model, text, lengths, generator=torch.Generator().manual_seed(3), limit=frames)
    keep = dropout(model, frames, 2, torch.Generator().manual_seed(3)).numpy()
    encoder, step, postnet = (OnnxModel(folder / f"{name}.onnx") for name in ("encoder", "step", "postnet"))
    source = encoder(text.numpy(), lengths.numpy())
    shapes = list(tacotron2_parts(model)["step"].inputs.items())[:7]
    state = [np.zeros([{"B": 2, "T": 9}.get(size, size) for size in shape], np.float32) for _, shape in shapes]
    found = []
    for factors in keep:
        values = step(*state, source["memory"], source["projected"], lengths.numpy(), factors)
        state = [values[f"next_{name}"] for name, _ in shapes]
        found.append(state[0])
        assert (values["gate"] < 0).all()
    refined = postnet(np.stack(found, 2), np.full(2, frames))["refined"]
    np.testing.assert_allclose(refined, expected.refined.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [SymbolicLSTM, LoopLSTM])
def test_lstms_for_export_are_made_of_the_models(kind):
    lstm = torch.nn.LSTM(5, 6, batch_first=True)
    made = kind(lstm)
    x = torch.randn(2, 7, 5)
    with torch.no_grad():
        if kind is LoopLSTM:
            assert torch.allclose(made(x)[0], lstm(x)[0], atol=1e-6)
        else:
            assert made(x)[0].shape == lstm(x)[0].shape  # its values are onnxruntime's


def test_a_wrong_graph_leaves_no_file(tmp_path):
    found = voice()
    parts, plain = export.parts_of(found, "onnx"), export.reference(found)
    parts["postnet"].module.postnet = Tacotron2(TINY).postnet.eval()
    with pytest.raises(exports.ParityError, match="output refined at batch 1"):
        export.export_onnx(parts["postnet"], plain["postnet"], tmp_path / "postnet.onnx", {}, [(1, 7)], 1e-4)
    assert not list(tmp_path.iterdir())


def test_examples_have_the_sizes_that_are_told():
    part = waveglow_parts(waveglow().model)["waveglow"]
    mel, noise = part.example(3, 5)
    assert mel.shape == (3, 8, 5) and noise.shape == (3, 8, 5 * 4)
    lengths = tacotron2_parts(voice().model)["encoder"].example(3, 2)[1]
    assert lengths.tolist() == [2, 1, 1]


def test_the_verb(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "load", lambda source: {"voice": voice, "glow": waveglow}[source]())
    cases = []

    def write(part, plain, path, metadata, sizes, atol) -> float:  # the real one is tested above
        cases.append(sizes)
        path.write_bytes(b"graph")
        return 0.0

    monkeypatch.setattr(export, "export_onnx", write)
    args = [
        "--checkpoint",
        "voice",
        "--waveglow",
        "glow",
        "--output_dir",
        str(tmp_path),
        "--batches",
        "2",
        "--lengths",
        "8",
    ]
    content = export.main(args)
    assert cases == [[(2, 8), (2, 8)]] * 4
    assert json.loads((tmp_path / "parts.json").read_text()) == content
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "encoder.onnx", "parts.json", "postnet.onnx", "step.onnx", "waveglow.onnx",
    ]  # fmt: skip
    step = content["parts"]["step.onnx"]
    assert [entry["name"] for entry in step["inputs"]][-1] == "keep" and step["outputs"][-1] == "gate"
    assert step["inputs"][6] == {"name": "history", "type": "float32", "sizes": ["B", 2, "T"]}
    assert content["models"][1]["config"]["channels"] == 8
    with pytest.raises(SystemExit):
        export.main(["--output_dir", str(tmp_path)])


@needs_compiler
def test_a_compiled_part(tmp_path):
    """AOTInductor, on the quickest part."""
    entries = export.export(voice(), tmp_path, "aoti", only=["postnet"])
    assert entries["postnet.aoti"]["difference"] < 1e-4 and (tmp_path / "postnet.pt2").is_file()


@pytest.mark.slow
@needs_compiler
def test_all_compiled_parts(tmp_path):
    entries = export.export(voice(), tmp_path, "aoti") | export.export(waveglow(), tmp_path, "aoti")
    assert set(entries) == {"encoder.aoti", "step.aoti", "postnet.aoti", "waveglow.aoti"}
    assert all(entry["difference"] < 1e-4 for entry in entries.values())
    part = export.reference(voice())["encoder"]
    run = torch._inductor.aoti_load_package(str(tmp_path / "encoder.pt2"))
    inputs = part.example(5, 50, seed=4)
    for ours, theirs in zip(part.module(*inputs), run(*inputs), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-4)
