"""Arithmetic of a training step: `autocast` for fp32, tf32, bf16 and fp16, and the loss scaler that fp16 needs.

    scaler = LossScaler(model.named_parameters(), enabled=precision == "fp16")
    with autocast(precision, device):
        loss = ...
    scaler.scale(loss).backward()
    scaler.unscale()                     # only where gradients are clipped or looked at before the step
    scaler.step(optimizer)

fp16 gradients under 6e-8 become 0, so the loss is multiplied by a power of two that is as large as the gradients allow
(Micikevicius et al. 2018, arXiv:1710.03740). A step whose gradients are not finite is left out and the scale is halved.
Unlike torch.amp.GradScaler the scale has a floor, and a run that only overflows stops and names the tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DTYPES", "PRECISIONS", "LossScaler", "NonFiniteError", "autocast"]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of weights
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NonFiniteError(ArithmeticError):
    """Training cannot go on: gradients were not finite for many steps in a row."""


def autocast(precision: str, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """The context for the forward pass and the loss. ValueError for a precision that is not one of PRECISIONS.

    fp32 computes exact fp32 products; tf32 lets CUDA round their inputs to 10 bits, elsewhere it is fp32. These two set
    the mode of the process and leave it set, since the backward pass runs outside of the context. bf16 and fp16 are
    autocast: parameters and reductions stay fp32.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    device = torch.device(device)
    if device.type == "cuda":
        # fp32 remainders of an autocast model (a loss, a master-weight product) may use tf32 there.
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
    if precision in _AUTOCAST:
        return torch.autocast(device.type, dtype=_AUTOCAST[precision])
    return contextlib.nullcontext()


def inference_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The type of weights and activations in inference; "auto" is fp16 on a GPU of sm_80 or newer, else fp32."""
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        precision = "fp16" if fast else "fp32"
    return DTYPES[precision]


class LossScaler:
    """Dynamic loss scaling over `named_parameters`; with `enabled=False` it does nothing and costs nothing.

    The scale starts at `initial`, doubles after `growth_interval` good steps in a row up to `ceiling`, and halves
    after a step whose gradients are not finite, never below `floor`; all are powers of two, so scaling is exact. After
    `patience` bad steps in a row NonFiniteError names the first bad tensor.

    On CUDA with a fused optimiser nothing waits for the GPU: whether the gradients are finite stays a tensor there, the
    optimiser's kernel reads it, and the count of bad steps is looked at every `check_every` steps. So the step can be
    captured in a CUDA graph; then call `check()` now and then.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        enabled: bool = True,
        initial: float = 2.0**16,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
        growth_interval: int = 2000,
        patience: int = 20,
        check_every: int = 50,
    ) -> None:
        for name, value in (("initial", initial), ("floor", floor), ("ceiling", ceiling)):
            if not (math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5):
                raise ValueError(f"{name} must be a power of two, got {value!r}")
        if not floor <= initial <= ceiling:
            raise ValueError(f"need floor <= initial <= ceiling, got {floor:g}, {initial:g}, {ceiling:g}")
        for name, value in (("growth_interval", growth_interval), ("patience", patience), ("check_every", check_every)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.enabled = enabled
        self.floor, self.ceiling = floor, ceiling
        self.growth_interval, self.patience, self.check_every = growth_interval, patience, check_every
        self._parameters = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._steps = 0
        self._unscaled = False
        if not enabled:
            return
        if not self._parameters:
            raise ValueError("no parameter requires a gradient")
        device = self._parameters[0][1].device
        self._scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._found = torch.zeros((), dtype=torch.float32, device=device)  # 1 where this step's gradients are bad
        self._run = torch.zeros((), dtype=torch.float32, device=device)  # bad steps in a row
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss * self._scale.to(loss.device) if self.enabled else loss

    def unscale(self) -> None:
        """Divide the gradients by the scale and note whether all are finite. `step` does it if it was not called."""
        if not self.enabled:
            return
        if self._unscaled:
            raise RuntimeError("unscale() was called twice for one step")
        self._unscaled = True
        self._found.zero_()
        inverse = self._scale.reciprocal()
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for _, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient._values() if gradient.is_sparse else gradient
                groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), gradients in groups.items():
            found = self._found if device == self._found.device else torch.zeros((), device=device)
            # The kernel behind torch.amp.GradScaler: one pass over all gradients, no wait.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(device))
            if found is not self._found:
                self._found.copy_(torch.maximum(self._found, found.to(self._found.device)))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimiser unless a gradient is not finite, then adapt the scale. May raise NonFiniteError."""
        if not self.enabled:
            optimizer.step()
            return
        if not self._unscaled:
            self.unscale()
        self._unscaled = False
        on_device = self._found.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False)
        if on_device:
            optimizer.grad_scale, optimizer.found_inf = None, self._found
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif not self._found.item():
            optimizer.step()
        self._update()
        self._steps += 1
        if not on_device or (self._steps % self.check_every == 0 and not torch.cuda.is_current_stream_capturing()):
            self.check()

    def check(self) -> None:
        """Raise NonFiniteError if the last `patience` steps or more all had bad gradients. Waits for the GPU."""
        if not self.enabled or self._run.item() < self.patience:
            return
        raise NonFiniteError(
            f"gradients were not finite for {int(self._run.item())} steps in a row (loss scale {self.value:g}): "
            f"{self.first_non_finite() or 'their tensors are finite by now'}"
        )

    def first_non_finite(self) -> str | None:
        """The first parameter that is not finite, or else the first gradient: its name, shape and how many values."""
        for kind in ("parameter", "gradient"):
            for name, parameter in self._parameters:
                tensor = parameter.detach() if kind == "parameter" else parameter.grad
                if tensor is None:
                    continue
                bad = int((~torch.isfinite(tensor)).sum())
                if bad:
                    return f"{kind} {name!r} {list(tensor.shape)} has {bad} of {tensor.numel()} values not finite"
        return None

    @property
    def value(self) -> float:
        """The scale. Waits for the GPU, as `skipped` and `last_skipped` do."""
        return self._scale.item() if self.enabled else 1.0

    @property
    def skipped(self) -> int:
        """How many steps were left out so far."""
        return int(self._skipped.item()) if self.enabled else 0

    @property
    def last_skipped(self) -> bool:
        """Whether the last step was left out."""
        return bool(self._found.item()) if self.enabled else False

    def state_dict(self) -> dict[str, float]:
        if not self.enabled:
            return {}
        return {"scale": self.value, "good": int(self._good), "run": int(self._run), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`. An empty state (of a run without scaling) leaves the scaler as it is."""
        if not self.enabled or not state:
            return
        scale = float(state["scale"])
        if not (math.isfinite(scale) and self.floor <= scale <= self.ceiling and math.frexp(scale)[0] == 0.5):
            raise ValueError(f"scale must be a power of two in [{self.floor:g}, {self.ceiling:g}], got {scale!r}")
        self._scale.fill_(scale)
        self._good.fill_(int(state["good"]))
        self._run.fill_(float(state["run"]))
        self._skipped.fill_(float(state["skipped"]))

    def _update(self) -> None:
        # Tensor arithmetic throughout, so that a CUDA graph can hold it.
        bad = self._found > 0
        self._good.add_(1).mul_(~bad)
        grow = self._good >= self.growth_interval
        factor = torch.where(bad, 0.5, torch.where(grow, 2.0, 1.0))
        self._scale.mul_(factor).clamp_(self.floor, self.ceiling)
        self._good.mul_(~grow)
        self._run.add_(1).mul_(bad)
        self._skipped.add_(bad)
