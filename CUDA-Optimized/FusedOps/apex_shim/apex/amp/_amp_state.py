"""What `apex.amp` keeps between calls, for scripts that look at it: ``_amp_state.loss_scalers[0].loss_scale()``."""

from __future__ import annotations

from fusedops.amp import LossScaler, Properties, master_params
from fusedops.amp.setup import State

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print"]


class AmpState:
    """A view of the state of `fusedops.amp`; to be read only."""

    hard_override = False
    allow_incoming_model_not_fp32 = False

    @property
    def opt_properties(self) -> Properties | None:
        """What the last ``initialize`` chose; None before."""
        return State.properties

    @property
    def loss_scalers(self) -> list[LossScaler]:
        return State.loss_scalers

    @property
    def verbosity(self) -> int:
        return State.verbosity


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print, if ``initialize`` was not told ``verbosity=0``; ``rank0``: in the first process only."""
    import torch.distributed as dist

    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if State.verbosity > 0 and (first or not rank0):
        print(msg)
