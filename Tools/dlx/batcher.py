"""Requests of many callers, worked on together: a bounded queue, batches that wait but shortly, time limits.

    with Batcher(work, batch_size=8) as batcher:         # work(list of items) -> list of results
        batcher.submit(item).result()

One thread does the work, so that a model needs no lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
RECENT = 1000  # requests whose latencies are remembered


class QueueFull(RuntimeError):
    """There are more requests than can wait: try again later."""


class Expired(TimeoutError):
    """A request waited longer than its time limit before its turn came."""


@dataclass
class _Job(Generic[Item, Result]):
    item: Item
    future: Future[Result] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)


class Batcher(Generic[Item, Result]):
    """`batch_size` items at most go together; the first of them waits `wait` seconds for others, if it must.

    `queue_size` items wait at most, each no longer than `time_limit` seconds. An error of a batch falls on the items
    that cause it: after a ValueError each is tried alone.
    """

    def __init__(
        self,
        work: Callable[[list[Item]], Sequence[Result]],
        *,
        batch_size: int = 8,
        wait: float = 0.005,
        queue_size: int = 64,
        time_limit: float = 30.0,
    ) -> None:
        if batch_size < 1 or queue_size < 1 or wait < 0 or time_limit <= 0:
            raise ValueError(
                f"need batch_size >= 1, queue_size >= 1, wait >= 0, time_limit > 0; "
                f"got {batch_size}, {queue_size}, {wait}, {time_limit}"
            )
        self.work, self.batch_size, self.wait, self.time_limit = work, batch_size, wait, time_limit
        self._queue: queue.Queue[_Job[Item, Result] | None] = queue.Queue(queue_size)
        self._counts = {"served": 0, "failed": 0, "refused": 0, "expired": 0, "batches": 0}
        self._latencies: deque[float] = deque(maxlen=RECENT)
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> Future[Result]:
        """The item's result to come, or Expired. A cancelled one is not worked on. QueueFull when too many wait."""
        job: _Job[Item, Result] = _Job(item)
        with self._lock:
            if not self._open:
                raise RuntimeError("the batcher is closed")
            try:
                self._queue.put_nowait(job)
            except queue.Full:
                self._counts["refused"] += 1
                raise QueueFull(f"{self._queue.maxsize} requests are waiting already") from None
        return job.future

    def full(self) -> bool:
        """Whether `submit` would refuse now; for callers who can wait, who are not counted as refused."""
        return self._queue.full()

    def statistics(self) -> dict[str, Any]:
        """Counts, requests that wait, items per batch, and percentiles of recent latencies in milliseconds."""
        with self._lock:
            latencies = sorted(self._latencies)
            found: dict[str, Any] = dict(self._counts)
        done = found["served"] + found["failed"]
        found["waiting"] = self._queue.qsize()
        found["mean_batch"] = done / found["batches"] if found["batches"] else 0.0
        for percent in (50, 90, 99):
            place = min(len(latencies) * percent // 100, len(latencies) - 1)
            found[f"latency_p{percent}_ms"] = 1000 * latencies[place] if latencies else None
        return found

    def close(self) -> None:
        """Finish what was submitted, and stop."""
        with self._lock:
            already, self._open = not self._open, False
        if not already:
            self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> Batcher[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        going = True
        while going:
            first = self._queue.get()
            if first is None:
                return
            jobs, going = self._gather(first)
            self._serve(jobs)

    def _gather(self, first: _Job[Item, Result]) -> tuple[list[_Job[Item, Result]], bool]:
        """A batch that begins with `first`; False when the queue has ended."""
        jobs, until = [first], time.perf_counter() + self.wait
        while len(jobs) < self.batch_size:
            try:
                job = self._queue.get(timeout=max(until - time.perf_counter(), 0))
            except queue.Empty:
                break
            if job is None:
                return jobs, False
            jobs.append(job)
        return jobs, True

    def _serve(self, jobs: list[_Job[Item, Result]]) -> None:
        now = time.perf_counter()
        wanted = []
        for job in jobs:
            if not job.future.set_running_or_notify_cancel():
                continue
            if now - job.arrived > self.time_limit:
                self._count("expired")
                job.future.set_exception(Expired(f"not begun within {self.time_limit:g} s"))
            else:
                wanted.append(job)
        if wanted:
            self._work(wanted)

    def _work(self, jobs: list[_Job[Item, Result]]) -> None:
        self._count("batches")
        try:
            results = self.work([job.item for job in jobs])
            if len(results) != len(jobs):
                raise RuntimeError(f"{len(jobs)} items came back as {len(results)} results")
        except Exception as error:
            if isinstance(error, ValueError) and len(jobs) > 1:
                for job in jobs:
                    self._work([job])
                return
            for job in jobs:
                self._count("failed")
                job.future.set_exception(error)
            return
        now = time.perf_counter()
        for job, result in zip(jobs, results, strict=True):
            self._count("served", now - job.arrived)
            job.future.set_result(result)

    def _count(self, name: str, latency: float | None = None) -> None:
        with self._lock:
            self._counts[name] += 1
            if latency is not None:
                self._latencies.append(latency)
