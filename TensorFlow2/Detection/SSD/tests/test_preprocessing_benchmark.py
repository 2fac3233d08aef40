"""The benchmark of the steps, on pictures of 16 x 16 and for as short as it goes."""

from __future__ import annotations

import numpy as np
import pytest

from dlx.record import load
from tf_ssd.preprocessing import benchmark, fields


def test_one_comparison_is_measured_and_compared():
    """Without `main`, which sets the number of threads for the whole process."""
    names = ["horizontal flip", "noise"]
    config = benchmark.BenchmarkConfig(image_size=16, batch_size=2, iterations=2, warmup=1, pairs=1, steps=names)
    flip, noise = benchmark.measure(config)
    assert flip["steps"] == ["random_horizontal_flip"] and flip["layers"] == ["RandomFlip"]
    best = max(flip["keras_pictures"], flip["keras_batches"])
    assert flip["ours"] > 0 and flip["ours_over_keras"] == flip["ours"] / best
    assert len(flip["programs"]) == 3 and "layers" not in noise
    config.steps = ["flop"]
    with pytest.raises(ValueError, match=r"unknown steps \['flop'\]; known: horizontal flip"):
        benchmark.measure(config)


def test_every_comparison_gives_batches_of_the_same_shape():
    config = benchmark.BenchmarkConfig(image_size=16, batch_size=2)
    data = benchmark.examples(config)
    for item in benchmark.comparisons(16):
        batch = benchmark.ours(item, config, data)()
        assert batch.shape[0] == 2 and batch.shape[3] == 3 and np.isfinite(batch).all()
        if item.layers is not None:
            assert benchmark.peer(item, config, data, whole=False)().shape == batch.shape
    assert data[fields.IMAGE].shape == (2, 16, 16, 3)


def test_the_committed_record_is_whole():
    """The README's table is made from it: every comparison is there, once."""
    rows = load(benchmark.RECORD).fields["attachments"]["rows"]
    assert [row["name"] for row in rows] == [item.name for item in benchmark.comparisons(320)]
