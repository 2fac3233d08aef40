"""Where the tests run: on a CUDA device if there is one, else the kernels by Triton's interpreter on the CPU.

Fixtures: `device` (torch.device), `backend` (each of "plain" and "triton" in turn, asked for while the test runs),
`triton_backend` (the kernels alone), `apex_shim`. A
test that takes the kernels is skipped where triton is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet

import pytest  # noqa: E402

import fusedops  # noqa: E402


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["plain", "triton"])
def backend(request):
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("needs the package triton")
    with fusedops.use(request.param):
        yield request.param


@pytest.fixture
def triton_backend():
    if not HAS_TRITON:
        pytest.skip("needs the package triton")
    with fusedops.use("triton"):
        yield


@pytest.fixture
def no_worse():
    """no_worse(ours, plain, exact, floor=None, scale=0): ours misses the float64 result by at most twice what the plain
    form in the same types misses it, plus `floor` (default: one epsilon of the type) times the larger of the largest
    exact value and `scale` (what a result that cancels is made of)."""

    def check(ours, plain, exact, floor=None, scale=0.0):
        assert ours.shape == exact.shape and ours.dtype == plain.dtype
        if not exact.numel():
            return
        exact = exact.double().cpu()
        floor = torch.finfo(ours.dtype).eps if floor is None else floor
        error = (ours.double().cpu() - exact).abs().max()
        bound = 2 * (plain.double().cpu() - exact).abs().max() + floor * exact.abs().max().clamp(min=scale)
        assert error <= bound, f"error {error:.3e}, bound {bound:.3e}"

    return check


@pytest.fixture(scope="module")
def apex_shim():
    """The shim on the import path for one module of tests: it is a distribution of its own."""
    if importlib.util.find_spec("apex") is not None:
        pytest.skip("another package named apex is installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "apex_shim"))
        yield
    outside = ("amp_C", "apex_C", "fused_weight_gradient_mlp_cuda")
    for name in [name for name in sys.modules if name in outside or name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    wanted = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}")
