"""Checkpoints of Apex's optimizers for the ones here.

Apex counts steps by group (``param_groups[i]["step"]``, a number or a tensor), leaves its float32 masters out, and
NovoGrad keeps the running norms in the group as two tensors, one for float16 and one for float32 parameters, in the
parameters' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["from_apex_state_dict"]

# Names in Apex's groups that are not hyperparameters here.
DROPPED = ("step", "exp_avg_sq", "max_grad_norm", "capturable")


def from_apex_state_dict(
    state_dict: dict[str, Any], optimizer: Optimizer, masters: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """-> what ``optimizer.load_state_dict`` takes, from the state of Apex's FusedAdam, FusedSGD, FusedLAMB,
    FusedMixedPrecisionLamb, FusedNovoGrad or FusedAdagrad over the same parameters.

    ``masters``: float32 weights, one for each parameter in order, if they were saved beside it. Hyperparameters that
    Apex does not save in the groups are the optimizer's own. ValueError where groups or parameters do not match.
    """
    groups = optimizer.param_groups
    if len(groups) != len(state_dict["param_groups"]):
        raise ValueError(f"{len(state_dict['param_groups'])} groups in the state, {len(groups)} in the optimizer")
    parameters = [parameter for group in groups for parameter in group["params"]]
    if masters is not None and len(masters) != len(parameters):
        raise ValueError(f"{len(masters)} masters for {len(parameters)} parameters")
    state: dict[int, dict[str, Any]] = {}
    new_groups = []
    position = 0
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {index} has {len(saved['params'])} parameters in the state, "
                f"{len(group['params'])} in the optimizer"
            )
        own = {name: value for name, value in group.items() if name != "params"}
        kept = {name: value for name, value in saved.items() if name in own or name == "params"}
        new_groups.append(own | {name: value for name, value in kept.items() if name not in DROPPED})
        norms = _running_norms(saved, group["params"])
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            entries = {name: value for name, value in state_dict["state"].get(number, {}).items() if value is not None}
            if entries:
                entries["step"] = torch.tensor(float(saved.get("step", 1.0)))
                if number in norms:
                    entries["exp_avg_norm"] = norms[number]
                if masters is not None:
                    entries["master"] = masters[position].detach().float()
                for name, value in entries.items():
                    if value.dim() and value.shape != parameter.shape:
                        raise ValueError(
                            f"{name} of parameter {number} is {tuple(value.shape)}, "
                            f"the parameter {tuple(parameter.shape)}"
                        )
                state[number] = entries
            position += 1
    return {"state": state, "param_groups": new_groups}


def _running_norms(saved: dict[str, Any], parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """NovoGrad's running norms by the parameters' numbers."""
    if "exp_avg_sq" not in saved:
        return {}
    half, single = (list(norms) for norms in saved["exp_avg_sq"])
    norms = {}
    for number, parameter in zip(saved["params"], parameters, strict=True):
        source = single if parameter.dtype == torch.float32 else half
        if not source:
            raise ValueError(f"no running norm for parameter {number} of dtype {parameter.dtype}")
        norms[number] = source.pop(0).detach().float().reshape(())
    return norms
