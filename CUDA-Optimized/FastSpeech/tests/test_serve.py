"""The server over real sockets: sound, refusals, batches; and its page in a browser."""

import asyncio
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
# Chromium prints a page once it has loaded, which waits for a picture that comes when the script has done its work.
TYPING = """<img src="held"><script>addEventListener("DOMContentLoaded", async () => {
    const state = document.getElementById("state");
    document.getElementById("text").value = new URLSearchParams(location.search).get("text");
    document.getElementById("form").requestSubmit();
    for (let i = 0; i < 800 && !state.textContent.includes(" s of sound") && !state.className; i++)
        await new Promise(done => setTimeout(done, 25));
    const source = document.getElementById("sound").src;
    document.title = state.className ? "refused: " + state.textContent
        : "bytes " + (await (await fetch(source)).arrayBuffer()).byteLength;
    await fetch("done");
})</script></html>"""
TINY = FastSpeechConfig(channels=16, head_channels=8, feed_forward=16, encoder_blocks=1, decoder_blocks=1, predictor=8)


class Slow(Synthesizer):
    """Waits where a test says so; counts the texts of each call."""

    delay = 0.0

    def say(self, jobs):
        self.calls = [*getattr(self, "calls", []), len(jobs)]
        time.sleep(self.delay)
        return super().say(jobs)


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

    app = application(synthesizer, batch_size=4, wait=0.05, queue_size=4, time_limit=3, stream_chunk=40)
    page = next(route for route in app.routes if route.path == "/").endpoint

    @app.get("/typed", response_class=HTMLResponse)
    async def typed() -> str:
        app.state.done = asyncio.Event()
        return (await page()).replace("</html>", TYPING)

    @app.get("/held")
    async def held() -> None:
        await asyncio.wait_for(app.state.done.wait(), 60)

    @app.get("/done")
    async def done() -> None:
        app.state.done.set()

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


def speak(address, path="speak", /, **request):
    body = json.dumps(request).encode()
    asked = urllib.request.Request(f"{address}/{path}", body, {"content-type": "application/json"})
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
        ({"text": "a", "speed": float("nan")}, 422, b"finite number"),
        ({"text": "a", "sped": 1}, 422, b"Extra inputs"),
    ],
)
def test_what_cannot_be_said_is_refused(address, request_, status, why):
    for path in ("speak", "stream"):
        found, body, _ = speak(address, path, **request_)
        assert found == status and why in body
    assert json.loads(get(address, "/statistics"))["failed"] == 0  # none came as far as the voice


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


LONG = "One sentence is said. Then a second one. And a third, which is not short. At last the fourth."


def pcm(body):
    return np.frombuffer(body[44:], "<i2") / 32767


def test_a_long_text_is_heard_before_it_is_said(address, synthesizer, monkeypatch):
    monkeypatch.setattr(synthesizer, "delay", 0.25)
    began = time.perf_counter()
    body = json.dumps({"text": LONG}).encode()
    asked = urllib.request.Request(f"{address}/stream", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        head = answer.read1(1 << 20)
        first = time.perf_counter() - began
        whole = head + answer.read()
    total = time.perf_counter() - began
    assert total > 4 * 0.25 and first < 0.6 * total
    parts = [synthesizer.say([part])[0] for part in synthesizer.parts(LONG, chunk=40)]
    assert len(parts) == 4
    expected = np.concatenate([piece for part in parts for piece in (part.audio, synthesizer.silence())][:-1])
    assert whole[:4] == b"RIFF" and int.from_bytes(whole[24:28], "little") == 22050
    np.testing.assert_allclose(pcm(whole), np.clip(expected, -1, 1), atol=2e-3)
    statistics = json.loads(get(address, "/statistics"))
    assert statistics["streams"] >= 1 and 250 < statistics["first_sound_p50_ms"] < 3000


def test_streams_wait_for_a_full_queue_and_are_said_together(address, synthesizer, monkeypatch):
    """Six streams and a queue of four: their later pieces wait, and none is cut."""
    monkeypatch.setattr(synthesizer, "delay", 0.1)
    alone = pcm(speak(address, "stream", text=LONG)[1])
    synthesizer.calls = []
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: speak(address, "stream", text=LONG), range(6)))
    said = [pcm(body) for status, body, _ in found if status == 200]
    assert len(said) >= 4 and {status for status, _, _ in found} <= {200, 503}
    assert all(len(sound) == len(alone) for sound in said) and max(synthesizer.calls) >= 3
    for sound in said:
        np.testing.assert_allclose(sound, alone, atol=2e-3)


def test_a_long_text_lets_others_in(synthesizer, monkeypatch):
    """A stream is heard while a text of forty pieces that came before is still being said."""
    from fastspeech.service import Service

    monkeypatch.setattr(synthesizer, "delay", 0.1)
    text = LONG * 10

    async def both():
        async with Service(synthesizer, batch_size=4, queue_size=4, time_limit=120) as service:
            long = asyncio.create_task(service.say(text))
            while service.statistics()["batches"] < 1:
                await asyncio.sleep(0.01)
            heard = [speech async for speech in service.stream("Let me in.")]
            early = not long.done()
            return early, heard, await long, service.statistics()

    early, heard, found, statistics = asyncio.run(both())
    assert early and len(heard) == 1 and statistics["batches"] >= 10
    assert statistics["texts"] == statistics["streams"] == 1 and statistics["served"] == 41
    (expected,) = synthesizer([text])
    assert found.text == text and found.mel.shape == expected.mel.shape
    np.testing.assert_allclose(found.audio, expected.audio, atol=2e-3)


def test_a_caller_who_goes_leaves_no_work(address, synthesizer, monkeypatch):
    monkeypatch.setattr(synthesizer, "delay", 0.2)
    synthesizer.calls = []
    body = json.dumps({"text": LONG * 5}).encode()
    asked = urllib.request.Request(f"{address}/stream", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        answer.read1(1000)
    time.sleep(2)
    assert sum(synthesizer.calls) <= 6  # of twenty pieces


def test_threads_share_a_voice():
    """As a graph does, this engine writes every result where it wrote the one before."""

    class Shared:
        form = "graph"

        def __init__(self, model):
            self.model, self.mel = model, torch.zeros(1)

        def __call__(self, *inputs):
            found = self.model(*inputs)
            self.mel = self.mel if self.mel.numel() == 10**6 else torch.zeros(10**6)
            place = self.mel[: found.mel.numel()].view_as(found.mel)
            place.copy_(found.mel)
            time.sleep(0.02)
            return found._replace(mel=place)

    torch.manual_seed(0)
    model = FastSpeech(TINY).eval()
    with torch.no_grad():
        model.durations.output.bias.fill_(1.5)
    voice = Synthesizer(Found(model, "fastspeech", MelConfig(), FrontEnd(), "fresh"), GriffinLim(iterations=1))
    voice.engine = Shared(voice.engine.model)
    texts = [f"{'Many words ' * number}are said." for number in range(4)]
    alone = [voice([text])[0].mel for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = list(pool.map(lambda text: voice([text])[0].mel, texts))
            assert all(map(np.array_equal, together, alone))


def test_a_place_that_is_taken_is_said():
    from fastspeech.serve import listen

    with listen("127.0.0.1", 0) as server:
        server.listen()
        with pytest.raises(ValueError, match=f"port {server.getsockname()[1]}: Address already in use"):
            listen("127.0.0.1", server.getsockname()[1])


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH")
@pytest.mark.parametrize(("text", "result"), [("Typed by a test. And a second one.", "bytes"), ("?!", "refused")])
def test_the_page_speaks_what_one_types(address, tmp_path, text, result):
    """The page itself, with a script at its end that types and presses the button."""
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom"
    environment = {**os.environ, "HOME": str(tmp_path)}
    url = f"{address}/typed?{urllib.parse.urlencode({'text': text})}"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith(result), done.stderr[-2000:]
    if result == "bytes":
        assert title == f"bytes {len(speak(address, 'stream', text=text)[1])}"
        assert "the first of it after" in done.stdout
    else:
        assert "nothing of" in title and 'class="error"' in done.stdout
