"""`torch.amp.GradScaler` that leaves the search for infinities to optimizers which do it anyway."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """As `torch.amp.GradScaler`, but a step of a fused optimizer reads the gradients once less.

    torch's reads and writes them all, to look for infinities, before a step that unscales by itself. The fused
    optimizers see that from the norm of the gradients, which they need to clip, or else find by one launch that reads
    only. (A norm whose square is beyond float32, 1.8e19, counts as infinite.) Other optimizers, and steps after
    ``unscale_``, go torch's way.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled or not getattr(optimizer, "finds_inf_itself", False):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:  # unscaled before, or stepped twice, which raises
            return super().step(optimizer, *args, **kwargs)
        self._check_scale_growth_tracker("step")
        optimizer.grad_scale, optimizer.finds_inf = self._get_scale_async(), True
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            optimizer.grad_scale, optimizer.finds_inf = None, False
        skipped = getattr(optimizer, "skipped", None)
        if skipped is None:
            raise AssertionError(
                "No inf checks were recorded for this optimizer."
            )  # as torch's: nothing had a gradient
        state["found_inf_per_device"] = {skipped.device: skipped.clone()}
        state["stage"] = OptState.STEPPED
        return result
