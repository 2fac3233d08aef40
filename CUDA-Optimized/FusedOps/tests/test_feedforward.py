"""Bias with activation against float64; the layers made of it against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops import nn
from fusedops.ops import bias_activation, dense, feedforward, mlp
from fusedops.ops import dense_gelu_dense as two_layers

EXACT = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


@pytest.mark.parametrize(
    "types", [(torch.float32,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("name", EXACT)
def test_against_float64(device, triton_backend, no_worse, name, types):
    for shape in ((1, 1), (5, 7), (3, 2, 40), (37, 300)):
        x = (2 * torch.randn(shape)).to(device, types[0])
        bias = torch.randn(shape[-1]).to(device, types[1])
        dy = torch.randn(shape).to(device, types[0])
        wide = [t.double().requires_grad_() for t in (x, bias)]
        y = EXACT[name](wide[0] + wide[1])
        expected = [y, *torch.autograd.grad(y, wide, dy.double())]
        results = {}
        for backend in ("plain", "triton"):
            own = [t.clone().requires_grad_() for t in (x, bias)]
            with fusedops.use(backend):
                y = bias_activation(*own, name)
                results[backend] = [y, *torch.autograd.grad(y, own, dy)]
        for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
            no_worse(ours, plain, exact, floor=max(torch.finfo(ours.dtype).eps, 1e-6), scale=1)


def test_layers_against_torch(device, backend):
    x = torch.randn(3, 4, 10, device=device, requires_grad=True)
    module = nn.DenseGeluDense(10, 20, 6).to(device)
    reference = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.GELU("tanh"), torch.nn.Linear(20, 6)).to(device)
    reference[0].weight.data, reference[0].bias.data = module.weight1.data, module.bias1.data
    reference[2].weight.data, reference[2].bias.data = module.weight2.data, module.bias2.data
    ours, theirs = module(x), reference(x)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, (x, *module.parameters()), dy),
        torch.autograd.grad(theirs, (x, *reference.parameters()), dy),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    exact = two_layers(x, module.weight1, None, module.weight2, None, "none")
    torch.testing.assert_close(exact, F.gelu(x @ module.weight1.t()) @ module.weight2.t())


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_against_torch(device, backend, activation, bias):
    module = nn.MLP([7, 12, 5, 1], bias=bias, activation=activation).to(device)
    names = [f"{kind}_{i}" for i in range(3) for kind in (("weight", "bias") if bias else ("weight",))]
    assert list(module.state_dict()) == names and "mlp_sizes=[7, 12, 5, 1]" in repr(module)
    x = torch.randn(6, 7, device=device, requires_grad=True)
    expected = x
    for weight, own_bias in zip(module.layers("weight"), module.layers("bias"), strict=True):
        expected = EXACT[activation](F.linear(expected, weight, own_bias))
    found = module(x)
    torch.testing.assert_close(found, expected)
    wanted = (x, *module.parameters())
    for a, b in zip(torch.autograd.grad(found.sum(), wanted), torch.autograd.grad(expected.sum(), wanted), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_wrong_inputs_are_refused(device, backend):
    x = torch.randn(2, 6, device=device)
    for call, message in (
        (lambda: bias_activation(x, torch.ones(5)), r"bias \(5,\) does not fit"),
        (lambda: dense(x, torch.ones(3, 6, device=device), activation="tanh"), "'tanh'"),
        (lambda: two_layers(x, x, None, x, None, "fast"), "'fast'"),
        (lambda: mlp(x, [x], []), "1 weights, but 0 biases"),
        (lambda: nn.MLP([3]), "two sizes or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert bias_activation(x[:0], x[0]).shape == (0, 6)
    torch.testing.assert_close(bias_activation(x.t(), x.t()[0].clone(), "relu"), F.relu(x.t() + x.t()[0]))


def test_registered_compiled_and_repeatable(device, triton_backend):
    x, bias = torch.randn(5, 6, device=device, requires_grad=True), torch.randn(6, device=device, requires_grad=True)
    torch.library.opcheck(feedforward.activation_forward.operator, (x, bias, 1))
    weight = torch.randn(6, 6, device=device)

    def step(x):
        return dense(x, weight, bias, "gelu")

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x)
    torch.testing.assert_close(found, expected)
    pairs = zip(*(torch.autograd.grad(y.sum(), (x, bias)) for y in (found, expected)), strict=True)
    assert all(torch.allclose(a, b) for a, b in pairs)
    first, second = (torch.autograd.grad(step(x), (x, bias), torch.ones(5, 6, device=device)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
