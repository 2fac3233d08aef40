"""Training-mode batch norm fused with residual sum, ReLU and pooling: autograd functions over the Triton kernels.

Batch norm in training is bound by memory: the floor is the number of times an activation map is read or written.
For one map this module needs three passes forward (statistics; read and write) and five backward, adds the residual,
its own batch norm and the activation without further passes, and recomputes masks instead of storing them. The
reference is plain PyTorch in ``norm.BatchNormAct``; the kernels are used only where ``is_supported`` says so.

M = N * H * W rows, C channels; every map is read as a row-major M x C matrix (channels_last memory).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .norm import BatchNormAct, Pending

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _kernels():
    """The kernel module, imported on first use because Triton comes only with GPU builds of PyTorch."""
    from . import fused_norm_kernels

    return fused_norm_kernels


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_supported(x: Tensor) -> bool:
    """Whether the kernels take this tensor: a GPU map in channels_last, C a power of two of at least 16."""
    channels = x.shape[1] if x.dim() == 4 else 0
    return (
        x.is_cuda
        and x.dim() == 4
        and x.dtype in DTYPES
        and channels >= 16
        and channels & (channels - 1) == 0
        and x.shape[0] * x.shape[2] * x.shape[3] > 1
        and x.numel() < 2**31  # offsets are 32-bit
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
        and _has_triton()
    )


def batch_norm_act(
    x: Tensor, norm: BatchNormAct, residual: Tensor | Pending | None = None, fork: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``act(norm(x) + residual)`` in training mode; updates the running statistics. ``fork`` returns it twice."""
    branch = None if residual is None or isinstance(residual, Tensor) else residual
    if branch is not None:
        residual = branch.x
    if residual is not None:
        residual = residual.to(x.dtype).contiguous(memory_format=torch.channels_last)
    parameters = (norm.weight, norm.bias) + ((branch.norm.weight, branch.norm.bias) if branch else (None, None))
    main, shortcut = _BatchNormAct.apply(x, residual, *parameters, norm, branch.norm if branch else None)
    return (main, shortcut) if fork else main


def batch_norm_relu_pool(x: Tensor, norm: BatchNormAct) -> Tensor:
    """``max_pool2d(relu(norm(x)), 3, 2, 1)`` in training mode without ever writing the unpooled activation."""
    return _BatchNormReluPool.apply(x, norm.weight, norm.bias, norm)


def _matched(grad: Tensor | None, like: Tensor) -> Tensor | None:
    if grad is None:
        return None
    return grad.to(like.dtype).contiguous(memory_format=torch.channels_last)


class _BatchNormAct(torch.autograd.Function):
    """Two outputs that share memory, so that two consumers' gradients arrive apart and are added in the kernel."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, branch_weight, branch_bias, norm, branch_norm):
        kernels = _kernels()
        stats = kernels.batch_statistics(x, norm)
        branch = branch_norm is not None
        branch_stats = kernels.batch_statistics(residual, branch_norm) if branch else None
        relu = norm.act == "relu"
        y = kernels.apply_forward(x, stats, residual, branch_stats, relu)
        # Without a residual the sign of the output follows from x alone; the mask costs no memory traffic.
        keeps_output = relu and residual is not None
        ctx.save_for_backward(
            x,
            residual if branch else None,
            y if keeps_output else None,
            stats,
            branch_stats,
        )
        ctx.relu, ctx.has_residual, ctx.has_branch = relu, residual is not None, branch
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    def backward(ctx, grad_main, grad_shortcut):
        x, branch_x, y, stats, branch_stats = ctx.saved_tensors
        if grad_main is None:
            grad_main, grad_shortcut = grad_shortcut, None
        if grad_main is None:
            return (None,) * 8
        kernels = _kernels()
        stores = grad_shortcut is not None or (ctx.has_residual and ctx.relu)
        grad, sums, coefficients = kernels.reduce_backward(
            _matched(grad_main, x),
            _matched(grad_shortcut, x),
            x,
            y,
            branch_x,
            stats,
            branch_stats,
            relu=ctx.relu,
            stores=stores,
        )
        grad_x, grad_branch = kernels.apply_backward(
            grad, x, branch_x, stats, coefficients, relu=ctx.relu and not stores
        )
        grad_residual = grad_branch if ctx.has_branch else (grad if ctx.has_residual else None)
        branch_sums = (sums[2], sums[3]) if ctx.has_branch else (None, None)
        return grad_x, grad_residual, sums[0], sums[1], *branch_sums, None, None


class _BatchNormReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, norm):
        kernels = _kernels()
        stats = kernels.batch_statistics(x, norm)
        pooled, winner = kernels.pool_forward(x, stats)
        ctx.save_for_backward(x, winner, stats)
        return pooled

    @staticmethod
    def backward(ctx, grad):
        x, winner, stats = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _kernels().pool_backward(_matched(grad, x), winner, x, stats)
        return grad_x, grad_weight, grad_bias, None
