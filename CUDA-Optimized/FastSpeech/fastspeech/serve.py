"""A server that speaks: an HTTP endpoint with a page to try it, or a model of Triton Inference Server.

    ./dlx run FastSpeech serve -- --checkpoint runs/flite --port 8000
    curl -H 'content-type: application/json' -d '{"text": "Good morning."}' localhost:8000/speak -o said.wav
    curl -NH 'content-type: application/json' -d '{"text": "Good morning."}' localhost:8000/stream | aplay

POST /speak {"text", "speed"} gives a WAV file; POST /stream one that begins when its first piece is said. 400: what is
wrong with the text, 503: too many requests wait, 504: it took too long. GET / is the page, /health says what is served,
/statistics how many requests and how fast. With `--triton true` see `triton_server`.
"""

from __future__ import annotations

import asyncio
import io
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from dlx import config as configs
from dlx import dist
from dlx.batcher import Expired, QueueFull
from dlx.config import field

from .infer import VoiceOptions, build
from .options import CONFIGS
from .service import STREAM_CHUNK, Service
from .synthesis import SPEEDS, Speech, Synthesizer

PAGE = Path(__file__).with_name("page.html")
LONGEST = 5000  # characters of a request
WARM = "The server is ready to speak."
SERVICE = ("batch_size", "wait", "queue_size", "time_limit", "stream_chunk")


@dataclass
class ServeConfig(VoiceOptions):
    """Serve a voice over HTTP, or by Triton Inference Server."""

    host: str = field("127.0.0.1", help="address that is listened on; 0.0.0.0: all")
    port: int = field(8000, help="of the endpoint; 0: any that is free", ge=0, le=65535)
    wait: float = field(0.005, help="seconds that a request waits for others to be said with it", ge=0)
    queue_size: int = field(64, help="pieces of texts that wait at most; requests beyond are refused", ge=1)
    time_limit: float = field(30.0, help="seconds after which a request is given up", gt=0)
    stream_chunk: int = field(STREAM_CHUNK, help="longest piece of a stream, in characters", ge=2)
    triton: bool = field(False, help="serve by Triton Inference Server (package nvidia-pytriton) instead of HTTP pages")


class Request(BaseModel):
    """What is to be said."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=LONGEST)
    speed: float = Field(1.0, ge=SPEEDS[0], le=SPEEDS[1], allow_inf_nan=False)


def wav(speech: Speech) -> bytes:
    """A WAV file of 16 bits; sound above full scale is made quieter as a whole."""
    peak = max(1.0, float(np.abs(speech.audio).max(initial=0.0)))
    stream = io.BytesIO()
    soundfile.write(stream, speech.audio / peak, speech.sample_rate, format="WAV", subtype="PCM_16")
    return stream.getvalue()


def endless_header(sample_rate: int) -> bytes:
    """The head of a WAV file of 16 bits whose length is not known yet: the largest."""
    most = 0xFFFFFFFF
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", most, b"WAVE") + form + struct.pack("<4sI", b"data", most)


def samples(audio: np.ndarray) -> bytes:
    """16-bit samples, those above full scale cut: what is still to come is not known."""
    return np.rint(np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes()


@contextmanager
def _answers(time_limit: float) -> Iterator[None]:
    """What went wrong as HTTP says it."""
    try:
        yield
    except QueueFull as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
    except Expired:
        raise HTTPException(504, f"not said within {time_limit:g} s") from None
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def application(synthesizer: Synthesizer, *, time_limit: float = 30.0, **options: Any) -> FastAPI:
    """The server of a voice; its options are those of `Service`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Service(synthesizer, time_limit=time_limit, **options) as app.state.service:
            yield

    app = FastAPI(title="FastSpeech", lifespan=lifespan)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Any, error: RequestValidationError) -> Response:
        """Without the values, which JSON may not be able to say."""
        return JSONResponse(
            {"detail": [{key: one[key] for key in ("loc", "msg", "type")} for one in error.errors()]}, 422
        )

    @app.post("/speak", response_class=Response)
    async def speak(request: Request) -> Response:
        with _answers(time_limit):
            speech = await app.state.service.say(request.text, request.speed)
        sound = await asyncio.to_thread(wav, speech)
        return Response(sound, media_type="audio/wav", headers={"X-Seconds": f"{speech.seconds:.3f}"})

    @app.post("/stream", response_class=Response)
    async def stream(request: Request) -> Response:
        pieces = app.state.service.stream(request.text, request.speed)
        with _answers(time_limit):
            first = await anext(pieces)

        async def sound() -> AsyncIterator[bytes]:
            try:
                yield endless_header(first.sample_rate) + samples(first.audio)
                async for piece in pieces:
                    yield samples(np.concatenate([synthesizer.silence(), piece.audio]))
            finally:
                await pieces.aclose()

        return StreamingResponse(sound(), media_type="audio/wav")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        voice = synthesizer.voice
        return {"arch": voice.arch, "voice": voice.source, "sample_rate": voice.mel.sample_rate}

    @app.get("/statistics")
    async def statistics() -> dict[str, Any]:
        return app.state.service.statistics()

    return app


def warm_up(synthesizer: Synthesizer) -> None:
    """Say what the first requests would wait for: kernels and memory; on a GPU, graphs of the usual sizes."""
    synthesizer([WARM])
    if synthesizer.device.type != "cuda":
        return
    batches = {2**power for power in range(synthesizer.batch_size.bit_length())} | {synthesizer.batch_size}
    for words in (2, 6, 12, 24):
        for batch in sorted(batches):
            for _ in range(2):  # a shape that comes again is captured
                synthesizer(["all of them " * (words // 2)] * batch)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; ValueError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as error:
        server.close()
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    return server


def main(args: list[str] | None = None) -> None:
    import uvicorn

    config = configs.parse(ServeConfig, args, configs_dir=CONFIGS, prog="serve")
    with dist.init(config.device) as world:
        world.require_alone("serve")
        if config.triton:
            from . import triton_server

            triton_server.run(config, world.device)
            return
        server = listen(config.host, config.port)
        synthesizer = build(config, world.device)
        warm_up(synthesizer)
        app = application(synthesizer, **{name: getattr(config, name) for name in SERVICE})
        shown = f"[{config.host}]" if ":" in config.host else config.host
        print(f"http://{shown}:{server.getsockname()[1]} speaks what one types; Ctrl-C ends it", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[server])


if __name__ == "__main__":
    main()
