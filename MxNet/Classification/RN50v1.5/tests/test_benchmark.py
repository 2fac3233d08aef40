"""The sweep's arithmetic, and one sweep of real runs."""

import argparse
import json

import numpy as np
import pytest

from dlx import record
from rn50_mxnet import benchmark


def test_the_mean_is_that_of_all_images_over_all_time():
    seconds = np.array([0.1, 0.2, 0.4])
    row = benchmark.summarize((8 / seconds).tolist(), 8)
    assert row["images_per_second"] == pytest.approx(24 / seconds.sum())
    assert row["p50_ms"] == pytest.approx(200) and row["p90_ms"] == pytest.approx(np.percentile(seconds, 90) * 1e3)
    with pytest.raises(ValueError, match="no iteration is left"):
        benchmark.summarize([], 8)


def test_warm_up_of_every_epoch_is_left_out():
    entries = [
        {"type": "LOG", "step": [epoch, i], "data": {"train.ips": 10 * epoch + i}} for epoch in (0, 1) for i in range(4)
    ]
    entries += [
        {"type": "LOG", "step": "PARAMETER", "data": {"train.ips": 1}},
        {"type": "METADATA", "metric": "train.ips"},
    ]
    assert benchmark.counted(entries, "train.ips", 2) == [2, 3, 12, 13]


def test_lists_of_numbers():
    assert benchmark.numbers("1,4,8") == [1, 4, 8]
    for text in ("1,,2", "a", "0", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}'"):
            benchmark.numbers(text)


@pytest.mark.parametrize("mode", ["train", "pred"])
def test_a_sweep_writes_one_record(tmp_path, mode):
    output = tmp_path / "sweep.json"
    words = ["-n", "1", "-b", "2,4", "-i", "3", "-e", "2", "-w", "1", "-o", str(output), "--mode", mode]
    benchmark.main([*words, "--", "--arch", "resnet8_small", "--num_classes", "10"])
    rows = record.load(output).fields["attachments"]["rows"]
    assert [(row["batch_size"], row["workers"], row["mode"]) for row in rows] == [(2, 1, mode), (4, 1, mode)]
    assert all(row["iterations"] == (4 if mode == "train" else 2) for row in rows)
    assert all(0 < row["p50_ms"] <= row["p99_ms"] and row["images_per_second"] > 0 for row in rows)
    assert json.loads(output.read_text())["metrics"]["throughput.best"]["value"] == max(
        r["images_per_second"] for r in rows
    )


def test_a_point_that_fails_ends_the_sweep(tmp_path):
    with pytest.raises(ValueError, match="1 workers, batch 2: .*"):
        benchmark.main(["-b", "2", "-o", str(tmp_path / "x.json"), "--", "--arch", "resnet9"])
    with pytest.raises(SystemExit):
        benchmark.main(["-i", "5", "-w", "5"])


@pytest.mark.parametrize(("option", "value"), [("-w", "-1"), ("-e", "0"), ("-i", "x")])
def test_counts_out_of_range_are_refused(option, value, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([option, value])
    assert f"{value!r} is not a whole number of at least" in capsys.readouterr().err
