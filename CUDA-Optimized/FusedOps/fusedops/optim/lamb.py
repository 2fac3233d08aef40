"""LAMB (You et al., 2020): Adam whose step is scaled, tensor by tensor, by ||weights|| / ||update||.

Bytes for a float32 parameter: 16 read (gradient, weight, moments) and 8 written (moments) to get the norms; then 12
read again and 4 written. One launch does both, a tensor's second pass soon after its first, so that what still lies in
the L2 cache is not read from memory again: 28 where all of it does, as in tensors well below the cache, 40 where none
does. 4 more where the global norm is wanted. Without the ratio of the norms one pass of 28 is enough.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops.ops.multi_tensor_table import TensorTable
from fusedops.optim.adam import bias_corrections, kernel_dtypes, log_of
from fusedops.optim.base import Control, FusedOptimizer, Options, check_betas, check_hyperparameters, rate, whole
from fusedops.optim.bucket import Bucket

__all__ = ["LAMB"]

# Tuning values.
CHUNK = 16_384  # elements per work item
LAG = 512  # items between the passes over a tensor, so that few programs wait for a norm
PROGRAMS_PER_MULTIPROCESSOR = 8


class LAMB(FusedOptimizer):
    """LAMB with Apex's arguments.

    The gradients' global norm is clipped to ``max_grad_norm`` (0 or None: not). m = b1 m + b3 g, v = b2 v + (1 - b2)
    g^2 with b3 = 1 - b1 (1 without ``grad_averaging``); u = m^ / (sqrt(v^) + eps), plus weight_decay p
    (``adam_w_mode=False``: the decay is added to g instead); p -= lr ||p|| / ||u|| u. Where a norm is 0 the ratio is
    1, likewise in groups without decay unless ``use_nvlamb``. State: ``step``, ``exp_avg``, ``exp_avg_sq``. ``options``
    are the other keyword arguments of `Options`.
    """

    moment_names = ("exp_avg", "exp_avg_sq")
    clip_epsilon = 0.0

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        **options: Any,
    ) -> None:
        if amsgrad:
            raise ValueError("LAMB does not support amsgrad")
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "grad_averaging": grad_averaging, "adam_w_mode": adam_w_mode, "use_nvlamb": use_nvlamb,
        }  # fmt: skip
        super().__init__(params, defaults, Options.of({"max_grad_norm": max_grad_norm or None, **options}))

    def new_table(self) -> TensorTable:
        return TensorTable(CHUNK, PROGRAMS_PER_MULTIPROCESSOR, LAG)

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import layerwise_kernels as kernels
        from fusedops.optim.kernels import TENSORS

        table = bucket.bind()
        beta1, beta2 = map(float, group["betas"])
        lr, loaded = rate(group, bucket.device)
        adapted = is_adapted(group)
        workspaces = [
            bucket.workspace("weight_partials", table.num_items), bucket.workspace("update_partials", table.num_items),
            bucket.workspace("counters", 2 * table.num_tensors + 1, torch.int32),
            bucket.workspace("rates", table.num_tensors),
        ]  # fmt: skip
        kernels.lamb_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, table.first_item, table.schedule,
            2 * table.num_items if adapted else table.num_items, bucket.ticket, bucket.steps,
            *control.arguments(1.0), *workspaces, self.options.seed, lr, float(group["weight_decay"]), float(beta1),
            1.0 - beta1 if group["grad_averaging"] else 1.0, log_of(beta1), float(beta2), 1.0 - beta2, log_of(beta2),
            float(group["eps"]), **kernel_dtypes(bucket, TYPES, "M", "V"), **control.switches(),
            ZERO=self.options.zero_grads, LR_LOADED=loaded, ADAPTED=adapted, DECOUPLED=bool(group["adam_w_mode"]),
            CORRECTED=bool(group["bias_correction"]), SIZE=kernels.BLOCK, PARTIALS=kernels.PARTIALS, TENSORS=TENSORS,
            num_warps=kernels.NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        beta1, beta2 = map(float, group["betas"])
        beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
        for index, gradient in enumerate(bucket.gradients):
            x = bucket.read(index)
            g = gradient.to(x.dtype) * factor
            if not group["adam_w_mode"]:
                g += group["weight_decay"] * x
            m = beta1 * bucket.moments["exp_avg"][index].to(x.dtype) + beta3 * g
            v = beta2 * bucket.moments["exp_avg_sq"][index].to(x.dtype) + (1 - beta2) * g * g
            bucket.moments["exp_avg"][index].copy_(m)
            bucket.moments["exp_avg_sq"][index].copy_(v)
            correction1, correction2 = bias_corrections(group, float(bucket.steps[index]))
            update = m / correction1 / (v.sqrt() / math.sqrt(correction2) + group["eps"])
            if group["adam_w_mode"]:
                update += group["weight_decay"] * x
            lr = float(group["lr"])
            if is_adapted(group):
                weight_norm, update_norm = (whole(torch.linalg.vector_norm(t)) for t in (x, update))
                if weight_norm > 0 and update_norm > 0:
                    lr *= weight_norm / update_norm
            bucket.write(index, x - lr * update, self.options.seed)


def is_adapted(group: dict[str, Any]) -> bool:
    """Whether a group's learning rate is scaled by the ratio of the norms."""
    return bool(group["use_nvlamb"] or group["weight_decay"] != 0)
