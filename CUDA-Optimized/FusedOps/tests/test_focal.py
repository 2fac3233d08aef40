"""Focal loss: against the definition in float64."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.ops import focal, focal_loss


def exact_loss(x, target, classes, alpha, gamma, smoothing):
    """Float64, element by element from the formula."""
    x = x[..., :classes]
    p = torch.sigmoid(x)
    hot = torch.nn.functional.one_hot(target.clamp(min=0), x.shape[-1]) * (target >= 0)[..., None]
    label = hot * (1 - smoothing) + smoothing / 2
    p_t = hot * p + (1 - hot) * (1 - p)
    alpha_t = hot * alpha + (1 - hot) * (1 - alpha)
    losses = alpha_t * (1 - p_t) ** gamma * -(label * p.log() + (1 - label) * (1 - p).log())
    return (losses * (target != -2)[..., None]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gamma, smoothing", [(2.0, 0.0), (1.5, 0.1), (0.0, 0.0)])
def test_against_float64(device, triton_backend, no_worse, dtype, gamma, smoothing):
    for shape, classes in (((1,), 1), ((12, 5), 8), ((7,), 1000), ((3, 40), 5)):
        padded = classes + (3 if classes > 1 else 0)
        x = (3 * torch.randn(*shape, padded, device=device)).to(dtype)
        target = torch.randint(-2, classes, shape, device=device)
        count = torch.tensor([3.0], device=device)
        options = {"num_classes": classes, "alpha": 0.3, "gamma": gamma, "label_smoothing": smoothing}
        wide = x.double().requires_grad_()
        loss = exact_loss(wide, target, classes, 0.3, gamma, smoothing) / 3
        expected = [loss, torch.autograd.grad(loss * 2, wide)[0]]
        results = {}
        for backend in ("plain", "triton"):
            own = x.clone().requires_grad_()
            with fusedops.use(backend):
                loss = focal_loss(own, target, count, **options)
                results[backend] = [loss, torch.autograd.grad(loss * 2, own)[0]]
        for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
            no_worse(ours, plain, exact, floor=max(torch.finfo(ours.dtype).eps, 2e-6))
        gradient = results["triton"][1]
        assert (gradient[..., classes:] == 0).all() and (gradient[target == -2] == 0).all()


def test_extreme_logits_and_nothing(device, backend):
    x = torch.tensor([[80.0, -80.0], [-80.0, 80.0]], device=device, requires_grad=True)
    loss = focal_loss(x, torch.tensor([0, 0], device=device), alpha=0.5)
    torch.testing.assert_close(loss, torch.tensor(80.0, device=device))  # the second row misses both classes
    assert torch.autograd.grad(loss, x)[0].isfinite().all()
    assert focal_loss(x[:0], torch.zeros(0, dtype=torch.long, device=device)) == 0


def test_wrong_inputs_are_refused(device, backend):
    x, target = torch.zeros(3, 4, device=device), torch.zeros(3, dtype=torch.long, device=device)
    for call, message in (
        (lambda: focal_loss(x, target[:2]), r"target \(2,\)"),
        (lambda: focal_loss(x, target, num_classes=5), "num_classes 5"),
        (lambda: focal_loss(x, target.float()), "bad types"),
        (lambda: focal_loss(x, target, gamma=-1), "gamma=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_registered_compiled_and_repeatable(device, triton_backend):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.randint(-2, 5, (6,), device=device)
    torch.library.opcheck(focal.focal_forward.operator, (x, target, 5, 0.25, 2.0, 0.1))

    def step(x):
        return focal_loss(x * 2, target, 4.0)

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x)
    assert torch.equal(found, expected) and torch.equal(expected, step(x))
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (found, expected)))
