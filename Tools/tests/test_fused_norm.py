"""The Triton batch-norm kernels against the plain modules in float64.

They run on a GPU, or without one through Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/test_fused_norm.py``.
The bound is relative to the error of plain PyTorch in the same dtype.
"""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
from torch import Tensor

from dlx import fused_norm, norm
from dlx.norm import BatchNormAct, Pending

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU (or TRITON_INTERPRET=1 with triton installed)")
    if INTERPRETED:
        monkeypatch.setattr(fused_norm, "is_supported", lambda x: True)
        from dlx import fused_norm_kernels

        monkeypatch.setattr(fused_norm_kernels, "_processors", lambda device: 4)


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def case(kind: str, shape: tuple[int, ...], dtype: torch.dtype, fused: bool, seed: int = 0) -> dict[str, Tensor]:
    """Output, gradients and running statistics of one configuration, from the same random numbers each time."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * scale + offset).to(torch.bfloat16)

    channels = shape[1]
    x, residual = draw(*shape, scale=2.0, offset=3.0), draw(*shape)
    pooled = (shape[0], channels, (shape[2] - 1) // 2 + 1, (shape[3] - 1) // 2 + 1)
    grads = [draw(*(pooled if kind == "pool" else shape)) for _ in range(2)]
    layers = []
    for _ in range(2):
        layer = BatchNormAct(channels, act="none" if "linear" in kind else "relu")
        layer.weight.data = draw(channels, scale=0.2, offset=1.0).float()
        layer.bias.data = draw(channels, scale=0.2).float()
        layers.append(layer.to(DEVICE))
    if dtype == torch.float64:
        layers = [copy.deepcopy(layer).double() for layer in layers]

    def place(t: Tensor) -> Tensor:
        return t.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)

    x, residual, grads = place(x).requires_grad_(), place(residual).requires_grad_(), [place(g) for g in grads]
    layer, branch = layers
    layer.fused = branch.fused = fused
    branch.act = "none"
    if kind == "pool":
        outputs = (layer.pooled(x),)
    elif kind in ("plain", "linear"):
        outputs = (layer(x),)
    elif kind == "residual":
        outputs = layer.fork(x, residual)
    elif kind == "linear-residual":
        outputs = (layer(x, residual),)
    else:
        outputs = layer.fork(x, Pending(residual, branch))
    torch.autograd.backward(outputs, grads[: len(outputs)])
    result = {"output": outputs[0].detach(), "grad_x": x.grad, "running_mean": layer.running_mean}
    result |= {"grad_weight": layer.weight.grad, "grad_bias": layer.bias.grad, "running_var": layer.running_var}
    if residual.grad is not None:
        result["grad_residual"] = residual.grad
    if branch.weight.grad is not None:
        result |= {"branch_grad_weight": branch.weight.grad, "branch_grad_bias": branch.bias.grad}
        result |= {"branch_running_var": branch.running_var}
    return result


KINDS = ["plain", "linear", "residual", "linear-residual", "branch", "pool"]
SHAPES = [(2, 16, 7, 5), (3, 64, 9, 8), (2, 512, 3, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64(kind, shape, dtype):
    expected = case(kind, shape, torch.float64, fused=False)
    plain = case(kind, shape, dtype, fused=False)
    fused = case(kind, shape, dtype, fused=True)
    assert fused.keys() == expected.keys()
    for name in expected:
        ours, theirs = error(fused[name], expected[name]), error(plain[name], expected[name])
        floor = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 4
        if INTERPRETED and dtype == torch.bfloat16:
            floor *= 4  # the interpreter truncates to bfloat16 where a GPU rounds
        assert ours <= max(2 * theirs, floor), f"{name}: {ours:.2e} against {theirs:.2e} in plain PyTorch"
        assert fused[name].dtype == plain[name].dtype


def test_large_mean_keeps_the_variance():
    """A channel far from zero (mean 1000, spread 1) must not lose its variance to cancellation."""
    x = (torch.randn(4, 16, 8, 8) + 1000).to(DEVICE).contiguous(memory_format=torch.channels_last)
    layer = BatchNormAct(16, act="none").to(DEVICE)
    y = layer(x)
    expected = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    assert error(y, expected) < 1e-3


def test_evaluation_and_switch_use_plain_pytorch(monkeypatch):
    """Only training takes the kernels; ``set_fused(False)`` never does."""
    layer = BatchNormAct(16).to(DEVICE)
    x = torch.randn(2, 16, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)

    def refuse(*args, **kwargs):
        raise AssertionError("kernel used")

    monkeypatch.setattr(fused_norm, "batch_norm_act", refuse)
    norm.set_fused(layer, False)
    layer(x)
    norm.set_fused(layer, None)
    layer.eval()(x)
    with pytest.raises(AssertionError, match="kernel used"):
        layer.train()(x)
