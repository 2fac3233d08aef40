"""A server that speaks: an HTTP endpoint, and a page to try it.

    ./dlx run FastSpeech serve -- --checkpoint runs/flite --port 8000
    curl -H 'content-type: application/json' -d '{"text": "Good morning."}' localhost:8000/speak -o said.wav

POST /speak {"text", "speed"} gives a WAV file; 400: what is wrong with the text, 503: too many requests wait, 504: it
took too long. GET / is the page, /health says what is served, /statistics how many requests and how fast.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from dlx import config as configs
from dlx import dist
from dlx.batcher import Batcher, Expired, QueueFull
from dlx.config import field

from .infer import VoiceOptions, build
from .options import CONFIGS
from .synthesis import SPEEDS, Speech, Synthesizer

PAGE = Path(__file__).with_name("page.html")
LONGEST = 5000  # characters of a request
WARM = "The server is ready to speak."


@dataclass
class ServeConfig(VoiceOptions):
    """Serve a voice over HTTP."""

    host: str = field("127.0.0.1", help="address that is listened on; 0.0.0.0: all")
    port: int = field(8000, help="of the endpoint", ge=0, le=65535)
    wait: float = field(0.005, help="seconds that a request waits for others to be said with it", ge=0)
    queue_size: int = field(64, help="requests that wait at most; more are refused", ge=1)
    time_limit: float = field(30.0, help="seconds after which a request is given up", gt=0)


class Request(BaseModel):
    """What is to be said."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=LONGEST)
    speed: float = Field(1.0, ge=SPEEDS[0], le=SPEEDS[1])


def wav(speech: Speech) -> bytes:
    """A WAV file of 16 bits; sound above full scale is made quieter as a whole."""
    peak = max(1.0, float(np.abs(speech.audio).max(initial=0.0)))
    stream = io.BytesIO()
    soundfile.write(stream, speech.audio / peak, speech.sample_rate, format="WAV", subtype="PCM_16")
    return stream.getvalue()


def application(
    synthesizer: Synthesizer,
    *,
    batch_size: int = 8,
    wait: float = 0.005,
    queue_size: int = 64,
    time_limit: float = 30.0,
) -> FastAPI:
    """The server of a voice; its options are those of `ServeConfig`."""

    def say(requests: list[Request]) -> list[Speech]:
        return synthesizer([item.text for item in requests], speed=[item.speed for item in requests])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher = Batcher(say, batch_size=batch_size, wait=wait, queue_size=queue_size, time_limit=time_limit)
        app.state.batcher = batcher
        try:
            yield
        finally:
            await asyncio.to_thread(batcher.close)

    app = FastAPI(title="FastSpeech", lifespan=lifespan)

    @app.post("/speak", response_class=Response)
    async def speak(request: Request) -> Response:
        try:
            future = asyncio.wrap_future(app.state.batcher.submit(request))
            speech = await asyncio.wait_for(future, time_limit)
        except QueueFull as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
        except (Expired, TimeoutError):
            raise HTTPException(504, f"not said within {time_limit:g} s") from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        sound = await asyncio.to_thread(wav, speech)
        return Response(sound, media_type="audio/wav", headers={"X-Seconds": f"{speech.seconds:.3f}"})

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        voice = synthesizer.voice
        return {"arch": voice.arch, "voice": voice.source, "sample_rate": voice.mel.sample_rate}

    @app.get("/statistics")
    async def statistics() -> dict[str, Any]:
        return app.state.batcher.statistics()

    return app


def main(args: list[str] | None = None) -> None:
    import uvicorn

    config = configs.parse(ServeConfig, args, configs_dir=CONFIGS, prog="serve")
    with dist.init(config.device) as world:
        world.require_alone("serve")
        synthesizer = build(config, world.device)
        synthesizer([WARM])  # what the first request would wait for: kernels, memory
        names = ("batch_size", "wait", "queue_size", "time_limit")
        app = application(synthesizer, **{name: getattr(config, name) for name in names})
        uvicorn.run(app, host=config.host, port=config.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
