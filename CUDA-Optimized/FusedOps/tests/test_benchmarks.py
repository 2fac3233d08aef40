"""The measurements work (on any device, in seconds); what they measure is looked at on a GPU, not here."""

from __future__ import annotations

import pytest

from dlx import record
from fusedops_benchmarks import run


@pytest.mark.parametrize("name", run.modules())
def test_a_quick_run_writes_record_and_picture(tmp_path, name):
    path = run.main(["--quick", "--device", "cpu", "--ops", name, "--output", str(tmp_path)])
    result = record.load(path)
    rows = result.fields["attachments"]["rows"]
    assert rows and all(row["ms"] > 0 for row in rows)
    assert {row["program"] for row in rows} >= {"fusedops"}
    assert result.value("copy_rate") > 0
    assert path.with_suffix(".png").stat().st_size > 1000
