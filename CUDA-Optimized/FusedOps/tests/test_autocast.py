"""Under torch.autocast: products run in its type, as torch's linear; all else keeps the types that it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedops import nn as fused
from fusedops import ops

B16 = torch.bfloat16
FP32 = torch.float32


def leaf(*shape, device, dtype=FP32, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return x.requires_grad_()


def lengths(device):
    return torch.tensor([3, 2], device=device), torch.tensor([2, 1], device=device)


# Operators that keep types: name -> (call, leaves' shapes, types under autocast)
KEPT = {
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, 8, w, b), ((4, 8), (8,), (8,)), (B16, FP32, FP32)),
    "rms_norm": (lambda x, w: ops.rms_norm(x, 8, w, 1e-5), ((4, 8), (8,)), (B16, FP32)),
    "add_layer_norm": (lambda x, r: ops.add_layer_norm(x, r, 8)[0], ((4, 8), (4, 8)), (B16, FP32)),
    "add_rms_norm": (lambda x, r: ops.add_rms_norm(x, r, 8, eps=1e-5)[1], ((4, 8), (4, 8)), (B16, FP32)),
    "cross_entropy": (lambda x: ops.cross_entropy(x, torch.arange(4, device=x.device)), ((4, 8),), (B16,)),
    "focal_loss": (lambda x: ops.focal_loss(x, torch.arange(4, device=x.device)), ((4, 8),), (B16,)),
    "scaled_softmax": (lambda x: ops.scaled_softmax(x, 0.5, causal=True), ((2, 4, 8),), (B16,)),
    "rope": (
        lambda q, k: torch.cat(ops.rope(q, k, *ops.rotary_table(4, 8, device=q.device)), 2),
        ((2, 4, 2, 8), (2, 4, 1, 8)), (B16, B16),
    ),
    "rope_2d": (
        lambda q: ops.rope_2d(q, None, *(2 * ops.rotary_table(2, 4, device=q.device)), 2)[0], ((1, 4, 2, 8),), (FP32,),
    ),
    "swiglu": (ops.swiglu, ((4, 8), (4, 8)), (B16, B16)),
    "geglu": (ops.geglu, ((4, 8),), (FP32,)),
    "gated": (lambda g, v: ops.gated(g, v, "sigmoid"), ((4, 8), (4, 8)), (B16, B16)),
    "group_norm": (
        lambda x, w: ops.group_norm(x.contiguous(memory_format=torch.channels_last), 2, w, w, activation="silu"),
        ((2, 8, 3, 3), (8,)), (B16, FP32),
    ),
    "bias_activation": (ops.bias_activation, ((4, 8), (8,)), (B16, FP32)),
    "index_mul_2d": (
        lambda a, b: ops.index_mul_2d(a, b, torch.tensor([1, 1, 0], device=a.device)), ((2, 8), (3, 8)), (B16, B16),
    ),
    "transducer_joint": (
        lambda f, g: ops.transducer_joint(f, g, *lengths(f.device)), ((2, 3, 8), (2, 2, 8)), (B16, B16),
    ),
    "transducer_loss": (
        lambda x: ops.transducer_loss(
            x, torch.ones(2, 1, dtype=torch.int32, device=x.device), lengths(x.device)[0], lengths(x.device)[1] - 1, 0
        ),
        ((2, 3, 2, 5),), (FP32,),
    ),
    "SyncBatchNorm": (lambda x: fused.SyncBatchNorm(8).to(x.device)(x), ((4, 8),), (B16,)),
}  # fmt: skip


def result(call, leaves):
    y = call(*leaves)
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y))


@pytest.mark.parametrize("name", KEPT)
def test_types_are_kept(backend, device, name):
    call, shapes, dtypes = KEPT[name]
    leaves = [leaf(*s, device=device, dtype=d, seed=i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    expected, gradients = result(call, leaves)
    with torch.autocast(device.type, B16):
        y, found = result(call, leaves)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    for mine, its in zip(found, gradients, strict=True):
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["swiglu", "index_mul_2d", "transducer_joint"])
def test_two_types_become_the_wider(backend, device, name):
    call, shapes, _ = KEPT[name]
    leaves = [
        leaf(*s, device=device, dtype=d, seed=i) for i, (s, d) in enumerate(zip(shapes, (B16, FP32), strict=True))
    ]
    with pytest.raises(ValueError, match="float32"):
        call(*leaves)
    with torch.autocast(device.type, B16):
        y, gradients = result(call, leaves)
    assert y.dtype == FP32 and [g.dtype for g in gradients] == [B16, FP32]
    torch.testing.assert_close(y, call(leaves[0].float(), leaves[1]))


PRODUCTS = {
    "dense": (
        lambda x, w, b: ops.dense(x, w, b), lambda x, w, b: F.linear(x, w, b), ((4, 8), (6, 8), (6,)),
    ),
    "dense + relu": (
        lambda x, w, b: ops.dense(x, w, b, "relu"), lambda x, w, b: torch.relu(F.linear(x, w, b)),
        ((4, 8), (6, 8), (6,)),
    ),
    "dense_gelu_dense": (
        ops.dense_gelu_dense,
        lambda x, w, b, v, c: F.linear(F.gelu(F.linear(x, w, b), approximate="tanh"), v, c),
        ((4, 8), (6, 8), (6,), (3, 6), (3,)),
    ),
    "mlp": (
        lambda x, w, b, v, c: ops.mlp(x, [w, v], [b, c], "sigmoid"),
        lambda x, w, b, v, c: torch.sigmoid(F.linear(torch.sigmoid(F.linear(x, w, b)), v, c)),
        ((4, 8), (6, 8), (6,), (3, 6), (3,)),
    ),
    "linear_cross_entropy": (
        lambda x, w, b: ops.linear_cross_entropy(x, w, torch.arange(4, device=x.device), b, chunk_rows=3),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b).float(), torch.arange(4, device=x.device)),
        ((4, 8), (6, 8), (6,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("x_dtype", [FP32, B16])
def test_products_run_in_the_type_of_autocast(backend, device, name, x_dtype):
    call, torchs, shapes = PRODUCTS[name]
    leaves = [leaf(*s, device=device, dtype=FP32 if i else x_dtype, seed=i) for i, s in enumerate(shapes)]
    with torch.autocast(device.type, B16):
        y, gradients = result(call, leaves)
        expected, theirs = result(torchs, leaves)
    assert y.dtype == expected.dtype == (FP32 if "entropy" in name else B16)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)
    for mine, its, x in zip(gradients, theirs, leaves, strict=True):
        assert mine.dtype == its.dtype == x.dtype
        torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_accumulated_weight_gradients(device, backward_inside):
    x, weight, bias = leaf(4, 8, device=device), leaf(6, 8, device=device, seed=1), leaf(6, device=device, seed=2)
    weight.main_grad = torch.ones(6, 8, device=device)
    with torch.autocast(device.type, B16):
        y = ops.linear_accumulating(x, weight, bias)
        expected = F.linear(x, weight, bias)
        if backward_inside:
            y.sum().backward()
    if not backward_inside:
        y.sum().backward()
    assert y.dtype == B16 and weight.grad is None
    torch.testing.assert_close(y, expected)
    exact = 1 + torch.ones(6, 4, device=device) @ x.detach().to(B16).float()
    torch.testing.assert_close(weight.main_grad, exact, rtol=1e-6, atol=1e-6)  # summed in float32, not rounded
    assert x.grad.dtype == FP32 and bias.grad.tolist() == [4.0] * 6


def test_a_model_of_all_kinds(backend, device):
    """Norm, dense layers and a loss, float32 weights under autocast, near to the same model in float32."""
    model = nn.Sequential(fused.RMSNorm(8), fused.DenseGeluDense(8, 16, 8), fused.LayerNorm(8)).to(device)
    head = nn.Linear(8, 5).to(device)
    x, target = leaf(6, 8, device=device), torch.arange(6, device=device) % 5
    losses = []
    for enabled in (False, True):
        with torch.autocast(device.type, B16, enabled=enabled):
            loss = ops.linear_cross_entropy(model(x), head.weight, target, head.bias)
        gradients = torch.autograd.grad(loss, [x, *model.parameters(), *head.parameters()])
        assert loss.dtype == FP32 and all(g.dtype == FP32 and g.isfinite().all() for g in gradients)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[1] != losses[0]


def test_compiled_under_autocast(backend, device):
    x, weight = leaf(4, 8, device=device), leaf(6, 8, device=device, seed=1)
    target = torch.arange(4, device=device)

    def loss(x, weight):
        with torch.autocast(device.type, B16):
            return ops.linear_cross_entropy(ops.swiglu(x, x.to(B16)), weight, target)

    expected, gradients = result(loss, [x, weight])
    y, found = result(torch.compile(loss, fullgraph=True, backend="aot_eager"), [x, weight])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, gradients, rtol=2e-2, atol=2e-3)
