"""Apex's data parallelism on torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.submodules import give_submodules
from fusedops.nn import SyncBatchNorm as _SyncBatchNorm
from fusedops.optim import LARC

__all__ = [
    "LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
    "create_syncbn_process_group",
]  # fmt: skip


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with Apex's arguments: those that steer its buckets and streams are accepted and have no effect.

    RuntimeError where gradients were to be summed or divided otherwise than to the mean, or kept in Apex's buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError("shared_param is no longer supported as an option.")
        if not gradient_average or gradient_predivide_factor != 1.0 or retain_allreduce_buffers:
            raise RuntimeError(
                "gradients are averaged by torch's DistributedDataParallel: gradient_average=False, other "
                "gradient_predivide_factor and retain_allreduce_buffers=True need a communication hook"
            )
        super().__init__(module)


class Reducer:
    """Averages gradients over the processes when `reduce` is called. ``module_or_grads_list``: a module or tensors."""

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if self.module is not None else list(module_or_grads_list)
        if self.module is not None:
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(tensor.detach(), 0)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average now, in place."""
        gradients = self.grads
        if self.module is not None:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


class SyncBatchNorm(_SyncBatchNorm):
    """``channel_last=True``: inputs are [N, ..., C] instead of [N, C, ...]."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, fuse_relu)
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        if not self.channel_last:
            return super().forward(input, z)
        z = None if z is None else z.movedim(-1, 1)
        return super().forward(input.movedim(-1, 1), z).movedim(1, -1)


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """-> the module with every batch norm in it (or itself) replaced by a `SyncBatchNorm` of the same parameters."""
    result = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(
        module, nn.modules.instancenorm._InstanceNorm
    ):
        result = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_group,
            channel_last,
        )  # fmt: skip
        result.weight, result.bias = module.weight, module.bias
        for name, buffer in module.named_buffers(recurse=False):
            setattr(result, name, buffer)
        result.train(module.training)
    for name, child in module.named_children():
        result.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return result


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """-> this process's group of ``group_size`` processes that follow each other; 0: None, which stands for all."""
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if group_size < 0 or group_size > world or world % group_size:
        raise ValueError(f"group_size must divide the {world} processes, not {group_size}")
    own = None
    for first in range(0, world, group_size):
        group = dist.new_group(range(first, first + group_size))
        if first <= dist.get_rank() < first + group_size:
            own = group
    return own


give_submodules(__name__)
