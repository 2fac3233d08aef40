"""The benchmark verb at small sizes on a CPU: rows, checks against the float32 program, refusals."""

from __future__ import annotations

import json

import pytest

from dlx.speech.vocoder import HifiGan, HifiGanConfig
from fastspeech import benchmark, registry, serving_benchmark, stages
from fastspeech.model import FastSpeechConfig
from fastspeech.registry import Architecture

SMALL = "--warmup 1 --iterations 2 --pairs 1 --frames 23 --text_length 9 --precision fp32 --device cpu".split()
TINY = FastSpeechConfig(channels=64, feed_forward=48, heads=1, encoder_blocks=1, decoder_blocks=1, predictor=128)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(registry.ARCHITECTURES, "tiny", Architecture(TINY, 0))


def rows_of(tmp_path, *words: str) -> list[dict]:
    output = tmp_path / "bench" / "record.json"
    benchmark.main([*SMALL, "--arch", "tiny", *words, "--output", str(output)])
    return json.loads(output.read_text())["attachments"]["rows"]


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_speaking(tmp_path, mode):
    words = ["--mode", mode, "--batch_sizes", "[1, 2]", "--forms", "[kernels, graph_library, plain]"]
    rows = rows_of(tmp_path, *words, "--peers", "[plain]")
    assert [row["program"] for row in rows] == ["plain", "kernels", "graph_library"] * 2
    for row in rows:
        if row["program"] != "plain":
            assert "needs a CUDA device" in row["skipped"]
        else:
            assert row["throughput"] > 0 and row["items"] == 23 * row["batch_size"] and row["mode"] == mode
            assert row["largest_difference"] <= 1e-5 * row["size"] and row["unit"] == "mel frames/s"


def test_half_precision_differs_from_float32_by_its_rounding(tmp_path):
    (row,) = rows_of(tmp_path, "--precision", "bf16")
    assert 0 < row["largest_difference"] < 0.2 * row["size"]


def test_stages(tmp_path):
    rows = rows_of(tmp_path, "--mode", "stages")
    assert {row["program"] for row in rows} == {"plain"} and len(rows) == 15
    assert sum(row["per_call"] for row in rows) == 5 * TINY.encoder_blocks + 5 * TINY.decoder_blocks + 4
    for row in rows:
        assert row["floor_microseconds"] > 0 and row["of_floor"] == pytest.approx(
            row["floor_microseconds"] / row["microseconds"]
        )
        assert row["floor_microseconds"] == pytest.approx(
            max(
                row["gigabytes_per_second"] * row["microseconds"] / row["ceiling_gigabytes_per_second"],
                row["teraflops"] * row["microseconds"] / row["ceiling_teraflops"],
            )
        )
    summary = stages.roofline(
        [row | {"program": "kernel", "microseconds": row["microseconds"] / 2} for row in rows] + rows
    )
    assert [row["stage"] for row in summary] == [row["stage"] for row in rows]
    assert all(row["program"] == "kernel" and row["plain_over_this"] == pytest.approx(2) for row in summary)
    first = next(row for row in rows if row["stage"] == "mel first convolution + relu")
    flops = first["teraflops"] * 1e12 * first["microseconds"] * 1e-6
    assert flops == pytest.approx(2 * 23 * 64 * 48 * 3)


def test_pipeline(tmp_path):
    (row,) = rows_of(tmp_path, "--mode", "pipeline")
    assert row["program"] == "plain" and row["items"] == 23 * 256 and row["real_time_factor"] > 0


def test_vocoder(tmp_path):
    rows = rows_of(tmp_path, "--mode", "vocoder", "--precision", "bf16", "--frames", "5")
    steps = ["weight norm, fp32", "folded", "+ bfloat16", "+ channels last"]
    assert [row["program"] for row in rows if "skipped" not in row] == steps
    assert [row["program"] for row in rows[4:]] == ["+ CUDA graph", "fused kernels", "fused kernels + CUDA graph"]
    for row in rows[:4]:
        assert row["items"] == 5 * 256 and row["mean_difference"] <= (0.03 if "+" in row["program"] else 1e-5)
        assert row["ours_over_this"] > 0 and row["real_time_factor"] > 0
    assert all("CUDA device" in row["skipped"] for row in rows[4:])


def test_serving(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_benchmark, "HifiGan", lambda: HifiGan(HifiGanConfig(channels=16)))
    words = ["--mode", "serving", "--batch_sizes", "[1, 3]", "--frames", "9"]
    rows = rows_of(tmp_path, *words)
    assert [(row["callers"], row["program"]) for row in rows] == [
        (callers, program) for callers in (1, 3) for program in ("whole", "stream")
    ]
    for row in rows:
        assert row["requests"] == 2 * row["callers"] and row["audio_seconds_per_second"] > 0
        assert 0 < row["first_sound_p50_ms"] <= row["latency_p50_ms"] <= row["latency_p99_ms"]
        most = row["callers"] if row["program"] == "stream" else 8  # a whole text asks for its pieces together
        assert 1 <= row["mean_batch"] <= most and row["form"] == "plain"


def test_training(tmp_path):
    rows = rows_of(tmp_path, "--mode", "training", "--batch_sizes", "[2]", "--peers", "[plain]")
    assert [row["program"] for row in rows] == ["ours", "plain"]
    assert all(row["items"] == 2 * 23 and row["unit"] == "mel frames/s" for row in rows)


def test_refusals():
    with pytest.raises(ValueError, match="unknown peer 'apex'"):
        benchmark.BenchmarkConfig(peers=["apex"])
    with pytest.raises(ValueError, match="unknown form 'fast'"):
        benchmark.BenchmarkConfig(forms=["fast"])
    with pytest.raises(ValueError, match="one of training, not of latency"):
        benchmark.BenchmarkConfig(peers=["graph_compiled"])
    with pytest.raises(ValueError, match="less than iterations"):
        benchmark.BenchmarkConfig(warmup=9, iterations=9)
