"""The training step against arithmetic written out anew: loss, accumulation (O28), EMA, rates, scaler (O26)."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from convnets import registry
from convnets.loss import classification_loss, mixup
from convnets.step import TrainState, capture, train_step
from dlx import optim
from dlx.inputs import IMAGENET_MEAN, IMAGENET_STD, Normalize
from dlx.precision import LossScaler, NonFiniteError


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny: on a busy machine threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain_model(seed: int = 0, classes: int = 5) -> nn.Module:
    """Without batch norm, so that a sample's gradient does not depend on its neighbours."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, classes)
    )


def pictures(count: int, seed: int = 0, size: int = 12, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, classes, (count,), generator=generator)


def state_of(model: nn.Module, lr: float = 0.1, **options) -> TrainState:
    return TrainState(model, optim.build_optimizer(model, "sgd", lr=lr, momentum=0.9, weight_decay=0.0), **options)


# -------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("sizes", [(4, 2), (1, 5), (2, 2, 2), (3, 1, 2)])
def test_ragged_micro_batches_give_the_gradient_of_the_mean(sizes):
    """User case O28: the mean over all six samples, not the mean of the micro-batches' means."""
    images, labels = pictures(6)
    together, apart = (state_of(copy.deepcopy(plain_model()).double(), normalize=Normalize().double()) for _ in "ab")
    loss = train_step(together, [(images, labels)])
    parts = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    assert torch.allclose(train_step(apart, parts), loss, rtol=1e-6)
    for whole, part in zip(together.model.parameters(), apart.model.parameters(), strict=True):
        # The loss itself is computed in float32, so the gradients agree to its rounding.
        assert torch.allclose(whole.grad, part.grad, rtol=1e-5, atol=1e-8)
        assert torch.allclose(whole, part, rtol=1e-5, atol=1e-8)


def test_scalar_form_of_the_ragged_mean():
    """Micro-batches with losses (1, 2, 3, 4) and (9, 11) have the mean 5.0."""

    class Chosen(nn.Module):
        """Logits (0, z) whose cross entropy against class 0 is what the picture says."""

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1, 1))

        def forward(self, x):
            wanted = x.mean((1, 2, 3))[:, None] * self.gain
            return torch.cat([torch.zeros_like(wanted), torch.log(torch.expm1(wanted))], 1)

    model = Chosen()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
    losses = torch.tensor([1.0, 2, 3, 4, 9, 11]).view(6, 1, 1, 1)
    zeros = torch.zeros(6, dtype=torch.int64)
    mean = train_step(state, [(losses[:4], zeros[:4]), (losses[4:], zeros[4:])])
    assert mean.item() == pytest.approx(5.0, abs=1e-5)
    assert model.gain.grad.item() == pytest.approx(5.0, abs=1e-5)  # each loss is its picture times the gain


# ---------------------------------------------------------------------------------------------------- loss


def numpy_loss(logits: np.ndarray, targets: np.ndarray) -> float:
    """Mean of -sum(target * log softmax)."""
    shifted = logits - logits.max(1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-(targets * log_probabilities).sum(1).mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("weight", [None, 0.0, 0.37, 1.0])
def test_loss_equals_the_formula(smoothing, weight):
    """Szegedy 2016: (1 - e) * one_hot + e / K; Zhang 2018: lam * y_i + (1 - lam) * y_(i-1)."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 3, (7, 5)), rng.integers(0, 5, 7)
    targets = np.eye(5)[labels] * (1 - smoothing) + smoothing / 5
    if weight is not None:
        targets = weight * targets + (1 - weight) * np.roll(targets, 1, axis=0)
    mix = None if weight is None else torch.tensor(weight)
    found = classification_loss(torch.from_numpy(logits), torch.from_numpy(labels), smoothing, mix)
    assert found.dtype == torch.float32  # whatever autocast made of the logits
    assert found.item() == pytest.approx(numpy_loss(logits, targets), rel=1e-5)


def test_mixup_blends_each_picture_with_its_predecessor():
    values = np.random.default_rng(0).normal(size=(5, 3, 4, 4)).astype(np.float32)
    found = mixup(torch.from_numpy(values), torch.tensor(0.3)).numpy()
    for index in range(5):
        np.testing.assert_allclose(found[index], 0.3 * values[index] + 0.7 * values[index - 1], atol=1e-6)


def test_step_mixes_pictures_and_targets_alike():
    images, labels = pictures(6)
    state = state_of(plain_model(), label_smoothing=0.1)
    before = copy.deepcopy(state.model)
    loss = train_step(state, [(images, labels)], torch.tensor(0.8))
    x = (images.double().numpy() / 255 - np.reshape(IMAGENET_MEAN, (1, 3, 1, 1))) / np.reshape(
        IMAGENET_STD, (1, 3, 1, 1)
    )
    x = 0.8 * x + 0.2 * np.roll(x, 1, axis=0)
    targets = np.eye(5)[labels.numpy()] * 0.9 + 0.02
    targets = 0.8 * targets + 0.2 * np.roll(targets, 1, axis=0)
    with torch.no_grad():
        logits = before.double()(torch.from_numpy(x)).numpy()
    assert loss.item() == pytest.approx(numpy_loss(logits, targets), rel=1e-5)


@pytest.mark.parametrize(("mean", "std"), [(IMAGENET_MEAN, IMAGENET_STD), ((0.5,), (0.25,))])
def test_normalize_is_to_tensor_and_normalize(mean, std):
    """torchvision's two steps: divide by 255, then (x - mean) / std."""
    values = torch.arange(256, dtype=torch.uint8).repeat(len(mean)).view(1, len(mean), 16, 16)
    mean_C11, std_C11 = (torch.tensor(numbers).double().view(-1, 1, 1) for numbers in (mean, std))
    reference = (values.double() / 255 - mean_C11) / std_C11
    found = Normalize(mean, std)(values)
    assert found.dtype == torch.float32 and (found - reference).abs().max() < 2e-6
    floats = torch.rand(2, len(mean), 4, 4)
    assert Normalize(mean, std)(floats) is floats  # they are normalised already
    assert not Normalize(mean, std).state_dict()


# ----------------------------------------------------------------------------------------------- optimiser


@pytest.mark.parametrize("arch", ["resnet8_small", "efficientnet_b0", "mobilenet_v2"])
def test_norms_and_biases_do_not_decay(arch):
    with torch.device("meta"):
        model = registry.build(arch)
    decayed, free = optim.parameter_groups(model, 3e-5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners = dict(model.named_modules())
    assert (decayed["weight_decay"], free["weight_decay"]) == (3e-5, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    for parameter in decayed["params"]:
        owner, kind = names[id(parameter)].rsplit(".", 1)
        assert kind == "weight" and isinstance(owners[owner], nn.Conv2d | nn.Linear), owner
    for parameter in free["params"]:
        owner, kind = names[id(parameter)].rsplit(".", 1)
        assert kind == "bias" or isinstance(owners[owner], nn.BatchNorm2d), owner
    assert [group["weight_decay"] for group in optim.parameter_groups(model, 3e-5, decays_norms=True)] == [3e-5]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_its_formula(nesterov):
    model = nn.Linear(3, 2)
    weight = model.weight.detach().double().numpy().copy()
    optimizer = optim.build_optimizer(model, "sgd", lr=0.5, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    velocity = np.zeros_like(weight)
    for index in range(3):
        gradient = np.full_like(weight, 0.1 * (index + 1))
        model.weight.grad = torch.from_numpy(gradient).float()
        optimizer.step()
        total = gradient + 0.1 * weight
        velocity = total if index == 0 else 0.9 * velocity + total
        weight = weight - 0.5 * (total + 0.9 * velocity if nesterov else velocity)
    np.testing.assert_allclose(model.weight.detach().numpy(), weight, rtol=1e-5)


def test_rmsprop_equals_its_formula():
    model = nn.Linear(3, 2)
    weight = model.weight.detach().double().numpy().copy()
    optimizer = optim.build_optimizer(model, "rmsprop", lr=0.02, momentum=0.9, weight_decay=0.0)
    square, velocity = np.zeros_like(weight), np.zeros_like(weight)
    for index in range(3):
        gradient = np.full_like(weight, 0.1 * (index + 1))
        model.weight.grad = torch.from_numpy(gradient).float()
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        velocity = 0.9 * velocity + gradient / (np.sqrt(square) + 0.01)
        weight = weight - 0.02 * velocity
    np.testing.assert_allclose(model.weight.detach().numpy(), weight, rtol=1e-5)
    with pytest.raises(ValueError, match="lamb.*sgd, rmsprop"):
        optim.build_optimizer(model, "lamb", lr=0.1, momentum=0.9, weight_decay=0.0)


SCHEDULE = {"peak": 0.8, "end": 0.1, "warmup_steps": 4, "total_steps": 12, "milestones": (6, 9)}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [  # steps 0, 1, 3 warm up; 4 is the peak; 6, 8 and 10 lie a quarter, half and three quarters on
        ("cosine", [0.2, 0.4, 0.8, 0.8, 0.45 + 0.35 * math.sqrt(0.5), 0.45, 0.45 - 0.35 * math.sqrt(0.5), 0.1]),
        ("linear", [0.2, 0.4, 0.8, 0.8, 0.625, 0.45, 0.275, 0.1]),
        ("step", [0.2, 0.4, 0.8, 0.8, 0.08, 0.08, 0.008, 0.008]),
        ("constant", [0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
    ],
)
def test_learning_rate_at_hand_computed_points(schedule, expected):
    found = [optim.learning_rate(step, schedule=schedule, **SCHEDULE) for step in (0, 1, 3, 4, 6, 8, 10, 12)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_learning_rate_without_warmup_and_past_the_end():
    options = SCHEDULE | {"warmup_steps": 0}
    assert optim.learning_rate(0, schedule="cosine", **options) == 0.8
    assert optim.learning_rate(50, schedule="cosine", **options) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="'exponential'.*cosine"):
        optim.learning_rate(5, schedule="exponential", **SCHEDULE)


# ----------------------------------------------------------------------------------------------------- EMA


def test_ema_equals_a_scalar_loop():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    ema = optim.ModelEma(model, 0.9)
    names = [name for name, value in model.state_dict().items() if value.is_floating_point()]
    expected = {name: model.state_dict()[name].item() for name in names}
    for step in range(5):
        with torch.no_grad():
            for number, name in enumerate(names):
                model.state_dict()[name].fill_(step * 1.5 + number)
            model[1].num_batches_tracked.fill_(step)
        ema.update()
        for number, name in enumerate(names):
            expected[name] = 0.9 * expected[name] + (1 - 0.9) * (step * 1.5 + number)
    for name in names:
        assert ema.module.state_dict()[name].item() == pytest.approx(expected[name], rel=1e-5), name
    assert ema.module[1].num_batches_tracked == 4  # a count is copied, not averaged
    assert not ema.module.training and not any(p.requires_grad for p in ema.module.parameters())
    with pytest.raises(ValueError, match="1.0"):
        optim.ModelEma(model, 1.0)


def test_step_averages_the_weights_after_the_update():
    state = state_of(plain_model())
    state.ema = optim.ModelEma(state.model, 0.75)
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    train_step(state, [pictures(4)])
    for old, new, average in zip(before, state.model.parameters(), state.ema.module.parameters(), strict=True):
        assert torch.allclose(average, 0.75 * old + 0.25 * new, atol=1e-7) and not torch.equal(old, new)


# ------------------------------------------------------------------------------------------------ the step


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_steps_lower_the_loss(precision):
    torch.manual_seed(0)
    model = registry.build("resnet8_small", 5).to(memory_format=torch.channels_last).train()
    state = state_of(model, lr=0.05, precision=precision)
    batch = [pictures(16, size=16)]
    losses = [train_step(state, batch).item() for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0] and state.step == 8
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def scaled_state(seed: int = 0) -> tuple[TrainState, nn.Parameter]:
    model = plain_model(seed)
    state = state_of(model)
    state.scaler = LossScaler(model.named_parameters(), initial=2.0**16, patience=5)
    return state, model[0].weight


def test_scaler_changes_no_good_step():
    """Scales are powers of two: the update is the unscaled one, bit for bit."""
    state, _ = scaled_state()
    plain = state_of(plain_model())
    for seed in range(3):
        train_step(state, [pictures(4, seed)])
        train_step(plain, [pictures(4, seed)])
    for scaled, own in zip(state.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(scaled, own)


def test_infinite_gradient_skips_the_step_and_halves_the_scale():
    """User case O26: at step 3 of the run; four of them make 4096 of 65536; the step after is a good one again."""
    state, weight = scaled_state()
    state.ema = optim.ModelEma(state.model, 0.9)
    poison = [False]

    def spoil(gradient):
        return gradient.index_put((torch.tensor(0),), torch.tensor(float("inf"))) if poison[0] else gradient

    weight.register_hook(spoil)
    for step in range(10):
        before = [parameter.detach().clone() for parameter in state.model.parameters()]
        poison[0] = 3 <= step < 7
        train_step(state, [pictures(4, step)])
        same = [torch.equal(old, new) for old, new in zip(before, state.model.parameters(), strict=True)]
        assert all(same) if poison[0] else not any(same)
        assert state.scaler.value == 2.0 ** (16 - min(max(step - 2, 0), 4))
    assert state.scaler.skipped == 4 and state.step == 10
    momentum = state.optimizer.state[weight]["momentum_buffer"]
    assert torch.isfinite(momentum).all()
    assert all(torch.isfinite(value).all() for value in state.ema.module.state_dict().values())


def test_lasting_overflow_stops_and_names_the_tensor():
    state, weight = scaled_state()
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteError, match=r"5 steps in a row.*'0\.weight'"):
        for seed in range(20):
            train_step(state, [pictures(4, seed)])
    assert torch.isfinite(weight).all()


def test_fp16_on_a_cpu_trains():
    torch.manual_seed(0)
    model = registry.build("resnet8_small", 5).to(memory_format=torch.channels_last).train()
    state = state_of(model, lr=0.05, precision="fp16")
    state.scaler = LossScaler(model.named_parameters())
    losses = [train_step(state, [pictures(8, size=16)]).item() for _ in range(6)]
    assert losses[-1] < losses[0] and state.scaler.skipped <= 2


# --------------------------------------------------------------------------------------------------- graph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "mixes"), [("fp32", False), ("bf16", True), ("fp16", False)])
def test_graph_equals_eager(precision, mixes):
    """Capturing leaves no trace: losses, weights and averages of the replayed steps are those of eager ones."""
    device = torch.device("cuda")

    def make() -> TrainState:
        torch.manual_seed(0)
        model = registry.build("resnet8_small", 5).to(device, memory_format=torch.channels_last).train()
        state = state_of(model, lr=0.05, precision=precision, normalize=Normalize().to(device))
        state.scaler = LossScaler(model.named_parameters(), enabled=precision == "fp16")
        state.ema = optim.ModelEma(model, 0.9)
        return state

    def batch(seed: int):
        first, second = pictures(8, seed, 16), pictures(8, seed + 100, 16)
        return [tuple(tensor.to(device) for tensor in part) for part in (first, second)]

    eager, graphed = make(), make()
    step = capture(graphed, batch(0), mixes=mixes)
    for index in range(5):
        mix = 0.1 * index if mixes else None
        rate = 0.05 / (index + 1)
        optim.set_learning_rate(eager.optimizer, rate)
        optim.set_learning_rate(graphed.optimizer, rate)
        expected = train_step(eager, batch(index), None if mix is None else torch.tensor(mix, device=device))
        found = step((batch(index), mix) if mixes else (batch(index),))
        assert found.item() == pytest.approx(expected.item(), rel=2e-2 if precision != "fp32" else 1e-3)
    assert graphed.step == eager.step == 5
    for own, other in ((graphed.model, eager.model), (graphed.ema.module, eager.ema.module)):
        for name, value in own.state_dict().items():
            reference = other.state_dict()[name]
            difference = (value.float() - reference.float()).norm()
            assert difference <= 0.02 * reference.float().norm() + 1e-3, name
    with pytest.raises(ValueError, match="16, 16"):
        other = [tuple(tensor.to(device) for tensor in pictures(8, 0, 12))] * 2
        step((other, 0.5) if mixes else (other,))
