"""Requests worked on together: batches form, the queue is bounded, faults fall on those who cause them."""

import threading
import time

import pytest

from dlx.batcher import Batcher, Expired, QueueFull


def doubled(items):
    if "bad" in items:
        raise ValueError("bad item")
    return [2 * item for item in items]


class Gate:
    """Work that begins when it is let; remembers its batches."""

    def __init__(self):
        self.begun, self.free, self.batches = threading.Event(), threading.Event(), []

    def __call__(self, items):
        self.batches.append(list(items))
        self.begun.set()
        assert self.free.wait(20)
        return doubled(items)


def test_waiting_requests_form_batches_in_their_order():
    gate = Gate()
    with Batcher(gate, batch_size=4, wait=0) as batcher:
        first = batcher.submit(0)
        assert gate.begun.wait(20)
        others = [batcher.submit(number) for number in range(1, 7)]
        gate.free.set()
        assert [future.result(20) for future in (first, *others)] == [0, 2, 4, 6, 8, 10, 12]
        found = batcher.statistics()
    assert gate.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert found["served"] == 7 and found["batches"] == 3 and found["mean_batch"] == pytest.approx(7 / 3)
    assert 0 < found["latency_p50_ms"] <= found["latency_p99_ms"]


def test_a_batch_waits_for_company():
    batches = []

    def work(items):
        batches.append(len(items))
        return items

    with Batcher(work, batch_size=2, wait=20) as batcher:
        started = time.perf_counter()
        one = batcher.submit(1)
        time.sleep(0.05)
        two = batcher.submit(2)
        assert one.result(10) == 1 and two.result(10) == 2 and time.perf_counter() - started < 10
    assert batches == [2]


def test_the_queue_is_bounded_and_time_is_limited():
    gate = Gate()
    with Batcher(gate, batch_size=1, wait=0, queue_size=2, time_limit=0.05) as batcher:
        running = batcher.submit(1)
        assert gate.begun.wait(20)
        late = batcher.submit(2)
        assert not batcher.full()
        cancelled = batcher.submit(3)
        assert batcher.full()
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            batcher.submit(4)
        assert cancelled.cancel()
        time.sleep(0.1)
        gate.free.set()
        assert running.result(20) == 2
        with pytest.raises(Expired, match=r"0\.05 s"):
            late.result(20)
        found = batcher.statistics()
    assert gate.batches == [[1]] and found["refused"] == found["expired"] == 1


def test_a_bad_request_fails_alone():
    gate = Gate()
    gate.free.set()
    with Batcher(gate, batch_size=8, wait=0.3) as batcher:
        futures = [batcher.submit(item) for item in (1, "bad", 3)]
        assert futures[0].result(20) == 2 and futures[2].result(20) == 6
        with pytest.raises(ValueError, match="bad item"):
            futures[1].result(20)
        assert batcher.submit(5).result(20) == 10  # and the thread lives on
        assert batcher.statistics()["failed"] == 1


def test_closing_finishes_what_was_submitted():
    batcher = Batcher(doubled, batch_size=2)
    futures = [batcher.submit(number) for number in range(5)]
    batcher.close()
    batcher.close()
    assert [future.result(0) for future in futures] == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(1)
    with pytest.raises(ValueError, match="queue_size >= 1"):
        Batcher(doubled, queue_size=0)
