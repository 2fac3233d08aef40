"""One ONNX graph from symbols to spectrogram, of any batch, text and length."""

import json

import numpy as np
import pytest
import torch

from dlx import export as exports
from dlx.serve import OnnxModel
from fastspeech import export
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.pretrained import Found

pytest.importorskip("onnxruntime", reason="needs onnxruntime")
TINY = FastSpeechConfig(channels=16, head_channels=8, feed_forward=16, encoder_blocks=1, decoder_blocks=1, predictor=8)


@pytest.fixture(scope="module")
def voice():
    from dlx.speech.frontend import FrontEnd
    from dlx.speech.mel import MelConfig

    torch.manual_seed(0)
    model = FastSpeech(TINY).eval()
    with torch.no_grad():
        model.durations.output.bias.fill_(1.5)
        model.durations.output.weight.mul_(0.2)
    return Found(model, "fastspeech", MelConfig(), FrontEnd(), "fresh")


@pytest.fixture(scope="module")
def exported(voice, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.pretrained, "load", lambda source: voice)
        content = export.main(["--checkpoint", "x", "--output_dir", str(folder), "--triton", "true"])
    return folder, content


def test_the_graph_is_the_model_at_any_size(exported, voice):
    folder, content = exported
    assert content["difference"] < 1e-4
    graph = OnnxModel(folder / "fastspeech.onnx")
    for batch, length in ((1, 2), (1, 200), (5, 17)):
        inputs = export.example(148, batch, length, seed=7)
        found = graph(*(value.numpy() for value in inputs))
        with torch.no_grad():
            expected = voice.model(inputs[0], inputs[1], None, None, *inputs[2:])
        assert np.array_equal(found["durations"], expected.durations.numpy())
        frames = expected.mel.shape[2]
        np.testing.assert_allclose(found["mel"][:, :, :frames], expected.mel.numpy(), atol=1e-4)
        assert found["mel"].shape[2] == max(frames, 2)


def test_what_the_file_says(exported):
    folder, content = exported
    stored = exports.read_metadata(folder / "fastspeech.onnx")
    assert stored["preprocessing"]["mel"]["hop_length"] == 256 and stored["preprocessing"]["leads"] is True
    assert json.loads((folder / "export.json").read_text())["ports"]["outputs"][0] == "mel float32[-1, 80, -1]"
    text = (folder / "triton" / "fastspeech" / "config.pbtxt").read_text()
    assert "max_batch_size: 0" in text and 'name: "emphasis"' in text


def test_a_graph_that_differs_is_not_left(voice, tmp_path, monkeypatch):
    config = export.ExportConfig(checkpoint="x", output_dir=str(tmp_path), batches=[1], lengths=[5])

    def fails(*args, **options):
        raise exports.ParityError("differs")

    monkeypatch.setattr(export.exports, "check_onnx", fails)
    with pytest.raises(exports.ParityError):
        export.export_onnx(voice, tmp_path / "f.onnx", config)
    assert not list(tmp_path.glob("*.onnx"))
