"""The kernels on a CPU by Triton's interpreter, in their own process: the switch is read when Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize(
    "name, least", [("test_decoder_kernels.py", 25), ("test_waveglow_kernels.py", 9), ("test_training_kernels.py", 4)]
)
def test_kernels_by_the_interpreter(name, least):
    test = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= least
