"""The benchmark runs on a CPU and its records say what was measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from se3_transformer import benchmark

SMALL = ["--device", "cpu", "--precision", "fp32", "--warmup", "1", "--iterations", "2", "--pairs", "1"]
SMALL += ["--num_layers", "1", "--num_degrees", "2", "--num_channels", "16"]


def test_synthetic_molecules_have_the_mean_size_of_qm9():
    molecules = benchmark.synthetic_molecules(3)
    assert molecules.arrays["atoms"].tolist() == [18] * 3 and molecules.arrays["edges"].tolist() == [38] * 3


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_programs_side_by_side(tmp_path, mode):
    output = tmp_path / "record.json"
    arguments = ["--mode", mode, "--batch_sizes", "[2]", "--graphs", "[bonds, full]", "--output", str(output)]
    benchmark.main([*SMALL, *arguments])
    rows = json.loads(output.read_text())["attachments"]["rows"]
    assert [(row["program"], row["graph"]) for row in rows] == [
        ("ours", "bonds"), ("plain", "bonds"), ("ours", "full"), ("plain", "full"),
    ]  # fmt: skip
    assert all(row["molecules_per_ms"] == pytest.approx(row["throughput"] / 1000) for row in rows)
    assert rows[0]["over_baseline"] > 0 and rows[0]["batch_size"] == 2


def test_growth_with_the_number_of_edges(tmp_path):
    output = tmp_path / "record.json"
    sizes = ["--min_edges", "5", "--max_edges", "7", "--programs", "[plain]"]
    benchmark.main([*SMALL, "--mode", "scaling", *sizes, "--output", str(output)])
    rows = json.loads(output.read_text())["attachments"]["rows"]
    assert [row["edges"] for row in rows] == [32, 64, 128]
    for first, second in zip(rows, rows[1:], strict=False):
        assert second["exponent"] == pytest.approx(np.log2(second["p50_ms"] / first["p50_ms"]))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown program 'theirs'"):
        benchmark.BenchmarkConfig(programs=["theirs"])
    with pytest.raises(ValueError, match="bonds or full, got 'radius'"):
        benchmark.BenchmarkConfig(graphs=["radius"])
