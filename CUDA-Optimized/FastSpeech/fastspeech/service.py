"""A voice that many callers share: texts said together in batches, long ones piece by piece, with limits.

    async with Service(synthesizer) as service:
        speech = await service.say("Good morning.")
        async for speech in service.stream("A long text. Its second sentence."): ...

Any event loop; the voice works in one thread of its own (`dlx.batcher`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

import numpy as np

from dlx.batcher import RECENT, Batcher, Expired, QueueFull

from .synthesis import Job, Speech, Synthesizer

STREAM_CHUNK = 80  # characters of a streamed piece: the shorter, the sooner the first is heard
PATIENCE = 0.01  # seconds until a full queue is looked at again


class Service:
    """`batch_size` texts or pieces go together, the first waiting `wait` seconds for others; `queue_size` wait at most,
    each no longer than `time_limit` seconds. `stream_chunk`: characters of the pieces of a stream."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        *,
        batch_size: int = 8,
        wait: float = 0.005,
        queue_size: int = 64,
        time_limit: float = 30.0,
        stream_chunk: int = STREAM_CHUNK,
    ) -> None:
        self.synthesizer, self.time_limit, self.stream_chunk = synthesizer, time_limit, stream_chunk
        limits = {"wait": wait, "queue_size": queue_size, "time_limit": time_limit}
        self.batcher: Batcher[Job, Speech] = Batcher(synthesizer.say, batch_size=batch_size, **limits)
        self._first_sounds: deque[float] = deque(maxlen=RECENT)
        self._streams = 0

    async def say(self, text: str, speed: float = 1.0) -> Speech:
        """The whole text. ValueError for what cannot be said, QueueFull, or Expired after the time limit."""
        job = await asyncio.to_thread(self.synthesizer.job, text, speed)
        return await self._result(self.batcher.submit(job))

    async def stream(self, text: str, speed: float = 1.0) -> AsyncGenerator[Speech]:
        """The pieces of a text as soon as each is said, while the next one is; errors as of `say`, those of a text and
        of a full queue before the first piece. A queue that is full later on is waited for."""
        began = time.perf_counter()
        parts = await asyncio.to_thread(self.synthesizer.parts, text, speed, self.stream_chunk)
        coming = self.batcher.submit(parts[0])
        try:
            for number in range(len(parts)):
                speech = await self._result(coming)
                if number == 0:
                    self._first_sounds.append(time.perf_counter() - began)
                    self._streams += 1
                if number + 1 < len(parts):
                    coming = await self._submit(parts[number + 1])
                yield speech
        finally:
            coming.cancel()  # of a caller that has gone

    async def _result(self, future: Future[Speech]) -> Speech:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.time_limit)
        except TimeoutError:
            raise Expired(f"not said within {self.time_limit:g} s") from None

    async def _submit(self, job: Job) -> Future[Speech]:
        until = time.perf_counter() + self.time_limit
        while True:
            if not self.batcher.full():
                try:
                    return self.batcher.submit(job)
                except QueueFull:  # another caller was quicker
                    pass
            if time.perf_counter() > until:
                raise Expired(f"the queue was full for {self.time_limit:g} s")
            await asyncio.sleep(PATIENCE)

    def statistics(self) -> dict[str, Any]:
        """Those of the batcher, the streams begun, and percentiles of milliseconds until their first sound."""
        times = 1000 * np.array(self._first_sounds)
        found = {
            f"first_sound_p{percent}_ms": float(np.percentile(times, percent)) if len(times) else None
            for percent in (50, 90, 99)
        }
        return self.batcher.statistics() | {"streams": self._streams} | found

    async def close(self) -> None:
        """Finish what was asked for, and stop."""
        await asyncio.to_thread(self.batcher.close)

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
