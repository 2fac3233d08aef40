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
    "lamb": 5, "lamb, past the nearer cache": 2, "novograd": 3, "larc": 2,
}  # fmt: skip
STORES = {
    "scale": 1, "axpby": 1, "squares": 0, "clip": 1, "adam": 3, "adam remainder": 4, "sgd": 2, "adagrad": 2,
    "lamb": 3, "lamb, past the nearer cache": 0, "novograd": 2, "larc": 1,
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_accesses_of_16_bytes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("vectorised_worker.py")
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    found["lamb, past the nearer cache"] = {"ld.global.v4.b32": found["lamb"]["ld.global.cg.v4.b32"]}
    assert set(found) == set(LOADS)
    for name, kinds in found.items():
        assert kinds.get("ld.global.v4.b32", 0) >= LOADS[name], (name, kinds)
        assert kinds.get("st.global.v4.b32", 0) >= STORES[name], (name, kinds)
