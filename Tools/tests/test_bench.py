"""dlx.bench: counts calls exactly, refuses warm-up that outweighs the measurement, and compares in turns."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dlx.bench
from dlx.bench import compare, measure


def test_measure_a_known_time():
    calls = []

    def work():
        calls.append(1)
        time.sleep(0.002)

    result = measure(work, warmup=2, iterations=10, items=4, unit="images/s", batch=4, shape=(4, 3))
    assert len(calls) == 12
    assert 2.0 <= result.p50_ms <= result.p90_ms <= result.p95_ms <= result.p99_ms < 500
    assert result.throughput == pytest.approx(4 * 10 / result.seconds) and result.throughput < 2000
    assert result.mean_ms == pytest.approx(result.seconds * 100)
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert (found["unit"], found["batch"], found["shape"], found["device"]) == ("images/s", 4, [4, 3], "cpu")
    assert found["versions"]["python"] and found["device_name"] and (found["warmup"], found["iterations"]) == (2, 10)
    assert "images/s" in str(result)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"warmup": 200, "iterations": 100}, "warmup 200 is not below iterations 100"),
        ({"warmup": 5, "iterations": 5}, "warmup 5 is not below iterations 5"),
        ({"warmup": 0}, "must be at least 1, got 0 and 50"),
        ({"iterations": 0}, "must be at least 1, got 10 and 0"),
        ({"items": 0}, "items must be above 0"),
        ({"unit": ""}, "unit must say"),
        ({"mode": "fast"}, "mode must be throughput or latency, got 'fast'"),
    ],
)
def test_errors_come_before_anything_runs(options, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        measure(lambda: calls.append(1), **options)
    with pytest.raises(ValueError, match=message):
        compare({"a": lambda: calls.append(1), "b": lambda: calls.append(1)}, **options)
    assert not calls


def test_compare_runs_in_turns():
    order = []

    def program(name, seconds):
        def work():
            order.append(name)
            time.sleep(seconds)

        return work

    result = compare({"ours": program("A", 0.001), "peer": program("B", 0.003)}, pairs=3, warmup=1, iterations=2)
    assert "".join(order) == "AB" + "AAABBB" * 3  # each turn begins with one call that does not count
    low, high = result.spread()
    assert len(result.ratios["ours"]) == 3 and low <= result.median() <= high and result.median() > 1.3
    assert result.baseline == "peer" and result.measurements["ours"].iterations == 6
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert found["ratio"]["ours"]["median"] == result.median() and set(found["measurements"]) == {"ours", "peer"}
    assert "ours / peer: median" in str(result)


def test_compare_needs_two():
    with pytest.raises(ValueError, match="two programs or more, got a"):
        compare({"a": lambda: None})
    with pytest.raises(ValueError, match="pairs must be at least 1"):
        compare({"a": lambda: None, "b": lambda: None}, pairs=0)


def test_works_without_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom dlx.bench import measure\n"
        "print(measure(lambda: None, warmup=1, iterations=5).iterations)"
    )
    path = os.pathsep.join([str(Path(dlx.bench.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "5\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_waits_for_the_gpu(mode):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    a = torch.randn(4096, 4096, device="cuda")
    result = measure(lambda: a @ a, warmup=3, iterations=10, items=2 * 4096**3, unit="flop/s", device="cuda", mode=mode)
    assert 1e12 < result.throughput < 1e15 and result.device == "cuda" and result.device_name
    assert result.p50_ms == pytest.approx(result.mean_ms, rel=0.5)
