"""Scaled and masked softmax: against float64 in every form, type and awkward shape."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.ops import masked_softmax, scaled_softmax

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 33, 33), (2, 1, 4, 1000)]
FORMS = ["none", "causal", "mask", "both"]


def exact_softmax(x, scale, hidden):
    """Float64, from the definition, row by row where anything is seen."""
    scores = scale * x
    largest = scores.masked_fill(hidden, -1e300).amax(-1, keepdim=True)
    weights = torch.where(hidden, 0.0, torch.exp(torch.where(hidden, 0.0, scores - largest)))
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def hidden_of(device, shape, form):
    """(mask argument, causal argument, everything that is hidden)"""
    batch, heads, queries, keys = shape
    causal = form in ("causal", "both") and queries <= keys
    mask = None
    hidden = torch.zeros(shape, dtype=torch.bool, device=device)
    if causal:
        positions = (
            torch.arange(keys, device=device)[None] > torch.arange(queries, device=device)[:, None] + keys - queries
        )
        hidden = hidden | positions
    if form in ("mask", "both"):
        mask = torch.rand(batch, 1, queries, keys, device=device) < 0.4
        mask[0, 0, 0] = True  # a row of nothing
        hidden = hidden | mask
    return mask, causal, hidden


def compare(device, no_worse, shape, dtype, form):
    x = torch.randn(shape, device=device).to(dtype) * 3
    dy = torch.randn(shape, device=device).to(dtype)
    mask, causal, hidden = hidden_of(device, shape, form)
    wide = x.double().requires_grad_()
    y = exact_softmax(wide, 0.7, hidden)
    expected = [y, torch.autograd.grad(y, wide, dy.double())[0]]
    results = {}
    for backend in ("plain", "triton"):
        own = x.clone().requires_grad_()
        with fusedops.use(backend):
            y = scaled_softmax(own, 0.7, mask=mask, causal=causal)
            results[backend] = [y, torch.autograd.grad(y, own, dy)[0]]
    for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
        # The backward pass takes the output, which has the scores' type, as torch's own softmax does in that type.
        no_worse(ours, plain, exact, floor=max(2 * torch.finfo(dtype).eps, 1e-6), scale=0.1)
    assert (results["triton"][0][hidden] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_against_float64(device, triton_backend, no_worse, dtype, form):
    for shape in SHAPES:
        compare(device, no_worse, shape, dtype, form)


@pytest.mark.parametrize("form", FORMS)
def test_rows_in_chunks(device, triton_backend, no_worse, monkeypatch, form):
    from fusedops.ops import masked_softmax_kernels

    monkeypatch.setattr(masked_softmax_kernels, "FORWARD", ())
    monkeypatch.setattr(masked_softmax_kernels, "BACKWARD", ())
    monkeypatch.setattr(masked_softmax_kernels, "WIDE", (16, 4))
    for shape in SHAPES[:3]:
        compare(device, no_worse, shape, torch.float32, form)


def test_other_shapes_and_masks(device, backend):
    x = torch.randn(6, 9, device=device)
    torch.testing.assert_close(scaled_softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(scaled_softmax(x[0], 2.0), torch.softmax(2 * x[0], -1))
    torch.testing.assert_close(scaled_softmax(x.t(), 2.0), torch.softmax(2 * x.t(), -1))
    padding = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1], dtype=torch.uint8, device=device)
    expected = torch.softmax(x.masked_fill(padding.bool(), -float("inf")), -1)
    torch.testing.assert_close(scaled_softmax(x, mask=padding), expected)
    scores = torch.randn(2, 3, 4, 9, device=device)
    per_head = torch.rand(3, 1, 9, device=device) < 0.3
    expected = torch.softmax(scores.masked_fill(per_head, -float("inf")), -1).nan_to_num()
    torch.testing.assert_close(scaled_softmax(scores, mask=per_head), expected)
    assert scaled_softmax(x[:0]).shape == (0, 9)


def test_wrong_inputs_are_refused(device, backend):
    x = torch.randn(2, 3, device=device)
    with pytest.raises(ValueError, match=r"mask of shape \(5,\) does not broadcast"):
        scaled_softmax(x, mask=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool or uint8"):
        scaled_softmax(x, mask=torch.zeros(3))
    with pytest.raises(ValueError, match="floating-point"):
        scaled_softmax(x.long())


def test_registered_compiled_and_repeatable(device, triton_backend):
    x = torch.randn(2, 3, 4, 9, device=device, requires_grad=True)
    mask = torch.rand(2, 1, 4, 9, device=device) < 0.3
    flat = x.detach().reshape(-1, 9).requires_grad_()
    torch.library.opcheck(masked_softmax.softmax_forward.operator, (flat, mask.expand(2, 3, 4, 9), 0.5, True, 3, 4))
    step = torch.compile(
        lambda x: scaled_softmax(x * 2, 0.5, mask=mask, causal=True), fullgraph=True, backend="aot_eager"
    )
    found, expected = step(x), scaled_softmax(x * 2, 0.5, mask=mask, causal=True)
    assert torch.equal(found, expected) and torch.equal(expected, scaled_softmax(x * 2, 0.5, mask=mask, causal=True))
    dy = torch.randn_like(x)
    torch.testing.assert_close(torch.autograd.grad(found, x, dy), torch.autograd.grad(expected, x, dy))
