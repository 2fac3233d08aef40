"""amp: the table of levels, the rules of the scale, training at each level, state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusedops import amp
from fusedops.amp.setup import State
from fusedops.optim import LARC, SGD, AdamW


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    State.properties, State.enabled, State.loss_scalers = None, False, []


def make_model(device):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to(device)


def data(device):
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2)).to(device)
    return x, (x[:, :1] * 2 - x[:, 1:2]).sin()


def train(model, optimizer, device, steps=30):
    x, y = data(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=0.02)])
def test_training_at_each_level(backend, device, opt_level, make):
    reference = make_model(device)
    x, y = data(device)
    optimizer = make(reference.parameters())
    expected = []
    for _ in range(30 if backend == "plain" else 8):
        optimizer.zero_grad()
        loss = (reference(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model = make_model(device)
    model, optimizer = amp.initialize(
        model, make(model.parameters()), opt_level=opt_level, loss_scale=128.0, verbosity=0
    )
    losses = train(model, optimizer, device, len(expected))
    tolerance = {"O0": 1e-4, "O1": 0.05, "O2": 0.05, "O3": 0.15}[opt_level]
    assert losses[0] == pytest.approx(expected[0], rel=0.02)
    assert losses[-1] == pytest.approx(expected[-1], abs=tolerance)
    assert losses[-1] < 0.8 * losses[0]
    half = opt_level in ("O2", "O3")
    assert model[0].weight.dtype == (torch.float16 if half else torch.float32)
    assert model[1].weight.dtype == (torch.float16 if opt_level == "O3" else torch.float32)
    assert model(x).dtype == torch.float32
    assert all(v.dtype == torch.float32 for v in model.state_dict().values() if v.is_floating_point())
    if opt_level != "O3":
        assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))


def test_masters_and_model_agree(device):
    model = make_model(device)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level="O2")
    train(model, optimizer, device, 2)
    masters = list(amp.master_params(optimizer))
    for p, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(p.float(), master.to(p.dtype).float())
    extra = nn.Parameter(torch.ones(3, device=device).half())
    optimizer.add_param_group({"params": extra})
    assert list(amp.master_params(optimizer))[-1].dtype == torch.float32


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_overflow_skips_one_step_and_halves_the_scale(device, opt_level, capsys):
    model = make_model(device)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=opt_level)
    scaler = State.loss_scalers[0]
    assert scaler.loss_scale() == 2.0**16
    x, y = data(device)
    before = [p.detach().clone() for p in model.parameters()]
    for factor, moved in ((float("inf"), False), (1e-3, True)):
        optimizer.zero_grad()
        with amp.scale_loss((model(x) - y).square().mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        changed = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert changed == moved
    assert scaler.loss_scale() == 2.0**15 and scaler.unskipped == 1
    message = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert capsys.readouterr().out.splitlines() == [message]


def test_rules_of_the_dynamic_scale():
    scaler = amp.LossScaler("dynamic", max_loss_scale=2.0**17, min_loss_scale=2.0**15)
    for _ in range(1999):
        assert scaler.update(False) is False
    assert scaler.loss_scale() == 2.0**16
    scaler.update(False)
    assert scaler.loss_scale() == 2.0**17 and scaler.unskipped == 0
    for _ in range(2000):
        scaler.update(False)
    assert scaler.loss_scale() == 2.0**17, "not above the maximum"
    scaler.update(False)
    assert [scaler.update(True) for _ in range(4)] == [True] * 4
    assert scaler.loss_scale() == 2.0**15 and scaler.unskipped == 0
    static = amp.LossScaler(64.0)
    assert static.update(True) is False and static.loss_scale() == 64.0
    assert amp.LossScaler("dynamic", max_loss_scale=2.0**10).loss_scale() == 2.0**10


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_gradients_of_several_losses_and_backward_passes_add_up(device, opt_level):
    """Two losses with scales of their own, the second of two passes with delayed unscaling: the sum of the three
    gradients.
    """
    model = make_model(device)
    reference = copy.deepcopy(model).double()
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=opt_level, num_losses=2)
    State.loss_scalers[1].update(True)  # another scale
    x, y = data(device)
    with amp.scale_loss((model(x) - y).square().mean(), optimizer, loss_id=0) as scaled:
        scaled.backward()
    with amp.scale_loss(model(x).abs().mean(), optimizer, loss_id=1, delay_unscale=True) as scaled:
        scaled.backward()
    with amp.scale_loss((model(x) * 0.5).square().mean(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    xd, yd = x.double(), y.double()
    loss = (reference(xd) - yd).square().mean() + reference(xd).abs().mean() + (reference(xd) * 0.5).square().mean()
    loss.backward()
    for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        tolerance = 1e-5 if opt_level == "O0" else 3e-2
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=tolerance, atol=tolerance)


def test_state_goes_round(device):
    model = make_model(device)
    amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level="O1", num_losses=2)
    State.loss_scalers[1].update(True)
    State.loss_scalers[0].update(False)
    state = amp.state_dict()
    assert state == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1},
        "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
    }
    model = make_model(device)
    amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level="O1", num_losses=2)
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    with pytest.warns(UserWarning, match="containing 1 loss_scalers, while 2 are in use"):
        amp.load_state_dict({"loss_scaler0": state["loss_scaler0"]})
    with pytest.raises(RuntimeError, match="Unexpected key.s. in state_dict: other"):
        amp.load_state_dict({**state, "other": {}})


def test_structures_and_disabled(device):
    models = [make_model(device), make_model(device)]
    optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
    assert amp.initialize(models, optimizers[0], enabled=False) == (models, optimizers[0])
    loss = torch.tensor(2.0, requires_grad=True)
    with amp.scale_loss(loss, optimizers[0]) as same:
        assert same is loss
    given_models, given_optimizers = amp.initialize(models, optimizers, opt_level="O0")
    assert given_models is models and given_optimizers is optimizers
    alone = make_model(device)
    assert amp.initialize(alone) is alone


@pytest.mark.parametrize(
    "options, message",
    [
        ({"opt_level": "01"}, "the prefix O is the letter O"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "O1 inserts casts around functions"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "is for opt_level='O1', not 'O2'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 has no meaning with O1"),
        ({"opt_level": "O1", "master_weights": True}, "master_weights has no meaning with O1"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "must be a boolean, the string .* not 'yes'"),
    ],
)
def test_combinations_without_sense(device, options, message):
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(make_model(device), **options)


def test_what_cannot_be_initialized(device):
    with pytest.raises(RuntimeError, match="Found param 0.weight with type torch.float16"):
        amp.initialize(make_model(device).half())
    with pytest.raises(RuntimeError, match="wrapped for parallel training"):
        amp.initialize(nn.DataParallel(make_model(device)))
    model = make_model(device)
    optimizer = LARC(SGD(model.parameters(), lr=0.1))
    amp.initialize(model, optimizer, opt_level="O0")
    with pytest.raises(RuntimeError, match="only be passed through amp.initialize once"):
        amp.initialize(model, optimizer, opt_level="O0")
    train(model, optimizer, device, 2)
    with (
        pytest.raises(RuntimeError, match="loss_id 3 of 1 losses"),
        amp.scale_loss(torch.ones(1), optimizer, loss_id=3),
    ):
        pass
    with pytest.raises(RuntimeError, match="was not passed to amp.initialize"):
        with amp.scale_loss(torch.ones(1), SGD(model.parameters())):
            pass
    with pytest.raises(RuntimeError, match="does not support closure"):
        optimizer.step(lambda: 1.0)


def test_functions_in_a_chosen_precision(device):
    seen = []

    def note(*tensors):
        seen.append([t.dtype for t in tensors])
        return tensors[0]

    class Model(nn.Module):
        def forward(self, x):
            for function in (amp.half_function(note), amp.float_function(note), amp.promote_function(note)):
                function(x, x.half())
            with amp.disable_casts():
                seen.append([torch.mm(x, x).dtype])
            return torch.mm(x, x)

    model = amp.initialize(Model(), opt_level="O1")
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    out = model(torch.ones(2, 2, device=device))
    assert seen == [[half, half], [torch.float32] * 2, [torch.float32] * 2, [torch.float32]]
    assert out.dtype == torch.float32
    amp.half_function(note)(torch.ones(1))
    assert seen[-1] == [torch.float32], "outside of amp nothing is cast"

    class Namespace:
        function = staticmethod(note)

    amp.register_float_function(Namespace, "function")
    assert Namespace.function is not note
    with pytest.raises(ValueError, match="No function named other"):
        amp.register_half_function(Namespace, "other")


def test_grad_scaler_needs_no_pass_of_its_own(backend, device):
    """The scale moves as with torch's scaler, and so do the parameters."""
    ends = []
    for make in (torch.amp.GradScaler, amp.GradScaler):
        model = make_model(device)
        optimizer = AdamW(model.parameters(), lr=0.05, max_grad_norm=1.0)
        scaler = make(device.type, init_scale=8.0, growth_interval=2)
        x, y = data(device)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        ends.append((scales, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert ends[0][0] == ends[1][0] == [8.0, 4.0, 4.0, 8.0, 8.0]
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-5, atol=1e-6)


def test_grad_scaler_with_others(device):
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler(device.type)
    scaler.scale(model(data(device)[0]).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    fused = AdamW(model.parameters())
    optimizer.zero_grad()
    scaler.scale(torch.ones((), device=device))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(fused)
    with pytest.raises(AssertionError):
        amp.GradScaler(device.type).step(fused)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_runs_its_own_weights(device, opt_level, duplicate):
    model = make_model(device)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=opt_level, loss_scale=128.0)
    twin = duplicate(model).eval()
    model.eval()
    x, _ = data(device)
    assert torch.equal(twin(x), model(x))
    before = model(x)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), torch.zeros_like(before)) and torch.equal(model(x), before)
    twin.load_state_dict(model.state_dict())  # the original's optimizer has nothing to do with it
    assert torch.equal(twin(x), before)
    twin(x).sum().backward()
    assert all(p.grad is None for p in model.parameters()) and twin[0].weight.grad is not None
    train(model.train(), optimizer, device, 1)
    assert torch.equal(twin(x), before) and not torch.equal(model.eval()(x), before)


@pytest.mark.parametrize("opt_level", ["O0", "O2"])
def test_an_exception_in_the_block_loses_nothing(device, opt_level):
    model = make_model(device)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=opt_level)
    x, y = data(device)

    def accumulate():
        with amp.scale_loss((model(x) - y).square().mean(), optimizer) as scaled:
            scaled.backward()

    accumulate()
    masters = list(amp.master_params(optimizer))
    before = [p.grad.clone() for p in masters]
    scale = State.loss_scalers[0].state_dict()
    with pytest.raises(KeyError, match="batch"), amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
        raise KeyError("batch")
    assert State.loss_scalers[0].state_dict() == scale
    assert all(torch.equal(p.grad, b) for p, b in zip(masters, before, strict=True))
    accumulate()
    for p, b in zip(masters, before, strict=True):
        torch.testing.assert_close(p.grad, 2 * b)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("as_views", [False, True])
def test_accumulation_in_data_parallel(tmp_path, device, opt_level, as_views):
    """Also where gradients are views of buckets, into which the next backward pass writes."""
    model = make_model(device).eval()
    reference = copy.deepcopy(model)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=opt_level, loss_scale=128.0)
    x, y = data(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        for part in range(3):
            with amp.scale_loss((wrapped(x[part::3]) - y[part::3]).square().mean(), optimizer) as scaled:
                scaled.backward()
            (reference(x[part::3]) - y[part::3]).square().mean().backward()
    finally:
        dist.destroy_process_group()
    for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=3e-2, atol=3e-2)
