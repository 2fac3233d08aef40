"""The names of Apex that the shim maps, called with Apex's signatures, against plain PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SHIM = Path(__file__).parents[1] / "apex_shim"
pytestmark = pytest.mark.usefixtures("apex_shim")


def load(name):
    return importlib.import_module(name)


def randn(*shape, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


NAMES = {
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.optimizers": "FusedAdam FusedSGD FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad FusedAdagrad",
    "apex.multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "apex.amp": "initialize scale_loss state_dict load_state_dict master_params half_function disable_casts",
    "apex.parallel": (
        "DistributedDataParallel SyncBatchNorm convert_syncbn_model create_syncbn_process_group LARC Reducer"
    ),
    "apex.contrib.clip_grad": "clip_grad_norm_",
    "apex.contrib.xentropy": "SoftmaxCrossEntropyLoss",
    "apex.contrib.layer_norm": "FastLayerNorm",
    "apex.contrib.group_norm": "GroupNorm",
    "apex.contrib.focal_loss": "focal_loss",
    "apex.contrib.index_mul_2d": "index_mul_2d",
    "apex.contrib.sparsity": "ASP create_mask",
    "apex.contrib.transducer": "TransducerJoint TransducerLoss",
    "apex.mlp": "MLP mlp_function",
    "apex.fused_dense": "FusedDense FusedDenseGeluDense fused_dense_function dense_no_bias_function",
    "amp_C": "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm update_scale_hysteresis",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module):
    found = load(module)
    assert all(callable(getattr(found, name)) for name in NAMES[module].split())
    assert all(hasattr(found, name) for name in found.__all__)


def test_parts_without_an_import_of_their_own():
    apex = load("apex")
    assert apex.parallel.LARC and apex.amp.scale_loss and apex.contrib
    assert apex.normalization.__name__ == "apex.normalization"
    with pytest.raises(AttributeError, match="no attribute 'RNN'; docs/apex.md of fusedops lists"):
        apex.RNN  # noqa: B018 - not there


SIGNATURES = {
    "FusedAdam": (
        "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights"
    ),
    "FusedSGD": (
        "params lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none"
    ),
    "FusedLAMB": (
        "params lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none "
        "max_grad_norm use_nvlamb"
    ),
    "FusedNovoGrad": (
        "params lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging norm_type init_zero "
        "set_grad_none"
    ),
    "FusedAdagrad": "params lr eps weight_decay set_grad_none adagrad_w_mode",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_optimizers(name):
    parameters = inspect.signature(getattr(load("apex.optimizers"), name)).parameters
    assert list(parameters) == SIGNATURES[name].split()


@pytest.mark.parametrize(
    "make, reference",
    [
        (
            lambda o, p: o.FusedAdam(p, lr=0.01, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        ),
        (
            lambda o, p: o.FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        ),
        (
            lambda o, p: o.FusedSGD(p, 0.01, 0.9, 0.0, 0.1, True),
            lambda p: torch.optim.SGD(p, 0.01, 0.9, 0.0, 0.1, True),
        ),
        (
            lambda o, p: o.FusedAdagrad(p, 0.01, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, 0.01, weight_decay=0.1),
        ),
    ],
)
def test_optimizers(backend, device, make, reference):
    mine = [nn.Parameter(randn(7, 5, device=device)), nn.Parameter(randn(33, device=device, seed=1))]
    theirs = [nn.Parameter(p.detach().double()) for p in mine]
    optimizer, oracle = make(load("apex.optimizers"), mine), reference(theirs)
    for step in range(5):
        for index, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = randn(*p.shape, device=device, seed=10 * step + index)
            q.grad = p.grad.double()
        optimizer.step()
        oracle.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.double(), q.detach(), rtol=1e-5, atol=1e-5)


def test_lamb_and_novograd_take_their_own_arguments(device):
    optimizers = load("apex.optimizers")
    half = [nn.Parameter(randn(8, 4, device=device, dtype=torch.float16))]
    lamb = optimizers.FusedMixedPrecisionLamb(half, step=5, reduced_precision_dtype=torch.float16)
    novograd = optimizers.FusedNovoGrad(half, reg_inside_moment=True, norm_type=0)
    for optimizer in (lamb, novograd, optimizers.FusedLAMB(half, use_nvlamb=True)):
        half[0].grad = torch.ones_like(half[0])
        before = half[0].detach().clone()
        optimizer.step()
        assert not torch.equal(half[0], before)
    assert lamb.state[half[0]]["step"].item() == 6 and lamb.state[half[0]]["master"].dtype == torch.float32
    assert "exp_avg_norm" in novograd.state[half[0]]


def test_what_apex_refuses(device):
    optimizers = load("apex.optimizers")
    p = [nn.Parameter(torch.ones(3, device=device))]
    for name in ("FusedAdam", "FusedLAMB", "FusedNovoGrad"):
        with pytest.raises(RuntimeError, match="AMSGrad"):
            getattr(optimizers, name)(p, amsgrad=True)
    with pytest.raises(RuntimeError, match="capturable"):
        optimizers.FusedAdam(p, master_weights=True)
    with pytest.raises(RuntimeError, match="scale can no longer be given to step"):
        optimizers.FusedAdam(p).step(scale=2.0)
    with pytest.raises(ValueError, match="nesterov needs momentum"):
        optimizers.FusedSGD(p, 0.1, nesterov=True)


def test_zero_grad_and_scalers(device):
    optimizers = load("apex.optimizers")
    p = nn.Parameter(torch.ones(3, device=device))
    for set_grad_none in (True, False):
        optimizer = optimizers.FusedAdam([p], set_grad_none=set_grad_none)
        p.grad = torch.ones_like(p)
        optimizer.zero_grad()
        assert (p.grad is None) == set_grad_none
    optimizer.zero_grad(set_to_none=True)
    assert p.grad is None
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    optimizer = optimizers.FusedSGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [0.0] * 3
    p.grad.fill_(4.0)
    optimizer.step(grad_scaler=scaler)
    assert p.tolist() == [-1.0] * 3
    p.grad[1] = float("nan")
    optimizer.step(grad_scaler=scaler)
    assert p.tolist() == [-1.0] * 3 and optimizer.skipped.item() == 1


@pytest.mark.parametrize(
    "name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedAdagrad"]
)
def test_step_hooks_run_once(device, name):
    """Also where the class below was made before, whose step torch has wrapped in hooks of its own."""
    optimizers = load("apex.optimizers")
    p = nn.Parameter(torch.ones(3, device=device))
    make = getattr(optimizers, name)
    below = next(c for c in make.__mro__ if c.__module__.startswith("fusedops.optim"))
    below([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer, ran = make([p], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert ran == ["before", "after"] and p.tolist() != [1.0] * 3


def test_apex_checkpoints_are_loaded(device):
    p = nn.Parameter(torch.ones(3, device=device))
    optimizer = load("apex.optimizers").FusedAdam([p])
    moments = {"exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.full((3,), 0.25)}
    group = {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "step": 7}
    optimizer.load_state_dict({"state": {0: moments}, "param_groups": [{**group, "params": [0]}]})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 8
    expected = 1 - 0.1 * (0.45 / (1 - 0.9**8)) / math.sqrt(0.2475 / (1 - 0.99**8))
    assert p[0].item() == pytest.approx(expected, rel=1e-5)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(backend, device, dtype):
    norms = load("apex.normalization")
    x = randn(6, 4, 32, device=device, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    layer, rms = norms.FusedLayerNorm([4, 32]).to(device, dtype), norms.FusedRMSNorm(32, eps=1e-4).to(device, dtype)
    torch.testing.assert_close(layer(x), F.layer_norm(x, [4, 32]), **tolerance)
    torch.testing.assert_close(rms(x), F.rms_norm(x, [32], eps=1e-4), **tolerance)
    mixed = norms.MixedFusedLayerNorm(32, memory_efficient=True).to(device)
    assert mixed(x).dtype == torch.float32
    torch.testing.assert_close(mixed(x), F.layer_norm(x.float(), [32]), rtol=1e-5, atol=1e-5)
    assert norms.MixedFusedRMSNorm(32).to(device)(x).dtype == torch.float32
    functions = load("apex.normalization.fused_layer_norm")
    torch.testing.assert_close(functions.fused_layer_norm(x, 32), F.layer_norm(x, [32], eps=1e-6), **tolerance)
    weight = torch.full((32,), 2.0, device=device, dtype=dtype)
    torch.testing.assert_close(
        functions.fused_rms_norm_affine(x, weight, 32), F.rms_norm(x, [32], weight, 1e-6), **tolerance
    )
    with pytest.raises(RuntimeError, match="elementwise_affine = False"):
        norms.MixedFusedRMSNorm(32, elementwise_affine=False)


def test_fast_layer_norm_of_any_width(backend, device):
    layer = load("apex.contrib.layer_norm").FastLayerNorm(33).to(device)
    x = randn(4, 33, device=device)
    torch.testing.assert_close(layer(x), F.layer_norm(x, [33]), rtol=1e-5, atol=1e-5)


def test_multi_tensor_applier(backend, device):
    amp_c, applier = load("amp_C"), load("apex.multi_tensor_apply").multi_tensor_applier
    assert applier.available and applier.chunk_size == 65536
    x = [randn(33, device=device), randn(5, 7, device=device, seed=1)]
    out = [torch.empty_like(t, dtype=torch.float16) for t in x]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    applier(amp_c.multi_tensor_scale, flag, [x, out], 0.5)
    torch.testing.assert_close(out[1], (x[1] * 0.5).half(), rtol=1e-3, atol=1e-3)
    norm, norms = applier(amp_c.multi_tensor_l2norm, flag, [x], True)
    torch.testing.assert_close(norms, torch.stack([t.norm() for t in x]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm[0], norms.norm(), rtol=1e-5, atol=1e-5)
    half_norm, _ = applier(amp_c.multi_tensor_unscale_l2norm, flag, [x], torch.tensor([0.5], device=device), False)
    torch.testing.assert_close(half_norm * 2, norm, rtol=1e-5, atol=1e-5)
    result = [torch.empty_like(t) for t in x]
    applier(amp_c.multi_tensor_axpby, flag, [x, x, result], 2.0, 1.0, -1)
    torch.testing.assert_close(result[0], x[0] * 3, rtol=1e-6, atol=1e-6)
    assert flag.item() == 0
    x[1][0, 0] = float("inf")
    applier(amp_c.multi_tensor_scale, flag, [x, out], 0.5)
    assert flag.item() == 1
    with pytest.raises(RuntimeError, match="list 1 has 1 tensors"):
        applier(amp_c.multi_tensor_scale, flag, [x, out[:1]], 0.5)


def test_hysteresis():
    update = load("amp_C").update_scale_hysteresis
    scale = torch.tensor([4.0])
    growth, left = torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    seen = []
    for overflow in (0, 0, 1, 1, 1, 0, 1, 1):
        update(scale, growth, left, torch.tensor([float(overflow)]), 2.0, 0.5, 2, 2)
        seen.append((scale.item(), growth.item(), left.item()))
    assert seen == [
        (4.0, 1, 2), (8.0, 0, 2), (8.0, 0, 1), (4.0, 0, 0), (2.0, 0, -1), (2.0, 1, 2), (2.0, 0, 1), (1.0, 0, 0),
    ]  # fmt: skip


def test_losses_and_indexing(backend, device):
    logits = randn(9, 20, device=device).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    labels = torch.arange(9, device=device) % 4
    losses = load("apex.contrib.xentropy").SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, True)
    expected = F.cross_entropy(twin, labels, ignore_index=0, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-5, atol=1e-5)
    half = load("apex.contrib.xentropy").SoftmaxCrossEntropyLoss.apply(logits.detach().bfloat16(), labels)
    assert half.dtype == torch.bfloat16
    a, b, index = randn(5, 6, device=device), randn(8, 6, device=device, seed=1), torch.arange(8, device=device) % 5
    torch.testing.assert_close(load("apex.contrib.index_mul_2d").index_mul_2d(a, b, index), a[index] * b)
    targets = torch.tensor([-2, -1, 0, 3, 2], device=device)
    x = randn(5, 8, device=device)
    loss = load("apex.contrib.focal_loss").focal_loss(x, targets, torch.tensor([2.0], device=device), 6, 0.25, 2.0)
    one_hot = torch.zeros(5, 6, device=device)
    one_hot[[2, 3, 4], [0, 3, 2]] = 1
    p, ce = x[:, :6].sigmoid(), F.binary_cross_entropy_with_logits(x[:, :6], one_hot, reduction="none")
    weight = torch.where(one_hot == 1, 0.25 * (1 - p) ** 2, 0.75 * p**2)
    torch.testing.assert_close(loss, (weight * ce)[1:].sum() / 2, rtol=1e-5, atol=1e-5)


def test_group_norm(backend, device):
    module = load("apex.contrib.group_norm").GroupNorm(4, 16, act="swish").to(device)
    x = randn(2, 16, 5, 5, device=device).to(memory_format=torch.channels_last)
    torch.testing.assert_close(module(x), F.silu(F.group_norm(x, 4)), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="not 'gelu'"):
        load("apex.contrib.group_norm").GroupNorm(4, 16, act="gelu")


def test_transducer(device):
    module = load("apex.contrib.transducer")
    f, g = randn(2, 4, 6, device=device), randn(2, 3, 6, device=device, seed=1)
    lengths, labels = torch.tensor([4, 3], device=device), torch.tensor([2, 1], device=device)
    h = module.TransducerJoint(relu=True)(f, g, lengths, labels + 1)
    torch.testing.assert_close(h[0], torch.relu(f[0, :, None] + g[0, None]), rtol=1e-6, atol=1e-6)
    offsets = torch.cumsum(lengths * (labels + 1), 0)
    packed = module.TransducerJoint(pack_output=True)(f, g, lengths, labels + 1, offsets, int(offsets[-1]))
    assert packed.shape == (18, 6)
    x = randn(2, 4, 3, 5, device=device, seed=2)
    label = torch.tensor([[1, 2], [3, 0]], device=device, dtype=torch.int32)
    loss = module.TransducerLoss()(x, label, lengths, labels, 4)
    assert loss.shape == (2,) and torch.isfinite(loss).all()
    for build in (lambda: module.TransducerJoint(pack_output=True)(f, g, lengths, labels),):
        with pytest.raises(ValueError, match="Please specify batch_offset and packed_batch"):
            build()
    with pytest.raises(ValueError, match="Please specify batch_offset and max_f_len"):
        module.TransducerLoss(packed_input=True)(x, label, lengths, labels, 4)


def test_mlp_and_dense(device):
    x = randn(6, 8, device=device)
    mlp = load("apex.mlp").MLP([8, 16, 4], activation="sigmoid").to(device)
    expected = torch.sigmoid(F.linear(torch.sigmoid(F.linear(x, mlp.weight_0, mlp.bias_0)), mlp.weight_1, mlp.bias_1))
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
    by_function = load("apex.mlp").mlp_function(True, 2, x, mlp.weight_0, mlp.weight_1, mlp.bias_0, mlp.bias_1)
    torch.testing.assert_close(by_function, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="activation must be relu or none or sigmoid"):
        load("apex.mlp").MLP([8, 4], activation="gelu")
    dense = load("apex.fused_dense")
    layer = dense.FusedDense(8, 5, bias=False).to(device)
    torch.testing.assert_close(layer(x), dense.dense_no_bias_function(x, layer.weight), rtol=1e-5, atol=1e-5)
    both = dense.FusedDenseGeluDense(8, 16, 4).to(device)
    hidden = F.gelu(F.linear(x, both.weight1, both.bias1), approximate="tanh")
    torch.testing.assert_close(both(x), F.linear(hidden, both.weight2, both.bias2), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        dense.FusedDenseGeluDense(8, 16, 4, bias=False)


def test_clip_larc_sparsity_and_amp_are_those_of_fusedops():
    import fusedops

    assert load("apex.contrib.clip_grad").clip_grad_norm_ is fusedops.ops.multi_tensor.clip_grad_norm_
    assert load("apex.parallel").LARC is fusedops.optim.LARC
    assert load("apex.contrib.sparsity").ASP is fusedops.sparsity.ASP
    assert load("apex.amp").initialize is fusedops.amp.initialize


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parallel(one_process):
    parallel = load("apex.parallel")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    model[1].weight.data.normal_()
    x = randn(2, 3, 5, 5)
    expected = model(x)
    model[1].reset_running_stats()
    model[2][0].reset_running_stats()
    weight = model[1].weight
    model = parallel.convert_syncbn_model(model)
    assert isinstance(model[1], parallel.SyncBatchNorm) and isinstance(model[2][0], parallel.SyncBatchNorm)
    assert model[1].weight is weight
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    last = parallel.SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    y = F.relu(F.batch_norm(x, None, None, training=True))
    torch.testing.assert_close(last(x.movedim(1, -1)), y.movedim(1, -1), rtol=1e-5, atol=1e-5)
    wrapped = parallel.DistributedDataParallel(nn.Linear(3, 2), message_size=1, delay_allreduce=True)
    wrapped(torch.ones(4, 3)).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[4.0] * 3] * 2
    with pytest.raises(RuntimeError, match="gradient_average=False"):
        parallel.DistributedDataParallel(nn.Linear(3, 2), gradient_average=False)
    parallel.Reducer(wrapped.module).reduce()
    assert parallel.create_syncbn_process_group(0) is None
    assert dist.get_world_size(parallel.create_syncbn_process_group(1)) == 1
    with pytest.raises(ValueError, match="must divide the 1 processes, not 2"):
        parallel.create_syncbn_process_group(2)


def test_it_is_a_distribution_of_its_own():
    """Importing fusedops brings no apex, and its distribution does not contain the shim."""
    done = subprocess.run(
        [sys.executable, "-c", "import fusedops.optim, sys; import importlib.util as u; print(u.find_spec('apex'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "None"
    import tomllib

    outer = tomllib.loads((SHIM.parent / "pyproject.toml").read_text())
    assert outer["tool"]["setuptools"]["packages"]["find"]["include"] == ["fusedops", "fusedops.*"]
    inner = tomllib.loads((SHIM / "pyproject.toml").read_text())
    assert inner["project"]["name"] != outer["project"]["name"]
