"""Linear layer with cross entropy: against float64 and against the two of them one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.ops import linear_cross_entropy, linear_xentropy


def make(device, rows, features, classes, dtype):
    x = torch.randn(rows, features).to(device, dtype)
    weight = (torch.randn(classes, features) / features**0.5 * 2).to(device, dtype)
    bias = torch.randn(classes).to(device, dtype)
    target = torch.randint(0, classes, (rows,)).to(device)
    target[2::4] = -100
    return x, weight, bias, target


def exact_loss(x, weight, bias, target, smoothing, z_loss, softcap, reduction):
    logits = F.linear(x, weight, bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    losses = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
    losses = losses + torch.where(target == -100, 0.0, z_loss * torch.logsumexp(logits, 1) ** 2)
    return losses.sum() / ((target != -100).sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing, z_loss, softcap", [(0.0, 0.0, None), (0.1, 1e-3, 10.0)])
@pytest.mark.parametrize("accumulate", [torch.float32, None], ids=["fp32", "own"])
def test_against_float64(device, triton_backend, no_worse, dtype, reduction, smoothing, z_loss, softcap, accumulate):
    *tensors, target = make(device, 37, 16, 50, dtype)
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "reduction": reduction}
    wide = [t.double().requires_grad_() for t in tensors]
    loss = exact_loss(*wide, target, smoothing, z_loss, softcap, reduction)
    expected = [loss, *torch.autograd.grad(loss * 0.5, wide)]
    results = {}
    for backend in ("plain", "triton"):
        own = [t.clone().requires_grad_() for t in tensors]
        with fusedops.use(backend):
            more = {"chunk_rows": 8, "accumulate": accumulate} if backend == "triton" else {}
            loss = linear_cross_entropy(own[0], own[1], target, own[2], **options, **more)
            results[backend] = [loss, *torch.autograd.grad(loss * 0.5, own)]
    for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
        no_worse(ours, plain, exact, floor=max(2 * torch.finfo(ours.dtype).eps, 1e-6))


def test_chunks_make_no_difference(device, triton_backend):
    x, weight, _, target = make(device, 40, 8, 30, torch.float32)
    found = []
    for chunk in (1, 7, 40, 100, None):
        own = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = linear_cross_entropy(own[0].view(4, 10, 8), own[1], target.view(4, 10), chunk_rows=chunk)
        found.append([loss, *torch.autograd.grad(loss, own)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_only_what_needs_a_gradient(device, backend):
    x, weight, bias, target = make(device, 10, 8, 30, torch.float32)
    expected = F.cross_entropy(F.linear(x, weight, bias), target)
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, bias), expected)
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, bias)
    reference = F.cross_entropy(F.linear(x, weight, bias), target)
    for a, b in zip(torch.autograd.grad(loss, weight), torch.autograd.grad(reference, weight), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, target, bias), expected)
    none = torch.full_like(target, -100)
    assert linear_cross_entropy(x, weight, none).isnan() and linear_cross_entropy(x, weight, none, reduction="sum") == 0
    empty = x[:0].clone().requires_grad_()
    loss = linear_cross_entropy(empty, weight, target[:0], reduction="sum")
    assert loss == 0 and (torch.autograd.grad(loss, weight)[0] == 0).all()


def test_backward_runs_once(device, triton_backend):
    x, weight, _, target = make(device, 10, 8, 30, torch.float32)
    loss = linear_cross_entropy(x.requires_grad_(), weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by an earlier backward"):
        loss.backward()


def test_wrong_inputs_are_refused(device, backend):
    x, weight, bias, target = make(device, 10, 8, 30, torch.float32)
    for call, message in (
        (lambda: linear_cross_entropy(x[:, :4], weight, target), r"not x \(10, 4\)"),
        (lambda: linear_cross_entropy(x, weight, target, bias[:3]), r"bias must be \(30,\)"),
        (lambda: linear_cross_entropy(x, weight, target, reduction="none"), "not one of mean, sum"),
        (lambda: linear_cross_entropy(x, weight, target, chunk_rows=0), "chunk_rows must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_chunks_are_sized_by_their_logits():
    assert linear_xentropy.default_chunk(131072, 2) == 1024
    assert linear_xentropy.default_chunk(10**7, 2) == 256
    assert linear_xentropy.default_chunk(1000, 4) % 256 == 0


def test_registered_and_compiled(device, triton_backend):
    x, weight, bias, target = make(device, 10, 8, 30, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    arguments = (x, weight, bias, target, -100, 0.1, 0.0, 0.0, True, 4, torch.float32, True, True, False)
    torch.library.opcheck(linear_xentropy.linear_forward.operator, arguments)

    def step(x):
        return linear_cross_entropy(x * 2, weight, target, chunk_rows=4) * 3

    expected, found = step(x), torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_memory_is_that_of_a_chunk(device, triton_backend):
    x, weight, _, target = make(device, 4096, 256, 32768, torch.bfloat16)
    x.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, target, chunk_rows=256).backward()
    assert torch.cuda.max_memory_allocated() - before < 4096 * 32768 * 2 / 4
