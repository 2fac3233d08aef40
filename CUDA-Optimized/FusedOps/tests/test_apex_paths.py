"""The deeper module paths of Apex, what lies outside of its package, and what is there under older names."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

SHIM = Path(__file__).parents[1] / "apex_shim"
pytestmark = pytest.mark.usefixtures("apex_shim")


def load(name):
    return importlib.import_module(name)


def randn(*shape, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


MODULES = {
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.distributed": "DistributedDataParallel Reducer",
    "apex.contrib.xentropy.softmax_xentropy": "SoftmaxCrossEntropyLoss",
    "apex.contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "apex.contrib.layer_norm.layer_norm": "FastLayerNorm _fast_layer_norm",
    "apex.contrib.group_norm.group_norm": "GroupNorm",
    "apex.contrib.sparsity.asp": "ASP",
    "apex.contrib.sparsity.sparse_masklib": "create_mask m4n2_1d m4n2_2d_best m4n2_2d_greedy",
    "apex.contrib.sparsity.permutation_lib": "Permutation accelerated_search_for_good_permutation",
    "apex.contrib.focal_loss.focal_loss": "FocalLoss focal_loss",
    "apex.contrib.index_mul_2d.index_mul_2d": "index_mul_2d",
    "apex.contrib.transducer.transducer": "TransducerJoint TransducerLoss",
    "apex.mlp.mlp": "MLP mlp_function",
    "apex.fused_dense.fused_dense": "FusedDense FusedDenseGeluDense fused_dense_function",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "apex.normalization.fused_layer_norm": (
        "FusedLayerNorm MixedFusedRMSNorm FusedLayerNormAffineFunction FusedLayerNormAffineMixedDtypesFunction "
        "FusedLayerNormFunction FusedRMSNormAffineFunction FusedRMSNormAffineMixedDtypesFunction FusedRMSNormFunction "
        "manual_rms_norm fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine"
    ),
    "apex.amp._amp_state": "_amp_state master_params maybe_print",
    "apex.amp.frontend": "initialize state_dict load_state_dict",
    "apex.amp.handle": "scale_loss disable_casts",
    "apex_C": "flatten unflatten",
    "fused_weight_gradient_mlp_cuda": "wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16",
}


def test_module_paths_of_apex():
    """Each as the first thing that a process imports."""
    lines = [f"from {path} import {', '.join(names.split())}" for path, names in MODULES.items()]
    forget = "[sys.modules.pop(n) for n in list(sys.modules) if n.split('.')[0] == 'apex']"
    program = f"import sys\nsys.path.insert(0, {str(SHIM)!r})\n" + f"\n{forget}\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_name_that_a_module_shares_is_the_name():
    load("apex.parallel.LARC"), load("apex.contrib.focal_loss.focal_loss")
    assert isinstance(load("apex.parallel").LARC, type)
    assert callable(load("apex.contrib.focal_loss").focal_loss)
    assert load("apex.optimizers").fused_adam.FusedAdam is load("apex.optimizers").FusedAdam


def test_functions_by_their_older_names(device):
    norms = load("apex.normalization.fused_layer_norm")
    x, weight, bias = randn(4, 6, device=device), randn(6, device=device, seed=1), randn(6, device=device, seed=2)
    y = norms.FusedLayerNormAffineFunction.apply(x, weight, bias, (6,), 1e-5, True)
    torch.testing.assert_close(y, F.layer_norm(x, (6,), weight, bias), rtol=1e-5, atol=1e-5)
    y = norms.FusedRMSNormAffineFunction.apply(x, weight, (6,), 1e-5)
    torch.testing.assert_close(y, F.rms_norm(x, (6,), weight, 1e-5), rtol=1e-5, atol=1e-5)
    y = norms.FusedRMSNormFunction.apply(x, (6,), 1e-5)
    torch.testing.assert_close(y, F.rms_norm(x, (6,), None, 1e-5), rtol=1e-5, atol=1e-5)


def test_flatten_and_weight_gradients(device):
    tensors = [randn(2, 3, device=device), randn(4, device=device, seed=1), randn(1, 1, device=device, seed=2)]
    flat = load("apex_C").flatten(tensors)
    assert torch.equal(flat, torch.cat([t.flatten() for t in tensors]))
    parts = load("apex_C").unflatten(flat, tensors)
    assert all(torch.equal(a, b) for a, b in zip(parts, tensors, strict=True))
    parts[1].zero_()
    assert flat[6:10].count_nonzero() == 0, "views, as in Apex"
    x, dy = randn(5, 2, 3, device=device, dtype=torch.bfloat16), randn(5, 2, 4, device=device, dtype=torch.bfloat16)
    total = torch.ones(4, 3, device=device)
    load("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32(x, dy, total)
    expected = 1 + dy.reshape(10, 4).double().t() @ x.reshape(10, 3).double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_amp_state_is_a_view(device):
    amp, state = load("apex.amp"), load("apex.amp._amp_state")
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    assert state._amp_state.opt_properties.opt_level == "O2" and state._amp_state.verbosity == 0
    assert [scaler.loss_scale() for scaler in state._amp_state.loss_scalers] == [65536.0] * 2
    assert [p.dtype for p in state.master_params(optimizer)] == [torch.float32] * 2


def test_permutations():
    library = load("apex.contrib.sparsity.permutation_lib")
    matrix = torch.zeros(8, 16)
    matrix[:, :8] = randn(8, 8)  # all that counts is in two of four stripes
    order = library.accelerated_search_for_good_permutation(matrix, {"strategy": "exhaustive"})
    assert sorted(order) == list(range(16))
    mask = load("apex.contrib.sparsity.sparse_masklib").m4n2_1d
    kept, before = ((m * mask(m, 0.5)).abs().sum() for m in (matrix[:, order], matrix))
    assert kept > before
    with pytest.raises(ValueError, match="strategy is one of exhaustive, .* not 'random'"):
        library.accelerated_search_for_good_permutation(matrix, {"strategy": "random"})
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = randn(3, 8)
    expected = model(x)
    assert library.Permutation.permute_model(model) is model
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
@pytest.mark.parametrize("affine", [True, False])
def test_norms_are_cast_under_autocast(device, name, affine):
    """As in Apex; those of fusedops keep their input's type."""
    if name.startswith("Mixed") and not affine:
        return
    options = {} if affine else {"elementwise_affine": False}
    module = getattr(load("apex.normalization"), name)(8, **options).to(device)
    x = randn(4, 8, device=device).requires_grad_()
    expected = module(x)
    with torch.autocast(device.type, torch.bfloat16):
        y = module(x)
    assert (expected.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
