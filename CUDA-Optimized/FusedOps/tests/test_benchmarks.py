"""The measurements work (on any device, in seconds); what they measure is looked at on a GPU, not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dlx import record
from fusedops.optim import LARC, SGD
from fusedops_benchmarks import bench_larc, run


@pytest.mark.parametrize("name", run.modules())
def test_a_quick_run_writes_record_and_picture(tmp_path, name):
    path = run.main(["--quick", "--device", "cpu", "--ops", name, "--output", str(tmp_path)])
    result = record.load(path)
    rows = result.fields["attachments"]["rows"]
    assert rows and all(row["ms"] > 0 for row in rows)
    assert {row["program"] for row in rows} >= {"fusedops"}
    assert result.value("copy_rate") > 0
    assert path == tmp_path / f"cpu-{name}-quick.json"
    assert path.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize("made_by, word", [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")])
def test_files_are_named_after_the_device(monkeypatch, made_by, word):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: made_by)
    device = torch.device("cuda")
    assert run.file_name(device, run.modules(), quick=False, graphs=True) == f"{word}-benchmark"
    assert run.file_name(device, ["xentropy", "norm"], quick=False, graphs=False) == f"{word}-norm-xentropy-launches"


def test_results_are_the_tasks_own(monkeypatch, tmp_path):
    """Without --output, wherever the command is given."""
    monkeypatch.setattr(run, "measure", lambda *_, **__: [])
    monkeypatch.setattr(run, "plot", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    folder = Path(run.__file__).parents[1] / "results"
    path = run.main(["--quick", "--device", "cpu", "--ops", "larc", "--name", "of-a-test"])
    try:
        assert path == folder / "of-a-test.json" and path.is_file()
    finally:
        path.unlink()


def test_a_case_that_cannot_run_leaves_its_reason(monkeypatch, tmp_path):
    def refuse(case, *_):
        if case.direction == "backward":
            raise torch.OutOfMemoryError("no room\nfor it")
        return [{"op": case.op, "direction": case.direction, "shape": case.shape, "dtype": case.dtype,
                 "program": "fusedops", "ms": 1.0, "speedup": None}]  # fmt: skip

    monkeypatch.setattr(run, "measure_case", refuse)
    run.main(["--quick", "--device", "cpu", "--ops", "glu", "--output", str(tmp_path), "--name", "x"])
    rows = json.loads((tmp_path / "x.json").read_text())["attachments"]["rows"]
    assert {row["direction"]: row.get("error") for row in rows} == {"forward": None, "backward": "no room"}


def test_where_results_cannot_be_written_runs_can(monkeypatch):
    assert run.default_output() == run.RESULTS
    monkeypatch.setattr("os.access", lambda *_: False)
    assert run.default_output() == Path("runs/fusedops_benchmark")


def test_larcs_peer_does_the_same():
    mine, theirs = (bench_larc.parameters([(5, 3), (7,)], torch.device("cpu")) for _ in range(2))
    for p, q in zip(mine, theirs, strict=True):
        q.data.copy_(p.data)
        q.grad.copy_(p.grad)
    optimizer, peer = LARC(SGD(mine, **bench_larc.SGD)), bench_larc.foreach_larc(theirs)
    for _ in range(3):
        for p, q in zip(mine, theirs, strict=True):
            q.grad.copy_(p.grad)
        optimizer.step()
        peer()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
