"""Batch norm over all processes of a group, with any number of samples on each, none at all included.

Each process makes count, mean and sum of squared deviations of its own batch in float32 (float64 of float64); they are
gathered and merged as by Chan et al. (1979), so the statistics are those of the whole batch however it is divided. The
backward pass adds two sums per channel over the processes. Works with any backend of torch.distributed, on CPUs, too,
where torch.nn.SyncBatchNorm does not; names of parameters and buffers are torch's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.registration import once

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _ends(x: Tensor, values: Tensor) -> Tensor:
    """values (C,), broadcast over x (N, C, ...)."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def merged(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(count, mean, variance) of all from parts (processes, 1 + 2 C): count, means, sums of squared deviations."""
    counts = parts[:, :1]
    means, spreads = parts[:, 1:].chunk(2, 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    spread = (spreads + counts * (means - mean).square()).sum(0)
    return count, mean, spread / count


class _Normalise(torch.autograd.Function):
    """Normalises by statistics of all processes; the backward pass is a collective, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        rows = x.numel() // x.shape[1] if x.shape[1] else 0
        if rows:
            spread, mean = torch.var_mean(wide, _axes(x), correction=0)
        else:
            spread = mean = wide.new_zeros(x.shape[1])
        own = torch.cat([mean.new_full((1,), rows), mean, spread * rows])
        count, mean, variance = merged(_gathered(own, group))
        rstd = torch.rsqrt(variance + eps)
        scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
        offset = -mean * scale if bias is None else bias.to(rstd.dtype) - mean * scale
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.save_for_backward(x, weight, mean, rstd, count)
        ctx.mark_non_differentiable(count, mean, variance)
        ctx.set_materialize_grads(False)
        return (wide * _ends(x, scale) + _ends(x, offset)).to(x.dtype), count, mean, variance

    @staticmethod
    @functools.partial(once, "SyncBatchNorm")
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple:
        x, weight, mean, rstd, count = ctx.saved_tensors
        wide = dy.to(rstd.dtype)
        normal = (x.to(rstd.dtype) - _ends(x, mean)) * _ends(x, rstd)
        level, along = wide.sum(_axes(x)), (wide * normal).sum(_axes(x))
        dweight = along.to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = level.to(dy.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        total = torch.cat([level, along])
        if _processes(ctx.group) > 1:
            dist.all_reduce(total, group=ctx.group)
        level, along = (total / count).chunk(2)
        scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
        dx = (wide - _ends(x, level) - normal * _ends(x, along)) * _ends(x, scale)
        return dx.to(x.dtype), dweight, dbias, None, None


def _processes(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _gathered(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    processes = _processes(group)
    if processes == 1:
        return own[None]
    parts = [torch.empty_like(own) for _ in range(processes)]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts)


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of x (N, C, ...) over the processes of `process_group` (None: all); forward(x, z) adds z after it.

    `fuse_relu` applies a ReLU last. In evaluation it is torch's batch norm. ValueError where x has other channels or
    one dimension, and where a process that is alone has one value per channel in training; where several have one
    value together the running variance becomes NaN, as looking for that would wait for the device.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        fuse_relu: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group, self.fuse_relu = process_group, fuse_relu

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"expected (N, {self.num_features}, ...), got {tuple(x.shape)}")

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        self._check_input_dim(x)
        if self.training and x.numel() == x.shape[1] and _processes(self.process_group) == 1:
            raise ValueError(f"expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        if self.training or self.running_mean is None:
            y, count, mean, variance = _Normalise.apply(x, self.weight, self.bias, self.eps, self.process_group)
            if self.training and self.running_mean is not None:
                self._track(count, mean, variance)
        else:
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        y = y if z is None else y + z
        return torch.relu(y) if self.fuse_relu else y

    @torch.no_grad()
    def _track(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked += 1
        share = 1.0 / self.num_batches_tracked.float() if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))  # of one value: NaN, as a variance of one value is
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running + share * (new.to(running.dtype) - running))


def convert_sync_batchnorm(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """The module with every torch batch norm below it replaced by a SyncBatchNorm that holds the same tensors."""
    replaced = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
        options = (module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        replaced = SyncBatchNorm(*options, process_group)
        replaced.weight, replaced.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(replaced, name, getattr(module, name))
        replaced.training = module.training
    for name, child in module.named_children():
        setattr(replaced, name, convert_sync_batchnorm(child, process_group))
    return replaced
