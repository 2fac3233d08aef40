"""What surrounds a step: loss scaling, clipping, skipped steps, schedulers, checkpoints, captured graphs."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import fusedops
from fusedops.optim import LAMB, SGD, Adagrad, Adam, AdamW, NovoGrad, from_apex_state_dict

MAKERS = {
    "adamw": lambda p, **o: AdamW(p, lr=1e-2, **o),
    "sgd": lambda p, **o: SGD(p, lr=1e-2, momentum=0.9, **o),
    "adagrad": lambda p, **o: Adagrad(p, lr=1e-2, **o),
    "lamb": lambda p, **o: LAMB(p, lr=1e-2, **o),
    "novograd": lambda p, **o: NovoGrad(p, lr=1e-2, **o),
}


def parameters(device, dtype=torch.float32, shapes=((20,), (3, 5))):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def gradients(mine, step=0, factor=1.0):
    generator = torch.Generator().manual_seed(7 + step)
    for p in mine:
        p.grad = (torch.randn(p.shape, generator=generator) * factor).to(p.device, p.dtype)


def values(mine):
    return torch.cat([p.detach().double().flatten() for p in mine])


@pytest.mark.parametrize("name", MAKERS)
def test_scale_found_inf_and_skip(backend, device, name):
    """Unscaled in the step; with an infinity nothing moves, the step counts not, gradients are cleared all the same."""
    mine, twins = parameters(device), parameters(device)
    optimizer, oracle = MAKERS[name](mine, zero_grads=True), MAKERS[name](twins)
    for step, overflow in enumerate([False, True, False]):
        gradients(mine, step, 1024.0)
        gradients(twins, step)
        before = values(mine)
        optimizer.grad_scale = torch.tensor([1024.0], device=device)
        optimizer.found_inf = torch.tensor([float(overflow)], device=device)
        optimizer.step()
        assert optimizer.skipped.item() == overflow
        assert all(p.grad.abs().max() == 0 for p in mine)
        if overflow:
            assert torch.equal(values(mine), before)
        else:
            oracle.step()
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-6, atol=1e-6)
    assert [state["step"].item() for state in optimizer.state.values()] == [2.0, 2.0]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_skip_nonfinite_without_a_scaler(backend, device, name, value):
    mine = parameters(device)
    optimizer = MAKERS[name](mine, skip_nonfinite=True)
    gradients(mine)
    optimizer.step()
    before = values(mine)
    gradients(mine)
    mine[1].grad[2, 4] = value
    optimizer.step()
    assert optimizer.skipped.item() == 1 and torch.equal(values(mine), before)
    gradients(mine)
    optimizer.step()
    assert optimizer.skipped.item() == 0 and not torch.equal(values(mine), before)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "novograd"])
@pytest.mark.parametrize("factor", [0.01, 10.0])
def test_clip_inside_the_step(backend, device, name, factor):
    """As clipping before the step, over groups and dtypes; the gradients stay as they were."""
    mine = parameters(device) + parameters(device, torch.bfloat16, ((9,),))
    twins = copy.deepcopy(mine)
    groups = [{"params": mine[:1]}, {"params": mine[1:], "weight_decay": 0.1}]
    twin_groups = [{"params": twins[:1]}, {"params": twins[1:], "weight_decay": 0.1}]
    optimizer = MAKERS[name](groups, max_grad_norm=1.0)
    oracle = MAKERS[name](twin_groups)
    for step in range(3):
        gradients(mine, step, factor * 8.0)
        gradients(twins, step, factor)
        kept = [p.grad.clone() for p in mine]
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_([t for t in twins], 1.0)
        oracle.step()
        torch.testing.assert_close(optimizer.grad_norm[0], norm, rtol=3e-3, atol=0)
        assert all(torch.equal(p.grad, k) for p, k in zip(mine, kept, strict=True))
    torch.testing.assert_close(values(mine[:2]), values(twins[:2]), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(values(mine[2:]), values(twins[2:]), rtol=1e-2, atol=1e-2)


def test_grad_scaler_protocol(backend, device):
    """torch's own scaler drives the optimizer: an overflow is skipped and the scale backs off."""
    mine, twins = parameters(device), parameters(device)
    optimizer, oracle = AdamW(mine, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = sum((p * (step + 1)).square().sum() for p in mine)
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step != 1:
            oracle.zero_grad()
            sum((p * (step + 1)).square().sum() for p in twins).backward()
            oracle.step()
    assert scales == [4.0, 2.0, 2.0, 4.0, 4.0]
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-5, atol=1e-5)


def test_grad_scaler_after_unscale(backend, device):
    mine = parameters(device)
    optimizer = SGD(mine, lr=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=16.0)
    scaler.scale(sum(p.sum() for p in mine)).backward()
    scaler.unscale_(optimizer)
    before = values(mine)
    scaler.step(optimizer)
    torch.testing.assert_close(values(mine), before - 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(backend, device, tensor_lr):
    mine, twins = parameters(device), parameters(device)
    lr = torch.tensor(0.5, device=device) if tensor_lr else 0.5
    optimizer, oracle = SGD(mine, lr=lr), torch.optim.SGD(twins, lr=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.1) for o in (optimizer, oracle)]
    for step in range(5):
        gradients(mine, step)
        gradients(twins, step)
        for o, s in zip((optimizer, oracle), schedulers, strict=True):
            o.step()
            s.step()
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-6, atol=1e-6)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5 * 0.1**2)


def test_closure(backend, device):
    mine = parameters(device)
    optimizer = SGD(mine, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in mine)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first


@pytest.mark.parametrize("name", ["adamw", "adagrad", "sgd"])
def test_state_goes_to_torch_and_back(backend, device, name):
    """Three steps here, three in torch's optimizer from the state dict, three here again: nine steps of torch's."""
    theirs = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    }[name]
    mine, twins = parameters(device), parameters(device)
    oracle = theirs(twins)
    for step in range(9):
        gradients(twins, step)
        oracle.step()
    state = None
    for third, make in enumerate((MAKERS[name], theirs, MAKERS[name])):
        optimizer = make(mine)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(3 * third, 3 * third + 3):
            gradients(mine, step)
            optimizer.step()
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-6, atol=1e-6)
    assert set(state["state"][0]) >= {"step"} | set(oracle.state_dict()["state"][0])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("master", ["none", "fp32", "remainder", "stochastic"])
def test_resumed_is_uninterrupted(backend, device, name, master):
    through = parameters(device, torch.bfloat16)
    optimizer = MAKERS[name](through, master_weights=master)
    for step in range(4):
        if step == 2:
            resumed = copy.deepcopy(through)
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
        gradients(through, step)
        optimizer.step()
    buffer.seek(0)
    second = MAKERS[name](resumed, master_weights=master)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for step in (2, 3):
        gradients(resumed, step)
        second.step()
    assert torch.equal(values(through), values(resumed))
    for p, q in zip(through, resumed, strict=True):
        for key, value in optimizer.state[p].items():
            assert second.state[q][key].dtype == value.dtype and torch.equal(second.state[q][key], value), key


@pytest.mark.parametrize("source, target", [("fp32", "remainder"), ("remainder", "fp32")])
def test_masters_change_their_form_without_loss(backend, device, source, target):
    through, switched = parameters(device, torch.bfloat16), parameters(device, torch.bfloat16)
    optimizer = AdamW(through, lr=1e-2, master_weights=source)
    gradients(through)
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(through, switched, strict=True):
            q.copy_(p)
    other = AdamW(switched, lr=1e-2, master_weights=target)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (1, 2):
        gradients(through, step)
        gradients(switched, step)
        optimizer.step()
        other.step()
    assert target in ("remainder", "fp32")
    from fusedops.optim import rounding

    pairs = [(optimizer, through), (other, switched)] if source == "fp32" else [(other, switched), (optimizer, through)]
    (full, full_parameters), (split, split_parameters) = pairs
    for p, q in zip(full_parameters, split_parameters, strict=True):
        assert torch.equal(full.state[p]["master"], rounding.join(q.detach(), split.state[q]["remainder"]))


def test_torch_moments_of_16_bits_are_not_recast(device):
    mine = parameters(device, torch.bfloat16)
    theirs = torch.optim.AdamW(mine, lr=1e-2)
    gradients(mine)
    theirs.step()
    optimizer = AdamW(mine, lr=1e-2)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state[mine[0]]["exp_avg"].dtype == torch.bfloat16
    own = AdamW(mine, lr=1e-2)
    own.step()
    own_again = AdamW(mine, lr=1e-2)
    own_again.load_state_dict(own.state_dict())
    assert own_again.state[mine[0]]["exp_avg"].dtype == torch.float32
    optimizer.step()  # bfloat16 moments work as they are


def test_amsgrad_state_is_refused(device):
    mine = parameters(device)
    theirs = torch.optim.AdamW(mine, amsgrad=True)
    gradients(mine)
    theirs.step()
    with pytest.raises(ValueError, match="does not support amsgrad, on in group 0"):
        AdamW(mine).load_state_dict(theirs.state_dict())


def test_parameters_without_gradients_wait(backend, device):
    """Each parameter counts its own steps, as in torch."""
    mine, twins = parameters(device), parameters(device)
    optimizer, oracle = Adam(mine, lr=0.1), torch.optim.Adam(twins, lr=0.1)
    for step in range(4):
        for some in (mine, twins):
            gradients(some, step)
            if step in (0, 2):
                some[1].grad = None
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-6, atol=1e-6)
    assert [optimizer.state[p]["step"].item() for p in mine] == [4, 2]


@pytest.mark.parametrize("change", ["gradient", "data", "backend", "layout", "dtype"])
def test_what_changes_between_steps_is_seen(triton_backend, device, change):
    mine, twins = parameters(device), parameters(device)
    optimizer, oracle = AdamW(mine, lr=0.1, zero_grads=True), torch.optim.AdamW(twins, lr=0.1)
    for step in range(4):
        for some in (mine, twins):
            for index, p in enumerate(some):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                p.grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + index)))
        if step == 2:
            if change == "gradient":
                mine[0].grad = mine[0].grad.clone()
            elif change == "data":
                mine[0].data = mine[0].data.clone()
            elif change == "layout":
                mine[1].grad = mine[1].grad.t().contiguous().t()
            elif change == "dtype":
                mine[0].grad_dtype = None
                mine[0].grad = mine[0].grad.bfloat16()
        for p, q in zip(mine, twins, strict=True):
            q.grad.copy_(p.grad)
        with fusedops.use("plain" if change == "backend" and step in (1, 2) else "triton"):
            optimizer.step()
        oracle.step()
        assert all(not p.grad.any() for p in mine)
        assert all(not bucket.gradients for _, found in optimizer._buckets.values() for bucket in found)
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-5, atol=1e-5)


def test_groups_added_copies_and_pickles(backend, device):
    mine = parameters(device)
    optimizer = AdamW(mine[:1], lr=0.1, max_grad_norm=1.0)
    gradients(mine)
    optimizer.step()
    optimizer.add_param_group({"params": mine[1:], "lr": 0.0})
    before = values(mine[1:])
    optimizer.step()
    assert torch.equal(values(mine[1:]), before) and len(optimizer.state) == 2
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.options.max_grad_norm == 1.0
        for group in twin.param_groups:
            gradients(group["params"])
        twin.step()


def test_nothing_to_do(backend, device):
    optimizer = AdamW(parameters(device), max_grad_norm=1.0, skip_nonfinite=True)
    optimizer.step()
    assert not optimizer.state


def apex_state(kind, mine):
    numbers = list(range(len(mine)))
    group = {"lr": 1e-2, "weight_decay": 0.0, "params": numbers}
    moments = [torch.randn(p.shape) for p in mine]
    squares = [torch.rand(p.shape) for p in mine]
    if kind == "adam":
        group |= {
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "bias_correction": True,
            "step": torch.tensor(3, dtype=torch.int32),
        }
        state = {i: {"exp_avg": moments[i], "exp_avg_sq": squares[i]} for i in numbers}
    elif kind == "sgd":
        group |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
        state = {i: {"momentum_buffer": moments[i]} for i in numbers}
    elif kind == "novograd":
        norms = [torch.tensor([0.5, 0.25]), torch.tensor([2.0])]
        group |= {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": 1, "step": 3, "exp_avg_sq": norms}
        state = {i: {"exp_avg": moments[i]} for i in numbers}
    else:
        state = {i: {"sum": squares[i]} for i in numbers}
    return {"state": state, "param_groups": [group]}, moments, squares


def test_apex_adam_state(backend, device):
    mine, twins = parameters(device), parameters(device)
    saved, moments, squares = apex_state("adam", mine)
    optimizer = Adam(mine, lr=1.0, decoupled_weight_decay=True)
    optimizer.load_state_dict(from_apex_state_dict(saved, optimizer))
    oracle = torch.optim.AdamW(twins, lr=1e-2, weight_decay=0.0)
    for p, m, v in zip(twins, moments, squares, strict=True):
        oracle.state[p] = {"step": torch.tensor(3.0), "exp_avg": m.to(device), "exp_avg_sq": v.to(device)}
    for some, o in ((mine, optimizer), (twins, oracle)):
        gradients(some)
        o.step()
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-6, atol=1e-6)
    group = optimizer.param_groups[0]
    assert group["lr"] == 1e-2 and group["decoupled_weight_decay"] and "step" not in group


def test_apex_masters_novograd_and_mismatches(device):
    mine = parameters(device, torch.float16) + parameters(device, torch.float32, ((4,),))
    saved, _, _ = apex_state("novograd", mine)
    optimizer = NovoGrad(mine, master_weights="fp32")
    masters = [p.detach().float() + 1e-4 for p in mine]
    optimizer.load_state_dict(from_apex_state_dict(saved, optimizer, masters))
    assert [optimizer.state[p]["exp_avg_norm"].item() for p in mine] == [0.5, 0.25, 2.0]
    assert torch.equal(optimizer.state[mine[0]]["master"], masters[0])
    for kind, make in (("sgd", SGD), ("adagrad", Adagrad)):
        loaded = make(mine)
        loaded.load_state_dict(from_apex_state_dict(apex_state(kind, mine)[0], loaded))
        assert loaded.state[mine[0]]["step"].item() == 1
    with pytest.raises(ValueError, match="1 masters for 3 parameters"):
        from_apex_state_dict(saved, optimizer, masters[:1])
    with pytest.raises(ValueError, match="group 0 has 3 parameters in the state, 2 in the optimizer"):
        from_apex_state_dict(saved, NovoGrad(mine[:2]))
    with pytest.raises(ValueError, match="1 groups in the state, 2 in the optimizer"):
        from_apex_state_dict(saved, NovoGrad([{"params": mine[:1]}, {"params": mine[1:]}]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("master", ["none", "remainder"])
def test_captured_steps(device, name, master):
    """Replays with a changed tensor rate, scale and gradients are the eager steps; an overflow in a replay is
    skipped.
    """
    outcomes = []
    for captured in (False, True):
        mine = parameters(device, torch.bfloat16, ((5000,), (33, 7)))
        optimizer = MAKERS[name](mine, master_weights=master, max_grad_norm=5.0, zero_grads=True)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, device=device)
        optimizer.grad_scale = torch.ones(1, device=device)
        optimizer.found_inf = torch.zeros(1, device=device)
        gradients(mine)
        optimizer.step()
        kept = [torch.empty_like(p) for p in mine]
        for p, gradient in zip(mine, kept, strict=True):
            p.grad = gradient.zero_()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(1, 6):
            generator = torch.Generator().manual_seed(step)
            for gradient in kept:
                gradient.copy_(torch.randn(gradient.shape, generator=generator))
            optimizer.param_groups[0]["lr"].fill_(1e-2 / step)
            optimizer.grad_scale.fill_(float(step))
            optimizer.found_inf.fill_(float(step == 3))
            if captured:
                graph.replay()
            else:
                optimizer.step()
            assert all(not gradient.any() for gradient in kept)
        outcomes.append(values(mine))
        assert optimizer.state[mine[0]]["step"].item() == 5
    assert torch.equal(*outcomes)


@pytest.mark.gpu
def test_no_synchronisation_in_a_step(device):
    mine = parameters(device, torch.bfloat16)
    optimizer = AdamW(mine, master_weights="fp32", max_grad_norm=1.0, skip_nonfinite=True)
    gradients(mine)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p in mine:
            p.grad = p.grad.clone()
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_parameters_beyond_32_bits(device):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    p = torch.nn.Parameter(torch.zeros(2**31 + 33, dtype=torch.bfloat16, device=device))
    p.grad = torch.ones_like(p)
    with fusedops.use("triton"):
        SGD([p], lr=0.5, max_grad_norm=1e9, zero_grads=True).step()
    assert bool((p[-40:] == -0.5).all()) and p.max().item() == -0.5 and p.min().item() == -0.5
    assert not p.grad[-40:].any()


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one():
    device = torch.device("cuda:1")
    mine, twins = parameters(device), parameters(device)
    optimizer, oracle = AdamW(mine, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    with torch.cuda.device(0), fusedops.use("triton"):
        for step in range(3):
            gradients(mine, step)
            gradients(twins, step)
            optimizer.step()
            oracle.step()
    torch.testing.assert_close(values(mine), values(twins), rtol=1e-6, atol=1e-6)
