"""Apex's accumulation of weight gradients, which Megatron-LM imports: main_grad += d_output^T input."""

from __future__ import annotations

from torch import Tensor

from fusedops import ops

__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """Into float32 ``main_grad`` (out, in), of input (..., in) and d_output (..., out)."""
    ops.accumulate_weight_gradient(input, d_output, main_grad)


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """Into ``main_grad`` of the factors' own 16-bit type."""
    ops.accumulate_weight_gradient(input, d_output, main_grad)
