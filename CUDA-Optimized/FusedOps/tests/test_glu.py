"""Gated linear units: against float64 for every activation, type and way to hand over the halves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.ops import gated, geglu, glu, swiglu

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_float64(device, triton_backend, no_worse, name, dtype, packed):
    for shape in ((1, 1), (5, 7), (3, 2, 40), (2, 1030)):
        x = (3 * torch.randn(*shape[:-1], 2 * shape[-1], device=device)).to(dtype)
        dy = torch.randn(shape, device=device).to(dtype)
        wide = x.double().requires_grad_()
        y = ACTIVATIONS[name](wide[..., : shape[-1]]) * wide[..., shape[-1] :]
        expected = [y, torch.autograd.grad(y, wide, dy.double())[0]]
        results = {}
        for backend in ("plain", "triton"):
            own = x.clone().requires_grad_()
            with fusedops.use(backend):
                y = gated(own, None, name) if packed else gated(*own.chunk(2, -1), name)
                results[backend] = [y, torch.autograd.grad(y, own, dy)[0]]
        for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
            no_worse(ours, plain, exact, floor=max(torch.finfo(dtype).eps, 1e-6))


def test_named_forms_strides_and_nothing(device, backend):
    a, b = torch.randn(4, 10, device=device), torch.randn(4, 10, device=device)
    torch.testing.assert_close(swiglu(a, b), F.silu(a) * b)
    torch.testing.assert_close(geglu(a, b), F.gelu(a, approximate="tanh") * b)
    torch.testing.assert_close(geglu(a, b, approximate="none"), F.gelu(a) * b)
    torch.testing.assert_close(swiglu(a.t(), b.t()), (F.silu(a) * b).t())
    torch.testing.assert_close(swiglu(a[:, 1:8:2], b[:, :4]), F.silu(a[:, 1:8:2]) * b[:, :4])
    torch.testing.assert_close(swiglu(a[0, 0], b[0, 0]), F.silu(a[0, 0]) * b[0, 0])
    torch.testing.assert_close(swiglu(torch.cat([a, b], 1)[1:, :]), F.silu(a[1:]) * b[1:])
    x = torch.randn(3, 8, device=device, requires_grad=True)
    gradient = torch.autograd.grad(swiglu(x).sum(), x)[0]  # of stride 0
    expected = torch.autograd.grad((F.silu(x[:, :4]) * x[:, 4:]).sum(), x)[0]
    torch.testing.assert_close(gradient, expected)
    assert swiglu(a[:0], b[:0]).shape == (0, 10) and swiglu(a[:, :0]).shape == (4, 0)


def test_wrong_inputs_are_refused(device, backend):
    x = torch.randn(2, 6, device=device)
    for call, message in (
        (lambda: swiglu(x[:, :5]), "even last dimension"),
        (lambda: swiglu(x, x[:1]), r"not torch.float32 \(2, 6\) and torch.float32 \(1, 6\)"),
        (lambda: swiglu(x, x.half()), "must be alike"),
        (lambda: geglu(x, approximate="erf"), "'erf'"),
        (lambda: gated(x, x, "swish"), "activation 'swish'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_registered_compiled_and_repeatable(device, triton_backend):
    a, b = (torch.randn(3, 8, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(glu.glu_forward.operator, (a, b, 0))
    torch.library.opcheck(glu.packed_forward.operator, (a, 1))

    def step(a, b):
        return swiglu(a * 2, b) + swiglu(torch.cat([a, b], 1))

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b), step(a, b)
    assert torch.equal(found, expected)
    dy = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(y, (a, b), dy) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, triton_backend):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.randn(2**17 + 1, 2**14 + 2**7, device=device, dtype=torch.bfloat16)
    assert torch.equal(swiglu(x)[-3:], swiglu(x[-3:].clone()))
