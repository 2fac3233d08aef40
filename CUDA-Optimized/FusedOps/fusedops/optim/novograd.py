"""NovoGrad (Ginsburg et al., 2019): momentum on gradients divided by a running norm of their tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops.optim.adam import bias_corrections, kernel_dtypes, log_of
from fusedops.optim.base import Control, FusedOptimizer, Options, check_betas, check_hyperparameters, rate, whole
from fusedops.optim.bucket import Bucket

__all__ = ["NovoGrad"]


class NovoGrad(FusedOptimizer):
    """NovoGrad with Apex's arguments.

    n = ||g|| of each tensor; s = sqrt(b2 s^2 + (1 - b2) n^2), and s = n in the first step unless ``init_zero``; m =
    b1 m + b3 g, p -= lr (m / (1 - b1^t) / (s / sqrt(1 - b2^t) + eps) + weight_decay p), where b3 = 1 - b1 (1 without
    ``grad_averaging``). ``reg_inside_moment``: m = b1 m + b3 (g / (s ... + eps) + weight_decay p), p -= lr m / (1 -
    b1^t). State: ``step``, ``exp_avg``, ``exp_avg_norm`` (s, one number). Two launches a group: norms, update.
    ``options`` are the keyword arguments of `Options`.
    """

    moment_names = ("exp_avg",)
    scalar_names = ("exp_avg_norm",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        **options: Any,
    ) -> None:
        if amsgrad:
            raise ValueError("NovoGrad does not support amsgrad")
        if norm_type not in (0, 2):
            raise ValueError(f"norm_type is 2 (L2) or 0 (largest magnitude), not {norm_type}")
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "grad_averaging": grad_averaging, "reg_inside_moment": reg_inside_moment, "norm_type": norm_type,
            "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults, Options.of(options))

    def always_normed(self) -> bool:
        return True

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import layerwise_kernels as kernels
        from fusedops.optim.kernels import TENSORS

        table = bucket.bind()
        beta1, beta2 = map(float, group["betas"])
        lr, loaded = rate(group, bucket.device)
        kernels.novograd_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, bucket.ticket, bucket.steps,
            *control.arguments(1.0), table.first_item, bucket.workspace("gradient_partials", table.num_items),
            bucket.scalars["exp_avg_norm"], bucket.workspace("fresh", table.num_tensors), self.options.seed, lr,
            float(group["weight_decay"]), float(beta1), 1.0 - beta1 if group["grad_averaging"] else 1.0, log_of(beta1),
            float(beta2), 1.0 - beta2, log_of(beta2), float(group["eps"]), **kernel_dtypes(bucket, TYPES, "M"),
            **control.switches(), ZERO=self.options.zero_grads, LR_LOADED=loaded, LARGEST=group["norm_type"] == 0,
            INSIDE=bool(group["reg_inside_moment"]), INIT_ZERO=bool(group["init_zero"]),
            CORRECTED=bool(group["bias_correction"]), SIZE=kernels.BLOCK, PARTIALS=kernels.PARTIALS, TENSORS=TENSORS,
            num_warps=kernels.NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        beta1, beta2 = map(float, group["betas"])
        beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
        for index, gradient in enumerate(bucket.gradients):
            x = bucket.read(index)
            g = gradient.to(x.dtype) * factor
            step = float(bucket.steps[index])
            running = bucket.scalars["exp_avg_norm"]
            norm = whole(torch.linalg.vector_norm(g, math.inf if group["norm_type"] == 0 else 2)) if g.numel() else 0.0
            if step > 1 or group["init_zero"]:
                old = float(running[index])
                if group["norm_type"] == 0:
                    norm = beta2 * old + (1 - beta2) * norm
                else:
                    norm = math.sqrt(beta2 * old**2 + (1 - beta2) * norm**2)
            running[index] = norm
            correction1, correction2 = bias_corrections(group, step)
            divisor = norm / math.sqrt(correction2) + group["eps"]
            if group["reg_inside_moment"]:
                g = g / divisor + group["weight_decay"] * x
            m = beta1 * bucket.moments["exp_avg"][index].to(x.dtype) + beta3 * g
            bucket.moments["exp_avg"][index].copy_(m)
            change = m / correction1
            if not group["reg_inside_moment"]:
                change = change / divisor + group["weight_decay"] * x
            bucket.write(index, x - float(group["lr"]) * change, self.options.seed)
