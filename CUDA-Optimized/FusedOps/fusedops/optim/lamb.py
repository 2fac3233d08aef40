"""LAMB (You et al., 2020): Adam whose step is scaled, tensor by tensor, by ||weights|| / ||update||."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops.optim.adam import bias_corrections, kernel_dtypes, log_of
from fusedops.optim.base import Control, FusedOptimizer, Options, check_betas, check_hyperparameters, rate
from fusedops.optim.bucket import Bucket

__all__ = ["LAMB"]


class LAMB(FusedOptimizer):
    """LAMB with Apex's arguments.

    The gradients' global norm is clipped to ``max_grad_norm`` (0 or None: not). m = b1 m + b3 g, v = b2 v + (1 - b2)
    g^2 with b3 = 1 - b1 (1 without ``grad_averaging``); u = m^ / (sqrt(v^) + eps), plus weight_decay p
    (``adam_w_mode=False``: the decay is added to g instead); p -= lr ||p|| / ||u|| u. Where a norm is 0 the ratio is
    1, likewise in groups without decay unless ``use_nvlamb``. State: ``step``, ``exp_avg``, ``exp_avg_sq``. Three
    launches a group: norm, moments, weights. ``options`` are the other keyword arguments of `Options`.
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

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import layerwise_kernels as kernels
        from fusedops.optim.kernels import TENSORS

        table = bucket.bind()
        beta1, beta2 = group["betas"]
        lr, loaded = rate(group, bucket.device)
        weight_partials = bucket.workspace("weight_partials", table.num_items)
        update_partials = bucket.workspace("update_partials", table.num_items)
        dtypes = kernel_dtypes(bucket, TYPES, "M", "V")
        rest1 = 1.0 - beta1 if group["grad_averaging"] else 1.0
        traits = {
            "DECOUPLED": bool(group["adam_w_mode"]), "CORRECTED": bool(group["bias_correction"]),
            "SIZE": kernels.BLOCK, "num_warps": kernels.NUM_WARPS,
            "enable_fp_fusion": False,
        }  # fmt: skip
        kernels.lamb_moments_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, bucket.steps, *control.arguments(1.0),
            weight_partials, update_partials, float(group["weight_decay"]), float(beta1), rest1, log_of(beta1),
            float(beta2), 1.0 - beta2, log_of(beta2), float(group["eps"]), **dtypes, **control.switches(),
            ZERO=self.options.zero_grads, **traits,
        )  # fmt: skip
        del dtypes["G"]
        kernels.lamb_weights_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, bucket.ticket, bucket.steps,
            control.found_out, table.first_item, weight_partials, update_partials, self.options.seed, lr,
            float(group["weight_decay"]), log_of(beta1), log_of(beta2), float(group["eps"]), **dtypes,
            LR_LOADED=loaded, ADAPTED=is_adapted(group), PARTIALS=kernels.PARTIALS, TENSORS=TENSORS, **traits,
        )  # fmt: skip

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        beta1, beta2 = group["betas"]
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
                weight_norm, update_norm = (float(torch.linalg.vector_norm(t)) for t in (x, update))
                if weight_norm > 0 and update_norm > 0:
                    lr *= weight_norm / update_norm
            bucket.write(index, x - lr * update, self.options.seed)


def is_adapted(group: dict[str, Any]) -> bool:
    """Whether a group's learning rate is scaled by the ratio of the norms."""
    return bool(group["use_nvlamb"] or group["weight_decay"] != 0)
