"""Stochastic gradient descent with momentum in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops.optim.adam import kernel_dtypes
from fusedops.optim.base import Control, FusedOptimizer, Options, check_hyperparameters, rate
from fusedops.optim.bucket import Bucket

__all__ = ["SGD"]


class SGD(FusedOptimizer):
    """SGD as `torch.optim.SGD`: d = g + weight_decay p; b = momentum b + (1 - dampening) d, where the first b is d; p
    -= lr b, or
    with ``nesterov`` p -= lr (d + momentum b).

    ``wd_after_momentum`` adds weight_decay p to what is subtracted instead of to the gradient. State:
    ``momentum_buffer`` (with momentum) and ``step``, which torch's state does without: one loaded without it counts
    as begun. ``options`` are the keyword arguments of `Options`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        wd_after_momentum: bool = False,
        **options: Any,
    ) -> None:
        check_hyperparameters(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs momentum and no dampening, not momentum={momentum} and dampening={dampening}"
            )
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "wd_after_momentum": wd_after_momentum,
        }  # fmt: skip
        super().__init__(params, defaults, Options.of(options))

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import kernels

        table = bucket.bind()
        lr, loaded = rate(group, bucket.device)
        with_momentum = bool(bucket.moments)
        dtypes = {"M": TYPES[bucket.parameters[0].dtype]} | kernel_dtypes(bucket, TYPES, *("M" * with_momentum))
        kernels.sgd_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, bucket.ticket, bucket.steps,
            *control.arguments(-1.0 if group["maximize"] else 1.0), self.options.seed, lr, float(group["weight_decay"]),
            float(group["momentum"]), float(group["dampening"]), **dtypes, **control.switches(),
            ZERO=self.options.zero_grads, LR_LOADED=loaded, MOMENTUM=with_momentum, NESTEROV=bool(group["nesterov"]),
            DECAY_LAST=bool(group["wd_after_momentum"]), SIZE=kernels.BLOCK, TENSORS=kernels.TENSORS,
            num_warps=kernels.NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        momentum, weight_decay = group["momentum"], group["weight_decay"]
        for index, gradient in enumerate(bucket.gradients):
            x = bucket.read(index)
            d = gradient.to(x.dtype) * factor
            if not group["wd_after_momentum"]:
                d += weight_decay * x
            if momentum:
                kept = bucket.moments["momentum_buffer"][index]
                first = float(bucket.steps[index]) == 1
                buffer = d.clone() if first else momentum * kept.to(x.dtype) + (1 - group["dampening"]) * d
                kept.copy_(buffer)
                d = d + momentum * buffer if group["nesterov"] else buffer
            if group["wd_after_momentum"]:
                d = d + weight_decay * x
            bucket.write(index, x - float(group["lr"]) * d, self.options.seed)
