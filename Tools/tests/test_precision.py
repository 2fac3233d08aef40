"""dlx.precision: what autocast computes in, and the guarded loss scaler (overflow never reaches the parameters)."""

import math

import pytest

torch = pytest.importorskip("torch")
from dlx.precision import LossScaler, NonFiniteError, autocast, inference_dtype  # noqa: E402


def setup(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, LossScaler(model.named_parameters(), **options)


def step(model, optimizer, scaler, bad=None):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
    if bad is not None:
        model[1].weight.grad[0, 2] = bad
    scaler.step(optimizer)


def snapshot(model, optimizer):
    state = optimizer.state_dict()["state"].values()
    return [p.detach().clone() for p in model.parameters()] + [v.clone() for item in state for v in item.values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "precision, dtype",
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast(precision, dtype):
    with autocast(precision, "cpu"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_unknown_precision():
    with pytest.raises(ValueError, match="precision must be one of fp32, tf32, bf16, fp16, got 'fp8'"):
        autocast("fp8", "cpu")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_at_step_3_changes_nothing_and_halves_the_scale(bad):
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler)
    step(model, optimizer, scaler)
    before = snapshot(model, optimizer)
    step(model, optimizer, scaler, bad)
    assert same(before, snapshot(model, optimizer))
    assert scaler.value == 32768 and scaler.last_skipped and scaler.skipped == 1
    step(model, optimizer, scaler)
    assert not same(before, snapshot(model, optimizer)) and not scaler.last_skipped


def test_four_overflows_and_the_floor():
    model, optimizer, scaler = setup(floor=1024.0, patience=100)
    for _ in range(4):
        step(model, optimizer, scaler, math.inf)
    assert scaler.value == 4096
    for _ in range(10):
        step(model, optimizer, scaler, math.inf)
    assert scaler.value == 1024


def test_scaling_does_not_change_the_result():
    model, optimizer, scaler = setup()
    other, other_optimizer, off = setup(enabled=False)
    for _ in range(3):
        step(model, optimizer, scaler)
        step(other, other_optimizer, off)
    assert same(snapshot(model, optimizer), snapshot(other, other_optimizer))
    assert off.value == 1.0 and off.skipped == 0 and off.state_dict() == {} and not off.last_skipped
    off.load_state_dict(scaler.state_dict())


def test_growth_and_ceiling():
    model, optimizer, scaler = setup(initial=4.0, ceiling=16.0, growth_interval=2)
    values = []
    for number in range(9):
        step(model, optimizer, scaler, math.inf if number == 1 else None)
        values.append(scaler.value)
    assert values == [4, 2, 2, 4, 4, 8, 8, 16, 16]


def test_stops_and_names_the_first_bad_tensor():
    model, optimizer, scaler = setup(patience=3)
    step(model, optimizer, scaler, math.inf)
    step(model, optimizer, scaler, math.nan)
    step(model, optimizer, scaler)
    before = snapshot(model, optimizer)
    step(model, optimizer, scaler, math.inf)
    step(model, optimizer, scaler, math.inf)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .*gradient '1.weight' \[1, 4\] has 1 of 4 values"):
        step(model, optimizer, scaler, math.inf)
    assert same(before, snapshot(model, optimizer))
    with torch.no_grad():
        model[0].bias[0] = math.nan
    assert scaler.first_non_finite() == "parameter '0.bias' [4] has 1 of 4 values not finite"


def test_unscale_before_clipping():
    model, optimizer, scaler = setup()
    scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
    scaled = model[0].weight.grad.clone()
    scaler.unscale()
    assert torch.equal(model[0].weight.grad * 65536, scaled)
    with pytest.raises(RuntimeError, match="twice"):
        scaler.unscale()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    assert scaler.skipped == 0


def test_state_goes_on():
    model, optimizer, scaler = setup(growth_interval=4)
    step(model, optimizer, scaler, math.inf)
    for _ in range(3):
        step(model, optimizer, scaler)
    _, _, other = setup(growth_interval=4)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == {"scale": 32768.0, "good": 3, "run": 0, "skipped": 1}
    for bad in (0.0, 3.0, 0.5, math.nan, 2.0**30):
        with pytest.raises(ValueError, match="scale must be a power of two"):
            other.load_state_dict({**scaler.state_dict(), "scale": bad})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"initial": 3.0}, "initial must be a power of two, got 3.0"),
        ({"floor": 0.0}, "floor must be a power of two, got 0.0"),
        ({"ceiling": math.inf}, "ceiling must be a power of two"),
        ({"initial": 1.0, "floor": 2.0}, "need floor <= initial <= ceiling"),
        ({"patience": 0}, "patience must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        setup(**options)


def test_frozen_and_unused_parameters():
    model, optimizer, _ = setup()
    model[0].requires_grad_(False)
    scaler = LossScaler(model.named_parameters())
    scaler.scale(model[1](torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    assert scaler.skipped == 0
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        LossScaler(model[0].named_parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_wait_for_the_gpu_with_a_fused_optimiser():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = LossScaler(model.named_parameters(), patience=2, check_every=2)
    data = torch.ones(2, 3, device="cuda")
    bad = torch.tensor(math.inf, device="cuda")

    def run(value=None):
        optimizer.zero_grad()
        with autocast("fp16", "cuda"):
            loss = model(data).square().mean()
        scaler.scale(loss).backward()
        if value is not None:
            model.weight.grad[0, 0] = value
        scaler.step(optimizer)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = [p.detach().clone() for p in model.parameters()]
        scaler._steps = 0
        run(bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(before, list(model.parameters())) and scaler.value == 32768 and scaler.last_skipped
    with pytest.raises(NonFiniteError, match="gradient 'weight'"):
        run(bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_skips_and_adapts():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, capturable=True)
    scaler = LossScaler(model.named_parameters())
    data, inject = torch.ones(2, 3, device="cuda"), torch.zeros((), device="cuda")

    def run():
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            loss = model(data).square().mean()
        scaler.scale(loss).backward()
        model.weight.grad[0, 0].add_(inject)
        scaler.step(optimizer)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    before = [p.detach().clone() for p in model.parameters()]
    graph.replay()
    assert not same(before, list(model.parameters())) and not scaler.last_skipped
    before = [p.detach().clone() for p in model.parameters()]
    inject.fill_(math.inf)
    graph.replay()
    assert same(before, list(model.parameters())) and scaler.value == 32768 and scaler.skipped == 1
    inject.zero_()
    graph.replay()
    assert not same(before, list(model.parameters())) and scaler.value == 32768


def test_the_type_for_inference(monkeypatch):
    assert inference_dtype("auto", torch.device("cpu")) == torch.float32
    assert inference_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    for capability, dtype in (((9, 0), torch.float16), ((7, 5), torch.float32)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert inference_dtype("auto", torch.device("cuda")) == dtype
