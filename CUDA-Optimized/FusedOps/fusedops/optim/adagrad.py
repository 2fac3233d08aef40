"""Adagrad (Duchi, Hazan and Singer, 2011) in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops.optim.adam import kernel_dtypes
from fusedops.optim.base import Control, FusedOptimizer, Options, check_hyperparameters, rate
from fusedops.optim.bucket import Bucket

__all__ = ["Adagrad"]


class Adagrad(FusedOptimizer):
    """Adagrad as `torch.optim.Adagrad`: h += g^2, p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(h) + eps), with
    weight_decay p added to g, or with ``decoupled_weight_decay`` to what is subtracted. State: ``step``, ``sum``.
    ``options`` as in `Options`.
    """

    moment_names = ("sum",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        check_hyperparameters(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults, Options.of(options))

    def initial_value(self, group: dict[str, Any]) -> float:
        return group["initial_accumulator_value"]

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import kernels

        table = bucket.bind()
        lr, loaded = rate(group, bucket.device)
        kernels.adagrad_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, bucket.ticket, bucket.steps,
            *control.arguments(-1.0 if group["maximize"] else 1.0), self.options.seed, lr, float(group["weight_decay"]),
            float(group["lr_decay"]), float(group["eps"]), **kernel_dtypes(bucket, TYPES, "M"), **control.switches(),
            ZERO=self.options.zero_grads, LR_LOADED=loaded, DECOUPLED=bool(group["decoupled_weight_decay"]),
            SIZE=kernels.BLOCK, TENSORS=kernels.TENSORS, num_warps=kernels.NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        for index, gradient in enumerate(bucket.gradients):
            x = bucket.read(index)
            g = gradient.to(x.dtype) * factor
            lr = float(group["lr"]) / (1 + (float(bucket.steps[index]) - 1) * group["lr_decay"])
            if not group["decoupled_weight_decay"]:
                g += group["weight_decay"] * x
            total = bucket.moments["sum"][index].to(x.dtype) + g * g
            bucket.moments["sum"][index].copy_(total)
            change = g / (total.sqrt() + group["eps"])
            if group["decoupled_weight_decay"]:
                change += group["weight_decay"] * x
            bucket.write(index, x - lr * change, self.options.seed)
