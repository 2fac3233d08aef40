"""Gradients of weights summed in float32 over micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusedops.ops import accumulate_weight_gradient, linear_accumulating


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_are_float32(device, dtype):
    total = torch.zeros(5, 3, device=device)
    exact = torch.zeros(5, 3, device=device, dtype=torch.float64)
    for _ in range(20):
        x, dy = torch.randn(2, 4, 3, device=device).to(dtype), torch.randn(2, 4, 5, device=device).to(dtype)
        accumulate_weight_gradient(x, dy, total)
        exact += torch.einsum("abo,abi->oi", dy.double(), x.double())
    torch.testing.assert_close(total.double(), exact, atol=1e-4, rtol=1e-5)


def test_the_layer_adds_to_its_buffer(device):
    weight = torch.nn.Parameter(torch.randn(5, 3, device=device, dtype=torch.bfloat16))
    bias = torch.nn.Parameter(torch.randn(5, device=device, dtype=torch.bfloat16))
    weight.main_grad = torch.ones(5, 3, device=device)
    x = torch.randn(4, 3, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 5, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        y = linear_accumulating(x, weight, bias)
        assert torch.equal(y, F.linear(x, weight, bias))
        y.backward(dy)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.double(), 1 + 2 * dy.double().t() @ x.double(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(x.grad, 2 * (dy @ weight))
    torch.testing.assert_close(bias.grad, 2 * dy.sum(0), atol=2e-2, rtol=2e-2)
    with torch.no_grad():
        assert not linear_accumulating(x, weight, bias).requires_grad


def test_wrong_inputs_are_refused(device):
    x, dy = torch.zeros(4, 3, device=device), torch.zeros(4, 5, device=device)
    with pytest.raises(ValueError, match=r"and \(3, 5\)"):
        accumulate_weight_gradient(x, dy, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"strides are \(1, 5\)"):
        accumulate_weight_gradient(x, dy, torch.zeros(3, 5).t())
    with pytest.raises(ValueError, match="there is none"):
        linear_accumulating(x, torch.zeros(5, 3, device=device))
