"""Transducer joint and loss: the joint against its definition, the loss against the sum over all alignments."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from fusedops.ops import transducer, transducer_joint, transducer_loss


def all_alignments(x, label, frames, blank):
    """-log of the summed probability of every path through one item's lattice, x (T, U, V) float64, by enumeration."""
    scores = x.log_softmax(-1)
    count = len(label)
    paths = []
    for moves in itertools.combinations(range(frames - 1 + count), count):  # which steps emit a label
        t = u = 0
        path = 0.0
        for step in range(frames - 1 + count):
            emits = step in moves
            path = path + scores[t, u, label[u] if emits else blank]
            t, u = (t, u + 1) if emits else (t + 1, u)
        paths.append(path + scores[t, u, blank])
    return -torch.logsumexp(torch.stack(paths), 0)


def batch(device, dtype, width=9):
    f_len, y_len = torch.tensor([4, 1, 3], device=device), torch.tensor([2, 0, 3], device=device)
    x = torch.randn(3, 5, 4, width, device=device).to(dtype)
    label = torch.randint(0, width - 1, (3, 3), device=device)
    return x, label, f_len, y_len


def pack(x, f_len, g_len):
    return torch.cat([x[b, :f, :g].reshape(-1, x.shape[-1]) for b, (f, g) in enumerate(zip(f_len, g_len, strict=True))])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_loss_is_that_of_all_alignments(device, triton_backend, no_worse, dtype, packed):
    x, label, f_len, y_len = batch(device, dtype)
    blank = 8
    wide = x.double().requires_grad_()
    exact = torch.stack(
        [all_alignments(wide[b], label[b, : y_len[b]].tolist(), int(f_len[b]), blank) for b in range(3)]
    )
    factor = torch.tensor([1.0, 2.0, 0.5], device=device)
    gradient = torch.autograd.grad(exact, wide, factor.double())[0]
    options = {}
    if packed:
        options = {"batch_offset": torch.cumsum(f_len * (y_len + 1), 0), "max_f_len": 4}
        gradient = pack(gradient, f_len, y_len + 1)
    results = {}
    for backend in ("plain", "triton"):
        own = (pack(x, f_len, y_len + 1) if packed else x).clone().requires_grad_()
        with fusedops.use(backend):
            losses = transducer_loss(own, label, f_len, y_len, blank, **options)
            results[backend] = [losses, torch.autograd.grad(losses, own, factor)[0]]
    for ours, plain, expected in zip(results["triton"], results["plain"], (exact, gradient), strict=True):
        no_worse(ours, plain, expected, floor=max(torch.finfo(ours.dtype).eps, 2e-6))


def test_long_lattices(device, triton_backend):
    x = torch.randn(2, 12, 19, 5, device=device, requires_grad=True)
    label = torch.randint(1, 5, (2, 18), device=device)
    f_len, y_len = torch.tensor([12, 7], device=device), torch.tensor([18, 10], device=device)
    found = transducer_loss(x, label, f_len, y_len, 0)
    gradient = torch.autograd.grad(found.sum(), x)[0]
    wide = x.detach().double().requires_grad_()
    expected = transducer.loss_plain(wide, label, f_len, y_len, 0, None, 12)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(expected.sum(), wide)[0], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joint_against_float64(device, triton_backend, no_worse, dtype, relu, packed):
    f, g = torch.randn(3, 5, 70, device=device).to(dtype), torch.randn(3, 20, 70, device=device).to(dtype)
    f_len, g_len = torch.tensor([5, 1, 3], device=device), torch.tensor([20, 17, 1], device=device)
    inside = (torch.arange(5, device=device) < f_len[:, None])[:, :, None]
    inside = (inside & (torch.arange(20, device=device) < g_len[:, None])[:, None])[..., None]
    rows = int((f_len * g_len).sum())
    options = {"batch_offset": torch.cumsum(f_len * g_len, 0), "packed_batch": rows} if packed else {}
    wide = [t.double().requires_grad_() for t in (f, g)]
    h = wide[0][:, :, None] + wide[1][:, None]
    h = torch.where(inside, h.relu() if relu else h, -1.0)
    exact = pack(h, f_len, g_len) if packed else h
    dy = torch.randn(exact.shape, device=device).to(dtype)
    expected = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    results = {}
    for backend in ("plain", "triton"):
        own = [t.clone().requires_grad_() for t in (f, g)]
        with fusedops.use(backend):
            y = transducer_joint(*own, f_len, g_len, relu=relu, **options)
            results[backend] = [y, *torch.autograd.grad(y, own, dy)]
    for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
        no_worse(ours, plain, exact)


def test_dropout_keeps_a_share_and_its_gradient(device, triton_backend):
    f, g = (torch.ones(2, n, 64, device=device, requires_grad=True) for n in (6, 5))
    lengths = torch.tensor([6, 6], device=device), torch.tensor([5, 5], device=device)
    y = transducer_joint(f, g, *lengths, dropout=0.25)
    kept = (y != 0).float().mean()
    assert 0.7 < kept < 0.8
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 2 / 0.75))
    df, dg = torch.autograd.grad(y.sum(), (f, g))
    torch.testing.assert_close(df, (y != 0).float().sum(2) / 0.75)  # the same elements were dropped
    torch.testing.assert_close(dg, (y != 0).float().sum(1) / 0.75)
    assert not torch.equal(y, transducer_joint(f, g, *lengths, dropout=0.25))


def test_wrong_inputs_are_refused(device, backend):
    x, label, f_len, y_len = batch(device, torch.float32)
    f = torch.zeros(3, 2, 4, device=device)
    for call, message in (
        (lambda: transducer_joint(f, f[:, :, :3], f_len, y_len), r"need f \(B, T, H\)"),
        (lambda: transducer_joint(f, f, f_len[:2], y_len), r"need lengths \(3,\)"),
        (lambda: transducer_joint(f, f, f_len, y_len, packed_batch=3), "go together"),
        (lambda: transducer_loss(x[0], label, f_len, y_len, 0), "need x"),
        (lambda: transducer_loss(x, label, f_len, y_len, 9), "blank 9"),
        (lambda: transducer_loss(x, label[:, :2], f_len, y_len, 0), "do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_registered_compiled_and_repeatable(device, triton_backend):
    x, label, f_len, y_len = batch(device, torch.float32)
    x.requires_grad_()
    f, g = (torch.randn(3, n, 9, device=device, requires_grad=True) for n in (5, 4))
    arguments = (f, g, f_len, y_len + 1, None, f_len, True, 0.0, -1.0, -1)
    torch.library.opcheck(transducer.joint_forward.operator, arguments)

    def step(f, g):
        return transducer_loss(transducer_joint(f, g, f_len, y_len + 1, relu=True), label, f_len, y_len, 0)

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(f, g), step(f, g)
    assert torch.equal(found, expected)
    runs = [torch.autograd.grad(y.sum(), (f, g)) for y in (found, expected, step(f, g))]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
