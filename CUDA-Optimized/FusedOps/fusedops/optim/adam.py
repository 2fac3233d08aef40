"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019) in one launch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fusedops.optim.base import Control, FusedOptimizer, Options, check_betas, check_hyperparameters, rate
from fusedops.optim.bucket import MASTERS, Bucket

__all__ = ["Adam", "AdamW"]


class Adam(FusedOptimizer):
    """Adam, with L2 decay added to the gradient as in `torch.optim.Adam`, or decoupled as in `AdamW`.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps); decoupled
    decay first does p -= lr weight_decay p. State as torch's: ``step``, ``exp_avg``, ``exp_avg_sq``.
    ``bias_correction=False`` leaves the two divisions out. ``options`` are the keyword arguments of `Options` (master
    weights, clipping ...). ``amsgrad`` is not supported (ValueError).
    """

    moment_names = ("exp_avg", "exp_avg_sq")
    decoupled_by_default = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        bias_correction: bool = True,
        decoupled_weight_decay: bool | None = None,
        **options: Any,
    ) -> None:
        if amsgrad:
            raise ValueError(f"{type(self).__name__} does not support amsgrad")
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        if decoupled_weight_decay is None:
            decoupled_weight_decay = self.decoupled_by_default
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False, "maximize": maximize,
            "bias_correction": bias_correction, "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults, Options.of(options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, group in enumerate(state_dict["param_groups"]):
            if group.get("amsgrad"):
                raise ValueError(f"{type(self).__name__} does not support amsgrad, on in group {number} of the state")
        super().load_state_dict(state_dict)

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        from fusedops.ops.multi_tensor_kernels import TYPES
        from fusedops.optim import kernels

        table = bucket.bind()
        beta1, beta2 = map(float, group["betas"])
        lr, loaded = rate(group, bucket.device)
        kernels.adam_kernel[(table.programs,)](
            table.addresses, table.items, table.num_items, table.num_tensors, bucket.ticket, bucket.steps,
            *control.arguments(-1.0 if group["maximize"] else 1.0), self.options.seed, lr,
            float(group["weight_decay"]), float(beta1), 1.0 - beta1, log_of(beta1), float(beta2), 1.0 - beta2,
            log_of(beta2), float(group["eps"]), **kernel_dtypes(bucket, TYPES, "M", "V"), **control.switches(),
            ZERO=self.options.zero_grads, LR_LOADED=loaded, DECOUPLED=bool(group["decoupled_weight_decay"]),
            CORRECTED=bool(group["bias_correction"]), SIZE=kernels.BLOCK, TENSORS=kernels.TENSORS,
            num_warps=kernels.NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        beta1, beta2 = map(float, group["betas"])
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        for index, gradient in enumerate(bucket.gradients):
            x = bucket.read(index)
            g = gradient.to(x.dtype) * factor
            step = float(bucket.steps[index])
            if group["decoupled_weight_decay"]:
                x -= lr * weight_decay * x
            else:
                g += weight_decay * x
            m = beta1 * bucket.moments["exp_avg"][index].to(x.dtype) + (1 - beta1) * g
            v = beta2 * bucket.moments["exp_avg_sq"][index].to(x.dtype) + (1 - beta2) * g * g
            bucket.moments["exp_avg"][index].copy_(m)
            bucket.moments["exp_avg_sq"][index].copy_(v)
            correction1, correction2 = bias_corrections(group, step)
            x -= lr / correction1 * m / (v.sqrt() / math.sqrt(correction2) + group["eps"])
            bucket.write(index, x, self.options.seed)


class AdamW(Adam):
    """`Adam` with decoupled weight decay, 0.01 unless told otherwise; the arguments of `torch.optim.AdamW`."""

    decoupled_by_default = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def bias_corrections(group: dict[str, Any], step: float) -> tuple[float, float]:
    """-> 1 - beta1 ** step and 1 - beta2 ** step; ones where a group asks for no correction."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = map(float, group["betas"])
    return 1 - beta1**step, 1 - beta2**step


def log_of(beta: float) -> float:
    """log(beta), and for 0 a number whose exponential is 0."""
    return math.log(beta) if beta > 0 else -1e4


def kernel_dtypes(bucket: Bucket, types: dict[Any, Any], *letters: str) -> dict[str, Any]:
    """The kernels' dtypes of gradients, parameters, moments (by ``letters``) and weights, and the form of the
    weights.
    """
    import torch

    moments = [values[0].dtype for values in bucket.moments.values()]
    remainder = bucket.master == "remainder"
    return {
        "G": types[bucket.gradient_dtype],
        "P": types[torch.int16 if remainder else bucket.parameters[0].dtype],
        **{letter: types[dtype] for letter, dtype in zip(letters, moments, strict=True)},
        "W": types[torch.int16 if remainder else torch.float32],
        "MASTER": MASTERS.index(bucket.master),
    }
