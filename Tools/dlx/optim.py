"""Optimisers, learning-rate schedules and the exponential moving average of the weights."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decays_norms: bool = False,
    slow: nn.Module | None = None,
    slow_factor: float = 1.0,
) -> list[dict]:
    """Groups by decay: weights that do; and norm gains and all biases, which do not (unless ``decays_norms``).

    Decided by shape, not by name: what is one-dimensional is a gain or a bias. The parameters of ``slow``, a part of
    the model, make groups of their own, whose rate is ``slow_factor`` of the others'.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    apart = set() if slow is None or slow_factor == 1.0 else set(slow.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:
            free = not decays_norms and parameter.dim() <= 1
            groups.setdefault((parameter in apart, free), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": 0.0 if key[1] else weight_decay}
        | ({"lr_factor": slow_factor} if key[0] else {})
        for key in sorted(groups)
    ]


def build_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
    decays_norms: bool = False,
    slow: nn.Module | None = None,
    slow_factor: float = 1.0,
    alpha: float = 0.9,
    eps: float = 0.01,
    beta2: float = 0.999,
) -> torch.optim.Optimizer:
    """SGD, RMSprop, Adam or AdamW on fused or batched kernels; ``momentum`` is Adam's first beta, ``beta2`` its second.

    ``slow``, ``slow_factor``: see `parameter_groups`. ``eps`` is that of RMSprop; Adam's is 1e-8. On a GPU rates are
    tensors, which a CUDA graph can see change.
    """
    groups = parameter_groups(model, weight_decay, decays_norms, slow, slow_factor)
    device = groups[0]["params"][0].device
    for group in groups:
        rate = lr * group.get("lr_factor", 1.0)
        group["lr"] = torch.tensor(rate, device=device) if device.type == "cuda" else rate
    if name == "sgd":
        fused = {"fused": True} if device.type == "cuda" else {"foreach": True}
        return torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, **fused)
    if name == "rmsprop":
        capturable = device.type == "cuda"
        return torch.optim.RMSprop(groups, alpha=alpha, eps=eps, momentum=momentum, foreach=True, capturable=capturable)
    if name in ("adam", "adamw"):
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        fast = {"fused": True, "capturable": True} if device.type == "cuda" else {"foreach": True}
        return kind(groups, betas=(momentum, beta2), **fast)
    raise ValueError(f"unknown optimizer {name!r}; known: sgd, rmsprop, adam, adamw")


def learning_rate(
    step: int,
    *,
    schedule: str,
    peak: float,
    end: float,
    warmup_steps: int,
    total_steps: int,
    milestones: tuple[int, ...] = (),
    factor: float = 0.1,
) -> float:
    """Rate for optimiser step ``step`` (from 0): linear warm-up to ``peak``, then cosine, linear, step or constant.

    Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, warm-up), Loshchilov and Hutter 2017 (cosine).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "cosine":
        return end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "linear":
        return peak + (end - peak) * progress
    if schedule == "step":
        return peak * factor ** sum(step >= milestone for milestone in milestones)
    if schedule == "constant":
        return peak
    raise ValueError(f"unknown schedule {schedule!r}; known: cosine, linear, step, constant")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate, times the group's ``lr_factor`` where it has one."""
    for group in optimizer.param_groups:
        own = rate * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


class ModelEma:
    """``ema = decay * ema + (1 - decay) * weight`` after every optimiser step, for parameters and float buffers."""

    def __init__(self, model: nn.Module, decay: float):
        if not 0.0 < decay < 1.0:
            raise ValueError(f"EMA decay must lie between 0 and 1, got {decay}")
        self.decay = decay
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        pairs = zip(
            self.module.state_dict(keep_vars=True).values(), model.state_dict(keep_vars=True).values(), strict=True
        )
        self._averaged, self._sources = [], []
        self._counters: list[tuple[Tensor, Tensor]] = []
        for average, source in pairs:
            if average.is_floating_point():
                self._averaged.append(average)
                self._sources.append(source)
            else:
                self._counters.append((average, source))

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._averaged, [source.detach() for source in self._sources], 1.0 - self.decay)
        for average, source in self._counters:
            average.copy_(source)
