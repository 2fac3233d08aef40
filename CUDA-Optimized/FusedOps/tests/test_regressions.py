"""What users of the first version ran into: each case was silently wrong."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import fusedops
from fusedops import amp, ops, optim


@pytest.fixture(autouse=True)
def on_device(device):
    with device:
        yield


def trained(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(data) - data[:, :2]).float().square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
@pytest.mark.parametrize("weights_last", [False, True])
def test_o2_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(kind, weights_last: bool) -> None:
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), device="cpu").to(torch.get_default_device())

    def start(seed: int):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return amp.initialize(model, kind(model.parameters(), lr=1e-2), opt_level="O2", verbosity=0)

    model, optimizer = start(0)
    trained(4, model, optimizer, data)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    expected = trained(3, model, optimizer, data)
    model, optimizer = start(5)
    trained(1, model, optimizer, data)
    if weights_last:
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
    else:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert trained(3, model, optimizer, data) == expected


def test_o2_weights_loaded_alone_are_kept() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), opt_level="O2", verbosity=0)
    data = torch.randn(8, 4)
    trained(1, model, optimizer, data)
    other = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    trained(1, model, optimizer, data)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_scale_loss_before_initialize_is_refused() -> None:
    """In a process of its own, since `initialize` changes what the whole process does."""
    program = "import torch\nfrom fusedops import amp\nwith amp.scale_loss(torch.ones(()), []): pass"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "RuntimeError: Invoked scale_loss before amp.initialize" in done.stderr


def larc(rate: float = 0.1) -> tuple[nn.Parameter, optim.LARC]:
    parameter = nn.Parameter(torch.linspace(0.1, 1.0, 10))
    return parameter, optim.LARC(optim.SGD([parameter], lr=rate, weight_decay=0.1))


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, amp.GradScaler])
def test_larc_under_a_gradient_scaler(scaler_class) -> None:
    plain, wrapped = larc()
    plain.grad = torch.linspace(1.0, 2.0, 10)
    wrapped.step()
    parameter, wrapped = larc()
    scaler = scaler_class("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))  # makes the scale
    parameter.grad = torch.linspace(1.0, 2.0, 10) * 1024
    scaler.step(wrapped)
    scaler.update()
    torch.testing.assert_close(parameter, plain)
    before = parameter.detach().clone()
    parameter.grad = torch.full((10,), float("inf"))
    scaler.step(wrapped)
    scaler.update()
    assert torch.equal(parameter, before) and scaler.get_scale() == 512.0


def test_larc_is_an_optimizer() -> None:
    parameter, wrapped = larc()
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.5)
    parameter.grad = torch.ones(10)
    wrapped.step()
    schedule.step()
    assert wrapped.param_groups[0]["lr"] == wrapped.optim.param_groups[0]["lr"] == 0.05
    wrapped.zero_grad()
    assert parameter.grad is None
    other = larc()[1]
    other.load_state_dict(wrapped.state_dict())
    assert other.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize("master", ["none", "fp32", "remainder"])
def test_a_change_of_layout_takes_the_state_along(backend: str, master: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if master == "none" else torch.bfloat16
    options = {} if master == "none" else {"master_weights": master}
    gradients = [torch.randn(4, 3, 5, 2).to(dtype) for _ in range(4)]
    results = []
    with fusedops.use(backend):
        for changes in (False, True):
            torch.manual_seed(1)
            parameter = nn.Parameter(torch.randn(4, 3, 5, 2).to(dtype))
            optimizer = optim.AdamW([parameter], lr=0.05, **options)
            for number, gradient in enumerate(gradients):
                if changes and number == 2:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
                layout = torch.channels_last if changes and number >= 2 else torch.contiguous_format
                parameter.grad = gradient.contiguous(memory_format=layout)
                optimizer.step()
            results.append(parameter.detach().float())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_momentum_that_begins_later(backend: str) -> None:
    results = []
    with fusedops.use(backend):
        for kind in (torch.optim.SGD, optim.SGD):
            parameter = nn.Parameter(torch.ones(6))
            optimizer = kind([parameter], lr=0.1, momentum=0.0)
            for number in range(4):
                if number == 1:
                    optimizer.param_groups[0]["momentum"] = 0.9
                parameter.grad = torch.linspace(0.5, 1.0, 6)
                optimizer.step()
            results.append(parameter.detach())
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, torch.tanh])
def test_cross_entropy_in_place_does_not_spoil_its_neighbours(function) -> None:
    """The operator before keeps its output for its own derivative: autograd must say that it is gone."""
    raw = torch.randn(4, 7, requires_grad=True)
    with fusedops.use("triton"):
        loss = ops.cross_entropy(function(raw), torch.tensor([0, 1, 2, 3]), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_cross_entropy_in_place_leaves_leaves_alone() -> None:
    logits = torch.randn(4, 7, requires_grad=True)
    before = logits.detach().clone()
    with fusedops.use("triton"):
        ops.cross_entropy(logits, torch.tensor([0, 1, 2, 3]), inplace=True).backward()
    assert torch.equal(logits, before) and logits.grad is not None


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_targets_of_32_bits(backend: str) -> None:
    logits, target = torch.randn(4, 7), torch.tensor([0, 6, 2, 3])
    with fusedops.use(backend):
        torch.testing.assert_close(
            ops.cross_entropy(logits, target.int()), nn.functional.cross_entropy(logits, target), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("through", ["x", "dy"])
def test_a_second_derivative_of_a_kernel_is_an_error_and_not_nothing(triton_backend, through: str) -> None:
    """A penalty on a gradient, beside another loss, would lose its own gradient without a word."""
    x = torch.randn(3, 8, requires_grad=True)
    dy = torch.randn(3, 8, requires_grad=through == "dy")
    y = ops.rms_norm(x, 8)
    (gradient,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="fusedops.norm.*: this derivative cannot be differentiated again"):
        (gradient.square().sum() + x.sum()).backward()
    with fusedops.use("plain"):
        (exact,) = torch.autograd.grad(ops.rms_norm(x, 8), x, dy, create_graph=True)
        torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-5)
        (exact.square().sum() + x.sum()).backward()
    assert x.grad.isfinite().all()


def test_betas_may_be_tensors_and_are_two(backend) -> None:
    ends = []
    for betas in ((0.9, 0.99), (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.99, dtype=torch.float64))):
        p = nn.Parameter(torch.ones(5))
        for make in (optim.AdamW, optim.LAMB, optim.NovoGrad):
            optimizer = make([p], lr=0.1, betas=betas)
            p.grad = torch.arange(5.0)
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)
    with pytest.raises(ValueError, match=r"betas must be two numbers, not \(0.9,\)"):
        optim.AdamW([p], betas=(0.9,))
