"""Cross entropy: against float64 and against torch, in every option, type and awkward shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.ops import cross_entropy, xentropy

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0, "ignore_index": 2},
]


def exact_loss(logits, target, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """Float64, from the formula at the top of the module."""
    x = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = torch.logsumexp(x, -1)
    picked = x.gather(-1, target.clamp(0, x.shape[-1] - 1)[..., None])[..., 0]
    losses = lse - (1 - label_smoothing) * picked - label_smoothing * x.mean(-1) + z_loss * lse**2
    losses = torch.where(target == ignore_index, 0.0, losses)
    count = (target != ignore_index).sum()
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}[reduction]


def make(device, rows, classes, dtype):
    logits = (3 * torch.randn(rows, classes)).to(device, dtype)
    target = torch.randint(0, classes, (rows,)).to(device)
    target[1::3] = -100
    return logits, target


def compare(device, no_worse, rows, classes, dtype, inplace, reduction="mean", **options):
    logits, target = make(device, rows, classes, dtype)
    if "ignore_index" in options:
        target[target < 0] = 0
        target[0] = options["ignore_index"] = min(options["ignore_index"], classes - 1)
        target[-1] = (options["ignore_index"] + 1) % classes  # one row counts
    factor = torch.randn((), device=device).abs() + 0.5

    def both(x, function, **more):
        loss = function(x, target, reduction=reduction, **options, **more)
        weights = torch.linspace(0.5, 2, rows, device=device, dtype=loss.dtype) if reduction == "none" else 1
        return loss, torch.autograd.grad((loss * weights).sum() * factor.to(loss.dtype), x)[0]

    expected = both(logits.double().requires_grad_(), exact_loss)
    with fusedops.use("plain"):
        plain = both(logits.clone().requires_grad_(), cross_entropy)
    with fusedops.use("triton"):
        ours = both(logits.clone().requires_grad_() * 1, cross_entropy, inplace=inplace)
    for mine, its, exact in zip(ours, plain, expected, strict=True):
        no_worse(mine, its, exact, floor=max(torch.finfo(mine.dtype).eps, 1e-6), scale=1 if mine.dim() < 2 else 0.1)
    assert (ours[1][target == options.get("ignore_index", -100)] == 0).all()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "default")
def test_against_float64(device, triton_backend, no_worse, options, dtype, inplace):
    for rows, classes in ((5, 7), (4, 1000), (2, 2 if "ignore_index" in options else 1)):
        for reduction in ("mean", "none"):
            compare(device, no_worse, rows, classes, dtype, inplace, reduction, **options)
    compare(device, no_worse, 7, 65, dtype, inplace, "sum", **options)


@pytest.mark.parametrize("inplace", [False, True])
def test_rows_in_chunks(device, triton_backend, no_worse, monkeypatch, inplace):
    """The form of many classes, made to take few."""
    from fusedops.ops import xentropy_kernels

    monkeypatch.setattr(xentropy_kernels, "ROWS", ())
    monkeypatch.setattr(xentropy_kernels, "CHUNKS", ((64, 32, 32),))
    monkeypatch.setattr(xentropy_kernels, "processors", lambda device: 1)  # several rows a program
    monkeypatch.setattr(xentropy_kernels, "GRADIENT", (32, 4))
    monkeypatch.setattr(xentropy_kernels, "SCALE", (32, 4, 1))
    for options in OPTIONS:
        for classes in (2, 32, 100):
            compare(device, no_worse, 5, classes, torch.float32, inplace, **options)


def test_as_torch_counts_and_smooths(device, backend):
    logits, target = make(device, 12, 50, torch.float32)
    for smoothing in (0.0, 0.3):
        for reduction in ("mean", "sum", "none"):
            expected = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
            found = cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
            torch.testing.assert_close(found, expected)
    batched = cross_entropy(logits.view(3, 4, 50), target.view(3, 4).int().long(), reduction="none")
    assert batched.shape == (3, 4) and batched.dtype == torch.float32


def test_nothing_counts(device, backend):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    target = torch.full((3,), -100, device=device)
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0
    empty = torch.zeros(0, 5, device=device, requires_grad=True)
    for inplace in (False, True):
        loss = cross_entropy(empty, target[:0], reduction="sum", inplace=inplace)
        assert loss == 0 and torch.autograd.grad(loss, empty)[0].shape == (0, 5)


def test_extreme_logits(device, backend):
    logits = torch.full((4, 40), -float("inf"), device=device)
    logits[:, 3] = 0.0
    logits[1] = torch.linspace(-3e4, 3e4, 40)
    target = torch.tensor([3, 39, 3, 3], device=device)
    torch.testing.assert_close(cross_entropy(logits, target, reduction="none"), torch.zeros(4, device=device))


def test_the_gradient_takes_the_logits_place(device, triton_backend):
    logits, target = make(device, 6, 30, torch.bfloat16)
    x = logits.clone().requires_grad_() * 1  # not a leaf
    place = x.data_ptr()
    gradient = torch.autograd.grad(cross_entropy(x, target, inplace=True), x, retain_graph=True)[0]
    assert gradient.data_ptr() == place
    reference = logits.clone().requires_grad_()
    expected = torch.autograd.grad(cross_entropy(reference, target), reference)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=1e-2)
    loss = cross_entropy(logits.clone().requires_grad_() * 1, target, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by an earlier backward"):
        loss.backward()


def test_strided_rows_and_wrong_inputs(device, backend):
    storage, target = make(device, 6, 40, torch.float32)
    expected = F.cross_entropy(storage[:, 3:20].contiguous(), target.clamp(max=16))
    torch.testing.assert_close(cross_entropy(storage[:, 3:20], target.clamp(max=16)), expected)
    torch.testing.assert_close(
        cross_entropy(storage.t()[:6], target[:6] % 6 * 0), F.cross_entropy(storage.t()[:6], target * 0)
    )
    for options, message in (
        ({"reduction": "max"}, "reduction 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be within"),
        ({"softcap": -1.0}, "softcap must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(storage, target, **options)
    with pytest.raises(ValueError, match=r"need targets \(6,\), not \(5,\)"):
        cross_entropy(storage, target[:5])
    with pytest.raises(ValueError, match="not torch.float32, torch.float32"):
        cross_entropy(storage, target.float())


def test_a_target_outside_the_classes_is_nan(device, triton_backend):
    losses = cross_entropy(torch.zeros(3, 4, device=device), torch.tensor([0, 4, -1], device=device), reduction="none")
    assert losses.isnan().tolist() == [False, True, True]


def test_registered_and_compiled(device, triton_backend):
    logits, target = make(device, 4, 20, torch.bfloat16)
    logits.requires_grad_()
    torch.library.opcheck(xentropy.loss_forward.operator, (logits, target, -100, 0.1, 0.0, 0.0))

    def step(x):
        return cross_entropy(x * 2, target, label_smoothing=0.1, inplace=True)

    expected, found = step(logits), torch.compile(step, fullgraph=True, backend="aot_eager")(logits)
    torch.testing.assert_close(found, expected)
    pair = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*pair, atol=1e-3, rtol=1e-2)


def test_repeats_to_the_bit(device, triton_backend):
    logits, target = make(device, 8, 100, torch.float32)
    results = []
    for _ in range(2):
        x = logits.clone().requires_grad_()
        loss = cross_entropy(x, target, label_smoothing=0.1)
        results.append((loss, torch.autograd.grad(loss, x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, triton_backend):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rows, classes = 2**14 + 5, 2**17 + 64
    logits = torch.randn(rows, classes, device=device, dtype=torch.bfloat16)
    target = torch.randint(0, classes, (rows,), device=device)
    tail = logits[-3:].clone().requires_grad_()
    expected = cross_entropy(tail, target[-3:], reduction="sum")
    x = logits.requires_grad_()
    losses = cross_entropy(x, target, reduction="none", inplace=True)
    torch.testing.assert_close(losses[-3:].sum(), expected)
    losses.sum().backward()
    torch.testing.assert_close(x.grad[-3:], torch.autograd.grad(expected, tail)[0])


@pytest.mark.gpu
def test_captured_and_replayed(device, triton_backend):
    logits, target = make(device, 64, 1000, torch.bfloat16)
    x = logits.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(cross_entropy(x, target), x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(cross_entropy(x, target), x)[0]
    x.data.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, torch.autograd.grad(cross_entropy(x, target), x)[0])
