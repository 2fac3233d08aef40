"""The optimizers take what torch's take: its choices of an implementation, and hooks around a step."""

from __future__ import annotations

import pytest
import torch

from fusedops.optim import LAMB, SGD, Adagrad, Adam, AdamW, NovoGrad

OPTIMIZERS = [Adam, AdamW, SGD, LAMB, NovoGrad, Adagrad]


def parameters(device):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((20,), (3, 5))]


def gradients(mine, step=0):
    generator = torch.Generator().manual_seed(7 + step)
    for p in mine:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def values(mine):
    return torch.cat([p.detach().flatten() for p in mine])


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_torchs_choices_of_an_implementation_are_taken(device, make):
    mine, twins = parameters(device), parameters(device)
    optimizer = make(mine, lr=1e-2, foreach=False, fused=True, capturable=True, differentiable=False)
    oracle = make(twins, lr=1e-2)
    for step in range(2):
        for chosen, stepped in ((mine, optimizer), (twins, oracle)):
            gradients(chosen, step)
            stepped.step()
    assert torch.equal(values(mine), values(twins))
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        make(mine, differentiable=True)
    with pytest.raises(ValueError, match="`fused` and `foreach` cannot be `True` together"):
        make(mine, fused=True, foreach=True)
    with pytest.raises(TypeError, match="fuse"):
        make(mine, fuse=True)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_hooks_run_once(device, make):
    mine = parameters(device)
    gradients(mine)
    make(parameters(device), lr=1e-2)  # torch marks a class's step when it is first made
    optimizer, ran = make(mine, lr=1e-2), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    optimizer.step()
    assert ran == ["before", "after"]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("master", ["fp32", "remainder", "stochastic", "none"])
def test_parameters_set_from_outside(backend, device, make, master):
    """They are where the next step starts; masters of the others keep their bits."""
    mine = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters(device)]
    optimizer = make(mine, lr=1e-3, weight_decay=0.0, master_weights=master)
    for p in mine:
        p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    kept = mine[0].detach().clone()
    masters = [optimizer.state[p].get("master", torch.zeros(())).clone() for p in mine]
    with torch.no_grad():
        mine[1][:2] = 3.0
    optimizer.follow_parameters()
    exact = backend == "plain" or device.type == "cuda"  # the interpreter cuts off where the hardware rounds
    if master == "fp32" and exact:
        assert torch.equal(optimizer.state[mine[0]]["master"], masters[0])
        assert torch.equal(optimizer.state[mine[1]]["master"][2], masters[1][2]), "not rounded anew"
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert (mine[1][:2] == 3.0).all() and torch.equal(mine[0], kept)
