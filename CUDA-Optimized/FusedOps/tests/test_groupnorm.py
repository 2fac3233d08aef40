"""Group norm with an activation: against float64, in registers and in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops import nn
from fusedops.ops import group_norm, groupnorm

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [((1, 1, 1, 1), 1), ((2, 30, 5, 4), 3), ((2, 10, 2, 9), 10), ((1, 64, 4, 4), 1)]
ACTIVATIONS = {"none": lambda x: x, "silu": F.silu}


def exact_norm(x, groups, weight, bias, activation):
    """Float64, from the definition."""
    flat = x.reshape(x.shape[0], groups, -1)
    flat = (flat - flat.mean(2, keepdim=True)) / (flat.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    y = flat.view(x.shape)
    ends = (1, -1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.view(ends) + bias.view(ends)
    return ACTIVATIONS[activation](y)


def compare(device, no_worse, shape, groups, types, activation, affine=True):
    x = (torch.randn(shape) + torch.randn(1, shape[1], *(1,) * (len(shape) - 2))).to(device, types[0])
    dy = torch.randn(shape).to(device, types[0])
    if x.dim() == 4:
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    weight = (torch.rand(shape[1]) + 0.5).to(device, types[1]) if affine else None
    bias = torch.randn(shape[1]).to(device, types[1]) if affine else None
    tensors = [t for t in (x, weight, bias) if t is not None]
    wide = [t.double().requires_grad_() for t in tensors]
    y = exact_norm(wide[0], groups, *(wide[1:] or (None, None)), activation)
    expected = [y, *torch.autograd.grad(y, wide, dy.double())]
    results = {}
    for backend in ("plain", "triton"):
        own = [t.clone().requires_grad_() for t in tensors]
        with fusedops.use(backend):
            y = group_norm(own[0], groups, *(own[1:] or (None, None)), activation=activation)
            results[backend] = [y, *torch.autograd.grad(y, own, dy)]
    assert results["triton"][0].stride() == x.stride()
    # Gradients of a constant group cancel, but what cancels has been multiplied by 1 / sqrt(eps).
    deviation = (x.double().reshape(x.shape[0], groups, -1).var(2, correction=0) + 1e-5).sqrt().min().item()
    for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
        no_worse(ours, plain, exact, floor=max(torch.finfo(ours.dtype).eps, 2e-6), scale=max(1, 1 / deviation))


@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (B16, F32), (F32, B16)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["registers", "chunks"])
def test_against_float64(device, triton_backend, no_worse, monkeypatch, form, activation, types):
    if form == "chunks":
        from fusedops.ops import group_norm_kernels

        monkeypatch.setattr(group_norm_kernels, "WHOLE_FORWARD", 0)
        monkeypatch.setattr(group_norm_kernels, "WHOLE_BACKWARD", 0)
        monkeypatch.setattr(group_norm_kernels, "PARTIAL", (128, 4, 4))
        monkeypatch.setattr(group_norm_kernels, "APPLY", (128, 4))
        monkeypatch.setattr(group_norm_kernels, "STATISTICS_TILE", 16)
    for shape, groups in SHAPES:
        compare(device, no_worse, shape, groups, types, activation)
    compare(device, no_worse, (2, 6, 3, 4), 3, types, activation, affine=False)


def test_variance_survives_a_large_mean(device, triton_backend, monkeypatch):
    from fusedops.ops import group_norm_kernels

    x = (torch.randn(2, 8, 16, 16, device=device) + 300).contiguous(memory_format=torch.channels_last)
    exact = exact_norm(x.double(), 2, None, None, "none")
    assert (group_norm(x, 2) - exact).abs().max() < 2e-4
    monkeypatch.setattr(group_norm_kernels, "WHOLE_FORWARD", 0)
    assert (group_norm(x, 2) - exact).abs().max() < 2e-4


def test_other_orders_and_dimensions(device, backend):
    for shape in ((2, 6), (2, 6, 5), (2, 6, 2, 3, 2), (2, 6, 4, 4)):  # channels first, but for the first
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(group_norm(x, 3), F.group_norm(x, 3))
    volume = torch.randn(2, 6, 2, 3, 2, device=device).contiguous(memory_format=torch.channels_last_3d)
    y = group_norm(volume, 2, activation="silu")
    torch.testing.assert_close(y, F.silu(F.group_norm(volume, 2)))
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    empty = torch.zeros(0, 6, 2, 2, device=device)
    assert group_norm(empty, 2).shape == empty.shape


def test_wrong_inputs_are_refused(device, backend):
    x = torch.randn(2, 6, 2, 2, device=device)
    for call, message in (
        (lambda: group_norm(x, 4), "4 groups do not divide"),
        (lambda: group_norm(x, 2, torch.ones(5)), r"weight must be \(6,\), not \(5,\)"),
        (lambda: group_norm(x, 2, activation="swish"), "'swish'"),
        (lambda: group_norm(x.long(), 2), "floating-point"),
        (lambda: nn.GroupNorm(2, 6, activation="elu"), "'elu'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_module_holds_torchs_parameters(device, backend):
    module, reference = nn.GroupNorm(2, 6, activation="silu").to(device), torch.nn.GroupNorm(2, 6).to(device)
    reference.weight.data.uniform_(0.5, 2)
    module.load_state_dict(reference.state_dict())
    x = torch.randn(2, 6, 3, 3, device=device).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(module(x), F.silu(reference(x)))
    assert "activation='silu'" in repr(module)


def test_registered_compiled_and_repeatable(device, triton_backend):
    x = torch.randn(2, 5, 6, device=device, requires_grad=True)
    weight, bias = (torch.rand(6, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(groupnorm.group_norm_forward.operator, (x, weight, bias, 2, 1e-5, 0))
    picture = torch.randn(2, 6, 3, 3, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()

    def step(x):
        return group_norm(x * 2, 2, weight, bias, activation="silu")

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(picture), step(picture)
    assert torch.equal(found, expected)
    dy = torch.randn_like(expected)
    wanted = (picture, weight, bias)
    for a, b in zip(torch.autograd.grad(found, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(a, b)
    again = torch.autograd.grad(step(picture), wanted, dy)
    assert all(torch.equal(a, b) for a, b in zip(again, torch.autograd.grad(step(picture), wanted, dy), strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, triton_backend):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.randn(1025, 2048, 32, 32, device=device, dtype=B16).contiguous(memory_format=torch.channels_last)
    alone = group_norm(x[-1:].clone(memory_format=torch.channels_last), 32)  # cut into other chunks
    torch.testing.assert_close(group_norm(x, 32)[-1:], alone, rtol=2**-7, atol=1e-6)
