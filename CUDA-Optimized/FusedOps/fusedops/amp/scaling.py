"""`scale_loss`: the backward pass of a loss under mixed precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusedops.amp.setup import State, _as_list, stash_of

__all__ = ["scale_loss"]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """``with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``

    Gives loss * scale in float32. At the end of the block the gradients are divided by the scale (into the float32
    masters, with O2), added to those of earlier blocks, and looked through for infinities: that waits for the device
    once. After an overflow the next step of these optimizers is left out, and the scale goes down. An exception in the
    block leaves gradients and scale as they were before it.
    ``delay_unscale=True``: leave the gradients scaled, since another backward pass into them follows before the step
    (accumulation). ``model`` and ``delay_overflow_check`` are accepted for the sake of the signature. RuntimeError
    before `initialize`, and for a ``loss_id`` beyond its ``num_losses``.
    """
    if State.properties is None and State.enabled:
        raise RuntimeError("Invoked scale_loss before amp.initialize.")
    if not State.enabled:
        yield loss
        return
    if not 0 <= loss_id < len(State.loss_scalers):
        raise RuntimeError(f"loss_id {loss_id} of {len(State.loss_scalers)} losses: raise num_losses of amp.initialize")
    scaler = State.loss_scalers[loss_id]
    scale = scaler.loss_scale()
    stashes = [stash_of(optimizer) for optimizer in _as_list(optimizers)]
    for stash in stashes:
        stash.put_aside()
    try:
        yield loss.float() * scale
    except BaseException:
        for stash in stashes:
            stash.put_back()
        raise
    if delay_unscale:
        for stash in stashes:
            stash.pending = True
        return
    flags = [flag for flag in [stash.unscale(scale) for stash in stashes] if flag is not None]
    overflow = scaler.dynamic and any(bool(flag) for flag in flags)
    if scaler.update(overflow):
        for stash in stashes:
            stash.skip = (
                f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
            )
