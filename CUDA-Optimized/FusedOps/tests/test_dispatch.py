"""The choice of implementation."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import fusedops
from fusedops import dispatch


def test_importing_is_light():
    code = "import sys, fusedops; print([name for name in ('torch', 'triton') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_using_it_imports_neither_triton_nor_the_compiler():
    code = """if True:
        import sys, torch, fusedops
        fusedops.ops.rms_norm(torch.ones(2, 8), 8)
        print([name for name in ("triton", "torch._dynamo") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="'cuda' is not one of auto, triton, plain"):
        fusedops.use("cuda")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fusedops.nothing  # noqa: B018
    monkeypatch.setenv("FUSEDOPS_BACKEND", "fast")
    with pytest.raises(ValueError, match="FUSEDOPS_BACKEND: backend 'fast'"):
        dispatch.requested()


def test_contexts_nest_and_threads_do_not_see_each_other(monkeypatch):
    monkeypatch.delenv("FUSEDOPS_BACKEND", raising=False)
    seen = []
    with fusedops.use("plain"):
        with fusedops.use("triton"):
            assert dispatch.requested() == "triton"
            thread = threading.Thread(target=lambda: seen.append(dispatch.requested()))
            thread.start()
            thread.join()
        assert dispatch.requested() == "plain"
    assert seen == ["auto"] == [dispatch.requested()]


def test_the_variable_is_the_default(monkeypatch):
    monkeypatch.setenv("FUSEDOPS_BACKEND", "plain")
    assert fusedops.backend_for(torch.zeros(1)) == "plain" and dispatch.requested() == "plain"


def test_auto_takes_the_plain_form_on_a_cpu():
    assert fusedops.backend_for(torch.zeros(1), None) == "plain"
    assert fusedops.backend_for() == "plain"


def test_triton_where_it_cannot_run_says_why(monkeypatch):
    with fusedops.use("triton"):
        with pytest.raises(RuntimeError, match=r"fusedops.rope: .*cannot run on meta: .*neither a CUDA device"):
            fusedops.backend_for(torch.zeros(1, device="meta"), op="rope")
        monkeypatch.setattr(dispatch, "obstacle", lambda *_: "")
        with pytest.raises(RuntimeError, match="not torch.float64"):
            fusedops.backend_for(torch.zeros(1, dtype=torch.float64))


def test_function_transforms_take_the_plain_form(device, triton_backend):
    from fusedops.ops import layer_norm

    x = torch.randn(4, 8, device=device)

    def total(x):
        return layer_norm(x, 8).pow(3).sum()

    with pytest.raises(RuntimeError, match="need the plain form"):
        torch.func.grad(total)(x)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(total(leaf), leaf)[0]
    with fusedops.use("auto"):
        torch.testing.assert_close(torch.func.grad(total)(x), expected)
        torch.testing.assert_close(torch.func.vmap(lambda x: layer_norm(x, 8))(x), layer_norm(x, 8))


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="several devices: cpu, meta"):
        fusedops.backend_for(torch.zeros(1), torch.zeros(1, device="meta"))


@pytest.mark.gpu
def test_auto_takes_the_kernels_on_a_gpu(device):
    assert fusedops.backend_for(torch.zeros(1, device=device)) == "triton"
    assert fusedops.backend_for(torch.zeros(1, device=device, dtype=torch.float64)) == "plain"
