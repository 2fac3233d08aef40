"""MXNet takes half of the CPUs unless it is told; what it took is asked of the OpenMP library that it is linked to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rn50_mxnet import runner, threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity and /proc are Linux's")

ASK = """
import ctypes, mxnet
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
print(*{ctypes.CDLL(path).omp_get_max_threads() for path in loaded})
"""


def asked(first: str, **variables: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in (threads.VARIABLE, "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", first + ASK]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=True).stdout.strip()


def test_one_process_computes_on_every_core():
    assert asked("import rn50_mxnet") == str(threads.cores())
    assert asked("import rn50_mxnet", OMP_NUM_THREADS="3") == "3"  # the user's word counts


def test_hardware_threads_of_a_core_count_once(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text("0-63\n")
    assert threads.cores(tmp_path) == 1
    assert threads.cores(tmp_path / "nothing") == len(cpus)


@pytest.mark.parametrize("workers", [1, 2, 1000])
def test_workers_share_the_cores(monkeypatch, workers):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = runner.environment("worker", 1, workers, 1)["OMP_NUM_THREADS"]
    assert share == str(max(1, threads.cores() // workers))
