"""The voice as a model of Triton: outputs for a batch, a missing package; and a real server where that is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch

from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.vocoder import GriffinLim
from fastspeech import registry, serve, triton_server
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.pretrained import Found
from fastspeech.synthesis import Synthesizer

TINY = FastSpeechConfig(channels=16, head_channels=8, feed_forward=16, encoder_blocks=1, decoder_blocks=1, predictor=8)
HAS_TRITON = importlib.util.find_spec("pytriton") is not None


def test_one_bad_text_spoils_no_batch():
    torch.manual_seed(0)
    voice = Synthesizer(Found(FastSpeech(TINY).eval(), "fastspeech", MelConfig(), FrontEnd(), "x"), GriffinLim(None, 1))
    texts = ["Good morning.", "?!", "A longer text than the first one.", "Hi", "too long" * 9, b"\xff"]
    text = np.array([[text.encode() if isinstance(text, str) else text] for text in texts], object)
    speed = np.array([[1.0], [1.0], [0.5], [np.nan], [1.0], [1.0]], np.float32)
    found = triton_server.speak(voice, text, speed, longest=50)
    expected = voice([texts[0], texts[2]], speed=[1.0, 0.5])
    lengths = [len(speech.audio) for speech in expected]
    assert found["samples"][:, 0].tolist() == [lengths[0], 0, lengths[1], 0, 0, 0]
    assert found["audio"].shape == (6, max(lengths)) and found["audio"].dtype == np.float32
    np.testing.assert_allclose(found["audio"][0, : lengths[0]], expected[0].audio, atol=1e-4)
    assert not found["audio"][0, lengths[0] :].any() and not found["audio"][1].any()
    reasons = ["", "nothing of", "", "a speed lies", "50 characters at most, got 72", "codec can't decode"]
    for reason, error in zip(reasons, found["error"][:, 0], strict=True):
        assert reason.encode() in error and bool(reason) == bool(error)
    assert triton_server.speak(voice, text[1:2], speed[1:2], 50)["audio"].shape == (1, 1)


@pytest.mark.skipif(HAS_TRITON, reason="nvidia-pytriton is installed")
def test_without_the_package_it_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install nvidia-pytriton==0.7.0 numpy==1.26.4"):
        serve.main(["--checkpoint", "x", "--triton", "true", "--device", "cpu"])


@pytest.mark.skipif(not HAS_TRITON, reason=f"needs another environment: pip install {triton_server.PINS}")
def test_a_real_server_speaks(tmp_path):
    client = pytest.importorskip("tritonclient.http")
    torch.save(registry.build("fastspeech_compact").state_dict(), tmp_path / "voice.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--checkpoint {tmp_path / 'voice.pt'} --vocoder griffin-lim --triton true --device cpu --port {port}"
    command = [sys.executable, "-m", "fastspeech.serve", *options.split()]
    home = tempfile.mkdtemp(prefix="triton-")  # sockets lie below, whose names may not be long
    environment = {**os.environ, "PYTRITON_HOME": home}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert any("Triton serves fastspeech" in line for line in server.stdout)
        inputs = [client.InferInput("text", [1, 1], "BYTES"), client.InferInput("speed", [1, 1], "FP32")]
        inputs[0].set_data_from_numpy(np.array([[b"Good morning."]], object))
        inputs[1].set_data_from_numpy(np.ones((1, 1), np.float32))
        found = client.InferenceServerClient(f"127.0.0.1:{port}").infer("fastspeech", inputs)
        samples = int(found.as_numpy("samples")[0, 0])
        assert found.as_numpy("error")[0, 0] == b"" and found.as_numpy("audio").shape == (1, samples) and samples > 0
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        shutil.rmtree(home, ignore_errors=True)
