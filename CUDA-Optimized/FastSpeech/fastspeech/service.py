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
from contextlib import aclosing
from typing import Any

import numpy as np

from dlx.batcher import RECENT, Batcher, Expired, QueueFull

from .synthesis import Job, Speech, Synthesizer

STREAM_CHUNK = 80  # characters of a streamed piece: the shorter, the sooner the first is heard
PATIENCE = 0.01  # seconds until a full queue is looked at again


class Service:
    """`batch_size` pieces of texts go together, the first waiting `wait` seconds for others; `queue_size` wait at most,
    each no longer than `time_limit` seconds. `stream_chunk`: characters of the pieces of a stream.

    A long text takes its turn piece by piece, `batch_size` of them at a time, so that a short one, and the beginning of
    a stream, is not held up by it.
    """

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
        self._seconds: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in ("latency", "first_sound")}
        self._counts = {"texts": 0, "streams": 0}

    async def say(self, text: str, speed: float = 1.0) -> Speech:
        """The whole text. ValueError for what cannot be said, QueueFull, or Expired after the time limit."""
        began = time.perf_counter()
        parts = await asyncio.to_thread(self.synthesizer.parts, text, speed)
        try:
            async with asyncio.timeout(self.time_limit), aclosing(self._said(parts, self.batcher.batch_size)) as said:
                speeches = [speech async for speech in said]
        except TimeoutError:
            raise Expired(f"not said within {self.time_limit:g} s") from None
        self._count("texts", "latency", began)
        return self.synthesizer.joined(text, speeches)

    async def stream(self, text: str, speed: float = 1.0) -> AsyncGenerator[Speech]:
        """The pieces of a text as soon as each is said, while the next one is; errors as of `say`, those of a text and
        of a full queue before the first piece. A queue that is full later on is waited for."""
        began = time.perf_counter()
        parts = await asyncio.to_thread(self.synthesizer.parts, text, speed, self.stream_chunk)
        async with aclosing(self._said(parts, 1)) as said:
            first = True
            async for speech in said:
                if first:
                    self._count("streams", "first_sound", began)
                first = False
                yield speech

    async def _said(self, parts: list[Job], window: int) -> AsyncGenerator[Speech]:
        """Each part in its order; up to ``window`` are asked for at a time, the first alone if that is 1."""
        todo = deque(parts[1:])
        coming = deque([self.batcher.submit(parts[0])])

        async def ask() -> None:
            while todo and len(coming) < window and not (coming and self.batcher.full()):
                coming.append(await self._submit(todo.popleft()))

        try:
            await ask()
            while coming:
                speech = await self._result(coming[0])
                coming.popleft()
                await ask()
                yield speech
        finally:
            for future in coming:  # of a caller that has gone, or of a text of which a part failed
                future.cancel()

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

    def _count(self, what: str, times: str, began: float) -> None:
        self._counts[what] += 1
        self._seconds[times].append(time.perf_counter() - began)

    def statistics(self) -> dict[str, Any]:
        """Those of the batcher, which count pieces; whole texts and streams begun, with percentiles of the milliseconds
        that the former took and of those until the first sound of the latter."""
        found: dict[str, Any] = self.batcher.statistics() | self._counts
        for name, seconds in self._seconds.items():
            for percent in (50, 90, 99):
                value = 1000 * float(np.percentile(seconds, percent)) if seconds else None
                found[f"{name}_p{percent}_ms"] = value
        return found

    async def close(self) -> None:
        """Finish what was asked for, and stop."""
        await asyncio.to_thread(self.batcher.close)

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
