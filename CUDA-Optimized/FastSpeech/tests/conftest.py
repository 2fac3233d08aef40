"""The kernels of csrc/ compiled for the CPU, where cuda_host.h plays the device; once for all tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """A `native.Library` whose addresses are those of the host's memory."""
    from fastspeech.cuda import native

    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    target = tmp_path_factory.mktemp("emulated") / "kernels.so"
    flags = ["-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-DFASTSPEECH_HOST", f"-I{HERE}"]
    sources = [str(path) for path in sorted((HERE.parent / "csrc").glob("*.cu"))]
    subprocess.run([compiler, *flags, "-x", "c++", *sources, "-o", str(target)], check=True)
    return native.Library(target)
