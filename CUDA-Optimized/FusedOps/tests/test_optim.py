"""Trajectories of the optimizers over 100 steps against torch.optim or the papers' formulas, in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import fusedops
from fusedops.optim import LAMB, LARC, SGD, Adagrad, Adam, AdamW, NovoGrad, rounding
from fusedops.optim.base import FusedOptimizer

SHAPES = [(1,), (7, 9), (0,), (32,)]
STEPS = 100
INTERPRETED_STEPS = 8  # of what is not the commonest: the interpreter is slow


def parameters(dtype, device, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in shapes]
    return [torch.nn.Parameter(tensor) for tensor in made]


def set_gradients(mine, theirs, step, dtype=torch.float32, scale=1.0):
    """The same numbers for both, such as the dtype can hold; those of the oracle in float64."""
    generator = torch.Generator().manual_seed(100 + step)
    for p, q in zip(mine, theirs, strict=True):
        gradient = (torch.randn(p.shape, generator=generator) + p.detach().cpu().float().mul(0.1)).to(p.device, dtype)
        p.grad = (gradient * scale).to(dtype)
        q.grad = gradient.to(q.dtype)


def follow(mine, theirs, optimizer, oracle, steps=STEPS, dtype=torch.float32):
    for step in range(steps):
        set_gradients(mine, theirs, step, dtype)
        optimizer.step()
        oracle.step()


def close(mine, theirs, rtol, atol):
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=rtol, atol=atol)


class ReferenceLAMB:
    def __init__(
        self, params, lr, weight_decay, betas=(0.9, 0.999), eps=1e-6, average=True, decoupled=True, max_norm=1.0
    ):
        self.p, self.lr, self.wd, self.betas, self.eps, self.t = params, lr, weight_decay, betas, eps, 0
        self.average, self.decoupled, self.max_norm = average, decoupled, max_norm
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.p))
        divisor = max(norm / self.max_norm, 1.0)
        for p, m, v in zip(self.p, self.m, self.v, strict=True):
            g = p.grad / divisor + (0.0 if self.decoupled else self.wd) * p
            m.mul_(b1).add_(g * ((1 - b1) if self.average else 1.0))
            v.mul_(b2).add_(g * g * (1 - b2))
            u = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
            u += (self.wd if self.decoupled else 0.0) * p
            ratio = p.norm() / u.norm() if self.wd and p.norm() > 0 and u.norm() > 0 else 1.0
            p.sub_(self.lr * ratio * u)


class ReferenceNovoGrad:
    def __init__(
        self, params, lr, weight_decay, betas=(0.95, 0.98), eps=1e-8, inside=False, largest=False, init_zero=False
    ):
        self.p, self.lr, self.wd, self.betas, self.eps, self.t = params, lr, weight_decay, betas, eps, 0
        self.inside, self.largest, self.init_zero = inside, largest, init_zero
        self.m = [torch.zeros_like(p) for p in params]
        self.s = [0.0] * len(params)

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for i, (p, m) in enumerate(zip(self.p, self.m, strict=True)):
            if not p.numel():
                continue
            n = p.grad.abs().max().item() if self.largest else p.grad.norm().item()
            if self.t == 1 and not self.init_zero:
                self.s[i] = n
            elif self.largest:
                self.s[i] = b2 * self.s[i] + (1 - b2) * n
            else:
                self.s[i] = math.sqrt(b2 * self.s[i] ** 2 + (1 - b2) * n * n)
            d = self.s[i] / math.sqrt(1 - b2**self.t) + self.eps
            if self.inside:
                m.mul_(b1).add_((1 - b1) * (p.grad / d + self.wd * p))
                p.sub_(self.lr * m / (1 - b1**self.t))
            else:
                m.mul_(b1).add_((1 - b1) * p.grad)
                p.sub_(self.lr * (m / (1 - b1**self.t) / d + self.wd * p))


class ReferenceDecayLast:
    """SGD whose decay comes after the momentum, and Adagrad's decoupled decay."""

    def __init__(self, params, lr, weight_decay, momentum=None):
        self.p, self.lr, self.wd, self.momentum = params, lr, weight_decay, momentum
        self.s = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        for p, s in zip(self.p, self.s, strict=True):
            if self.momentum is not None:
                s.mul_(self.momentum).add_(p.grad)
                p.sub_(self.lr * (s + self.wd * p))
            else:
                s.add_(p.grad**2)
                p.sub_(self.lr * (p.grad / (s.sqrt() + 1e-10) + self.wd * p))


CASES = {
    "adamw": (partial(AdamW, lr=1e-2, weight_decay=0.1), partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)),
    "adam": (
        partial(Adam, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adam beta1 0, maximize": (
        partial(Adam, betas=(0.0, 0.99), maximize=True),
        partial(torch.optim.Adam, betas=(0.0, 0.99), maximize=True),
    ),
    "sgd": (partial(SGD, lr=1e-2), partial(torch.optim.SGD, lr=1e-2)),
    "sgd momentum": (
        partial(SGD, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    ),
    "sgd nesterov": (
        partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    ),
    "sgd decay last": (
        partial(SGD, lr=1e-2, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
        partial(ReferenceDecayLast, lr=1e-2, momentum=0.9, weight_decay=0.1),
    ),
    "adagrad": (
        partial(Adagrad, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
        partial(torch.optim.Adagrad, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    ),
    "adagrad decoupled": (
        partial(Adagrad, weight_decay=0.1, decoupled_weight_decay=True),
        partial(ReferenceDecayLast, lr=1e-2, weight_decay=0.1),
    ),
    "lamb": (partial(LAMB, lr=1e-2, weight_decay=0.1), partial(ReferenceLAMB, lr=1e-2, weight_decay=0.1)),
    "lamb l2": (
        partial(LAMB, lr=1e-2, weight_decay=0.1, adam_w_mode=False, grad_averaging=False, max_grad_norm=5.0),
        partial(ReferenceLAMB, lr=1e-2, weight_decay=0.1, decoupled=False, average=False, max_norm=5.0),
    ),
    "lamb no decay": (partial(LAMB, weight_decay=0.0), partial(ReferenceLAMB, lr=1e-3, weight_decay=0.0)),
    "novograd": (
        partial(NovoGrad, lr=1e-2, betas=(0.95, 0.98), weight_decay=0.1),
        partial(ReferenceNovoGrad, lr=1e-2, weight_decay=0.1),
    ),
    "novograd inside, init_zero": (
        partial(NovoGrad, lr=1e-2, betas=(0.95, 0.98), weight_decay=0.1, reg_inside_moment=True, init_zero=True),
        partial(ReferenceNovoGrad, lr=1e-2, weight_decay=0.1, inside=True, init_zero=True),
    ),
    "novograd largest": (
        partial(NovoGrad, lr=1e-2, betas=(0.95, 0.98), norm_type=0),
        partial(ReferenceNovoGrad, lr=1e-2, weight_decay=0.0, largest=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_trajectory_float32(backend, device, case):
    make, make_oracle = CASES[case]
    mine, theirs = parameters(torch.float32, device), parameters(torch.float64, device)
    slow = backend == "triton" and device.type == "cpu" and case not in ("adamw", "sgd momentum")
    follow(mine, theirs, make(mine), make_oracle(theirs), INTERPRETED_STEPS if slow else STEPS)
    close(mine, theirs, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("case", CASES)
def test_trajectory_float64(device, case):
    make, make_oracle = CASES[case]
    mine, theirs = parameters(torch.float64, device), parameters(torch.float64, device)
    follow(mine, theirs, make(mine), make_oracle(theirs), dtype=torch.float64)
    exact = 1e-6 if case.startswith("novograd") else 1e-9  # NovoGrad's running norms are float32
    close(mine, theirs, rtol=exact, atol=exact)


@pytest.mark.parametrize("case", ["adamw", "sgd momentum", "adagrad", "lamb", "novograd"])
@pytest.mark.parametrize(
    "dtype, master",
    [(torch.bfloat16, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "remainder")],
)
def test_masters_follow_float32(backend, device, case, dtype, master):
    """16-bit parameters with a master go where float32 parameters go, and are the rounded master at the end."""
    make, make_oracle = CASES[case]
    mine, theirs = parameters(dtype, device), parameters(torch.float64, device)
    optimizer = make(mine, master_weights=master)
    follow(mine, theirs, optimizer, make_oracle(theirs), steps=6, dtype=dtype)
    for p, q in zip(mine, theirs, strict=True):
        state = optimizer.state[p]
        weights = state["master"] if master == "fp32" else rounding.join(p.detach(), state["remainder"])
        torch.testing.assert_close(weights.double(), q.detach(), rtol=3e-5, atol=3e-5)
        ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        if backend == "triton" and device.type == "cpu":
            ulp *= 2  # the interpreter cuts off where the hardware rounds
        assert torch.all((p.double() - weights.double()).abs() <= ulp * weights.double().abs() + 1e-7)
        assert state[optimizer.moment_names[0] if optimizer.moment_names else "momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("case", ["adamw", "sgd momentum", "adagrad", "lamb", "novograd"])
def test_remainder_is_the_float32_master_bit_for_bit(backend, device, case):
    first, second = parameters(torch.bfloat16, device), parameters(torch.bfloat16, device)
    a = CASES[case][0](first, master_weights="fp32")
    b = CASES[case][0](second, master_weights="remainder")
    follow(first, second, a, b, steps=3, dtype=torch.bfloat16)
    for p, q in zip(first, second, strict=True):
        assert torch.equal(a.state[p]["master"], rounding.join(q.detach(), b.state[q]["remainder"]))
        assert b.state[q]["remainder"].dtype == torch.int16


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_their_own(backend, device, gradient_dtype, moment_dtype):
    """Parameters of three dtypes in one optimizer, gradients and moments of others."""
    mine = [p for d in (torch.float32, torch.bfloat16, torch.float16) for p in parameters(d, device, [(50,), (3, 7)])]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in mine]
    for p in mine:
        p.grad_dtype = gradient_dtype
    optimizer = AdamW(mine, lr=1e-2, master_weights="fp32", moment_dtype=moment_dtype)
    follow(mine, theirs, optimizer, torch.optim.AdamW(theirs, lr=1e-2), steps=5, dtype=gradient_dtype)
    tolerance = 1e-4 if moment_dtype == torch.float32 else 2e-2
    for p, q in zip(mine, theirs, strict=True):
        weights = optimizer.state[p].get("master", p.detach())
        torch.testing.assert_close(weights.double(), q.detach(), rtol=tolerance, atol=tolerance)
        assert optimizer.state[p]["exp_avg"].dtype == moment_dtype


def test_remainder_holds_every_float32_number():
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    edges = torch.tensor(
        [0, -(2**31), 0x7F800000, -8388608, 0x7F7FFFFF, 0x7FFFFFFF, 1, 0x8000, 0x7FFF], dtype=torch.int32
    )
    x = torch.cat([bits, edges]).view(torch.float32)
    parameter, remainder = rounding.split(x)
    assert torch.equal(rounding.join(parameter, remainder).view(torch.int32), x.view(torch.int32))
    finite = x[torch.isfinite(x) & (x.abs() < 1e38)]
    assert torch.all(
        (rounding.split(finite)[0].double() - finite.double()).abs() <= finite.double().abs() * 2.0**-8 + 1e-40
    )


def test_stochastic_rounding_is_right_in_the_mean():
    x = torch.full((200_000,), 1.0 + 0.3 * 2.0**-7)
    rounded = rounding.round_stochastically(x, seed=3, tensor=1, step=2)
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs((rounded.double().mean().item() - 1.0) * 2.0**7 - 0.3) < 0.005
    other = rounding.round_stochastically(x, seed=3, tensor=1, step=3)
    agreement = (rounded == other).float().mean().item()
    assert abs(agreement - (0.3**2 + 0.7**2)) < 0.01, "independent between steps"
    assert torch.equal(rounded, rounding.round_stochastically(x, seed=3, tensor=1, step=2))
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -1.5])
    kept = rounding.round_stochastically(odd, 0, 0, 1)
    assert torch.equal(kept[:2].float(), odd[:2]) and kept[2].isnan() and kept[3:].tolist() == [0.0, -1.5]


def test_stochastic_updates_are_not_lost(backend, device):
    """Steps of a 25th of the last bit: rounding to nearest stays where it is, stochastic rounding arrives."""
    ends = {}
    for master in ("none", "stochastic"):
        p = torch.nn.Parameter(torch.ones(4000, dtype=torch.bfloat16, device=device))
        optimizer = SGD([p], lr=2.0**-7 / 25, maximize=True, master_weights=master)
        for _ in range(25):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[master] = p.double().mean().item()
    assert ends["none"] == 1.0
    assert abs(ends["stochastic"] - (1 + 2.0**-7)) < 2.0**-7 * 0.1


def test_kernels_and_plain_form_round_alike(triton_backend, device):
    results = []
    for backend in ("plain", "triton"):
        p = torch.nn.Parameter(torch.linspace(-2, 2, 3001).bfloat16().to(device))
        q = torch.nn.Parameter(torch.linspace(-3, 3, 70).bfloat16().to(device))
        optimizer = SGD([q, p], lr=2.0**-10, master_weights="stochastic", seed=5)
        with fusedops.use(backend):
            for step in range(3):
                p.grad, q.grad = torch.full_like(p, 0.5 + step), torch.full_like(q, 0.25)
                optimizer.step()
        results.append(torch.cat([p.detach(), q.detach()]))
    assert torch.equal(*results)


def test_master_forms_need_their_dtype(device):
    for master in ("remainder", "stochastic"):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16, device=device))
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=f"master_weights='{master}' needs bfloat16 parameters, not torch.float16"):
            SGD([p], lr=0.1, master_weights=master).step()


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gaps", "expanded gradient"])
def test_layouts(backend, device, layout):
    def make(dtype):
        torch.manual_seed(0)
        data = torch.randn(3, 4, 5, 6).to(device, dtype)
        if layout == "channels_last":
            data = data.to(memory_format=torch.channels_last)
        elif layout == "transposed":
            data = data.permute(3, 1, 0, 2)
        elif layout == "gaps":
            data = data[:, ::2]
        return torch.nn.Parameter(data)

    mine, theirs = make(torch.float32), make(torch.float64)
    optimizer, oracle = AdamW([mine], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    for step in range(3):
        gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)).to(device)
        if layout == "expanded gradient":
            gradient = gradient[:, :1].expand_as(gradient)
        mine.grad, theirs.grad = gradient, gradient.double()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def test_steps_repeat_bit_for_bit(triton_backend, device):
    for make in (AdamW, LAMB, NovoGrad):
        runs = []
        for _ in range(2):
            mine = parameters(torch.float32, device, [(20_000,), (300,)])
            twins = parameters(torch.float64, device, [(20_000,), (300,)])
            follow(mine, twins, make(mine, lr=0.01), torch.optim.SGD(twins, lr=0.1), steps=2)
            runs.append(torch.cat([p.detach() for p in mine]))
        assert torch.equal(*runs)


def reference_larc(params, lr, trust, decay, clip, momentum):
    buffers = [torch.zeros_like(p) for p in params]

    def step():
        with torch.no_grad():
            for p, buffer in zip(params, buffers, strict=True):
                g = p.grad
                if p.norm() > 0 and g.norm() > 0:
                    local = trust * p.norm() / (g.norm() + decay * p.norm() + 1e-8)
                    g = (g + decay * p) * (min(local / lr, 1.0) if clip else local)
                buffer.mul_(momentum).add_(g)
                p.sub_(lr * buffer)

    return step


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("inner", [SGD, torch.optim.SGD])
def test_larc(backend, device, clip, inner):
    mine, theirs = parameters(torch.float32, device), parameters(torch.float64, device)
    for p in (mine[1], theirs[1]):
        p.data.zero_()
    optimizer = LARC(inner(mine, lr=0.05, momentum=0.9, weight_decay=0.1), trust_coefficient=0.1, clip=clip)
    step = reference_larc(theirs, 0.05, 0.1, 0.1, clip, 0.9)
    for number in range(20 if backend == "plain" else 4):
        set_gradients(mine, theirs, number)
        optimizer.step()
        step()
    close(mine, theirs, rtol=2e-5, atol=2e-5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: AdamW(p, lr=-1.0), "lr must not be negative: -1.0"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), r"betas\[1\] must be in \[0, 1\): 1.0"),
        (lambda p: AdamW(p, amsgrad=True), "AdamW does not support amsgrad"),
        (lambda p: SGD(p, nesterov=True), "nesterov needs momentum"),
        (lambda p: NovoGrad(p, norm_type=1), "norm_type is 2 .* not 1"),
        (lambda p: LAMB(p, eps=float("nan")), "eps must not be negative: nan"),
        (lambda p: AdamW(p, master_weights="fp64"), "master_weights is one of none, fp32.* not 'fp64'"),
        (lambda p: AdamW(p, max_grad_norm=-1.0), "max_grad_norm must be positive, not -1.0"),
        (lambda p: AdamW(p, moment_dtype=torch.int8), "moment_dtype must be a floating dtype"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.ones(1))])


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        Adam(embedding.parameters()).step()


def test_base_is_a_torch_optimizer():
    assert issubclass(FusedOptimizer, torch.optim.Optimizer)
