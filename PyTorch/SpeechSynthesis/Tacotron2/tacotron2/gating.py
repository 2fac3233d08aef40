"""The gates of WaveGlow's couplings: in training one kernel each way on a GPU, else plain PyTorch.

B batch, C channels, P positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlx.kernels import DTYPES, has_kernels


class _Gate(torch.autograd.Function):
    """Computes tanh and sigmoid again on the way back, so that only its inputs are kept."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor, condition: Tensor) -> Tensor:
        from . import waveglow_kernels

        summed = summed.contiguous()
        ctx.save_for_backward(summed, condition)
        return waveglow_kernels.gate(summed, condition)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        from . import waveglow_kernels

        found = waveglow_kernels.gate_backward(*ctx.saved_tensors, outer.contiguous())
        return found, found


def _applies(summed: Tensor, condition: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and has_kernels(summed.device.type)
        and summed.dtype == condition.dtype
        and summed.dtype in DTYPES
        and condition.stride()[1:] == (condition.shape[2], 1)
        and not torch.compiler.is_compiling()
    )


def gate(summed: Tensor, condition: Tensor) -> Tensor:
    """tanh of the first half of the channels of ``summed + condition`` (B, 2 C, P), times sigmoid of the second."""
    if _applies(summed, condition):
        return _Gate.apply(summed, condition)
    value, opened = (summed + condition).chunk(2, 1)
    return torch.tanh(value) * torch.sigmoid(opened)
