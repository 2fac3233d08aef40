"""The demonstration runs to its report, in a process of its own: it chooses Triton's interpreter itself."""

from __future__ import annotations

import os
import subprocess
import sys

from dlx import record


def test_quickstart_writes_a_report(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fusedops_benchmarks.quickstart", "--steps", "4"]
    command += ["--output_dir", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = record.load(tmp_path)
    assert result.fields["status"] == "finished" and result.value("error.layer_norm") < 1e-5
    assert (tmp_path / "report.html").stat().st_size > 10_000
