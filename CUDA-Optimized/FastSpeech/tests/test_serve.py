"""The server over real sockets: sound, refusals, batches; and its page in a browser."""

import io
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.vocoder import GriffinLim
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.pretrained import Found
from fastspeech.synthesis import Synthesizer

soundfile = pytest.importorskip("soundfile", reason="needs soundfile")
uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn and fastapi")
TYPING = """<script>addEventListener("load", async () => {
    const state = document.getElementById("state");
    document.getElementById("text").value = new URLSearchParams(location.search).get("text");
    document.getElementById("form").requestSubmit();
    for (let i = 0; i < 400 && !state.textContent.includes(" s of sound") && !state.className; i++)
        await new Promise(done => setTimeout(done, 25));
    const source = document.getElementById("sound").src;
    document.title = state.className ? "refused: " + state.textContent
        : "bytes " + (await (await fetch(source)).arrayBuffer()).byteLength;
})</script></html>"""
TINY = FastSpeechConfig(channels=16, head_channels=8, feed_forward=16, encoder_blocks=1, decoder_blocks=1, predictor=8)


class Slow(Synthesizer):
    """Waits where a test says so; counts the texts of each call."""

    delay = 0.0

    def __call__(self, texts, names=None, speed=1.0):
        self.calls = [*getattr(self, "calls", []), len(texts)]
        time.sleep(self.delay)
        return super().__call__(texts, names, speed)


@pytest.fixture(scope="module")
def synthesizer():
    torch.manual_seed(0)
    model = FastSpeech(TINY).eval()
    with torch.no_grad():
        model.durations.output.bias.fill_(1.5)
        model.durations.output.weight.mul_(0.2)
    found = Found(model, "fastspeech", MelConfig(), FrontEnd(), "fresh")
    return Slow(found, GriffinLim(iterations=1), batch_size=4)


@pytest.fixture(scope="module")
def address(synthesizer):
    from fastapi.responses import HTMLResponse

    from fastspeech.serve import application

    app = application(synthesizer, batch_size=4, wait=0.05, queue_size=4, time_limit=3)
    page = next(route for route in app.routes if route.path == "/").endpoint

    @app.get("/typed", response_class=HTMLResponse)
    async def typed() -> str:
        return (await page()).replace("</html>", TYPING)

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(200):
        if server.started:
            break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def get(address, path):
    with urllib.request.urlopen(address + path, timeout=30) as answer:
        return answer.read().decode()


def speak(address, **request):
    body = json.dumps(request).encode()
    asked = urllib.request.Request(f"{address}/speak", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_it_speaks(address, synthesizer):
    status, body, headers = speak(address, text="Good *morning*. [200ms] How are you?", speed=0.8)
    sound, rate = soundfile.read(io.BytesIO(body))
    (expected,) = synthesizer(["Good *morning*. [200ms] How are you?"], speed=0.8)
    assert status == 200 and headers["content-type"] == "audio/wav" and rate == 22050
    assert len(sound) == len(expected.audio) and float(headers["X-Seconds"]) == pytest.approx(
        len(sound) / rate, abs=1e-3
    )
    np.testing.assert_allclose(sound, expected.audio / max(1, np.abs(expected.audio).max()), atol=2e-3)
    assert json.loads(get(address, "/health")) == {"arch": "fastspeech", "voice": "fresh", "sample_rate": 22050}


@pytest.mark.parametrize(
    ("request_", "status", "why"),
    [
        ({"text": "?!"}, 400, b"nothing of '?!'"),
        ({"text": "*a:9*"}, 400, b"an emphasis lies between"),
        ({"text": ""}, 422, b"at least 1 character"),
        ({"text": "a" * 5001}, 422, b"at most 5000"),
        ({"text": "a", "speed": 9}, 422, b"less than or equal to 4"),
        ({"text": "a", "sped": 1}, 422, b"Extra inputs"),
    ],
)
def test_what_cannot_be_said_is_refused(address, request_, status, why):
    found, body, _ = speak(address, **request_)
    assert found == status and why in body


def test_requests_are_said_together_and_too_many_are_refused(address, synthesizer, monkeypatch):
    monkeypatch.setattr(synthesizer, "delay", 0.5)
    synthesizer.calls = []
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda number: speak(address, text=f"Number {number}."), range(12)))
    codes = [status for status, _, _ in found]
    assert set(codes) == {200, 503} and codes.count(200) >= 5
    refused = next(answer for answer in found if answer[0] == 503)
    assert b"4 requests are waiting" in refused[1] and refused[2]["Retry-After"] == "1"
    assert max(synthesizer.calls) == 4 and sum(synthesizer.calls) == codes.count(200)
    statistics = json.loads(get(address, "/statistics"))
    assert statistics["refused"] == codes.count(503) and statistics["latency_p50_ms"] > 0


def test_a_request_is_given_up(address, synthesizer, monkeypatch):
    monkeypatch.setattr(synthesizer, "delay", 3.5)
    status, body, _ = speak(address, text="Too slow.")
    assert status == 504 and b"not said within 3 s" in body
    time.sleep(1)  # until the work that nobody waits for is done
    monkeypatch.setattr(synthesizer, "delay", 0.0)
    assert speak(address, text="Fine.")[0] == 200


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH")
@pytest.mark.parametrize(("text", "result"), [("Typed by a test.", "bytes"), ("?!", "refused")])
def test_the_page_speaks_what_one_types(address, tmp_path, text, result):
    """The page itself, with a script at its end that types and presses the button."""
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom --virtual-time-budget=20000"
    environment = {**os.environ, "HOME": str(tmp_path)}
    url = f"{address}/typed?{urllib.parse.urlencode({'text': text})}"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith(result), done.stderr[-2000:]
    if result == "bytes":
        (expected,) = [speak(address, text=text)[1]]
        assert title == f"bytes {len(expected)}"
    else:
        assert "nothing of" in title and 'class="error"' in done.stdout
