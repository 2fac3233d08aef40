"""The kernels move 16 bytes at once: seen in the code that Triton makes for a GPU, which needs none to be made."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADS = {
    "scale": 1, "axpby": 2, "squares": 1, "clip": 1, "adam": 4, "adam remainder": 5, "sgd": 3, "adagrad": 3,
    "lamb": 7, "novograd": 3, "larc": 2,
}  # fmt: skip
STORES = {
    "scale": 1, "axpby": 1, "squares": 0, "clip": 1, "adam": 3, "adam remainder": 4, "sgd": 2, "adagrad": 2,
    "lamb": 3, "novograd": 2, "larc": 1,
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_accesses_of_16_bytes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("vectorised_worker.py")
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found) == set(LOADS)
    for name, kinds in found.items():
        for what, least in (("ld", LOADS[name]), ("st", STORES[name])):  # whatever they tell the caches
            wide = sum(n for kind, n in kinds.items() if kind.startswith(what) and kind.endswith(".v4.b32"))
            assert wide >= least, (name, kinds)
