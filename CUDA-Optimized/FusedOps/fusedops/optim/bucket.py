"""A bucket: the parameters of one group that one launch updates, with their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedops.dispatch import backend_for
from fusedops.ops.multi_tensor_table import TensorTable, is_dense, same_layout
from fusedops.optim import rounding

MASTERS = ("none", "fp32", "remainder", "stochastic")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Bucket:
    """N parameters of one device and one combination of dtypes.

    ``moments``: for each name of element-wise state its N tensors; ``weights``: N masters (float32) or remainders
    (int16), or empty; ``steps``: float32 [N], which the ``step`` of each parameter's state is a view of; ``scalars``:
    other state with one number per parameter, float32 [N], seen through views likewise.
    """

    parameters: list[Tensor]
    master: str
    moments: dict[str, list[Tensor]]
    weights: list[Tensor]
    steps: Tensor
    scalars: dict[str, Tensor]
    ticket: Tensor
    table: TensorTable
    scratch: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    gradient_dtype: torch.dtype = torch.float32
    copied: list[Tensor] = field(default_factory=list)
    dense: bool = False
    bound: bool = False  # the table is right for this step
    ready: bool = False  # the last step took the kernels on the gradients where they lie

    def __post_init__(self) -> None:
        self.fixed: Sequence[Sequence[Tensor]] = [*self.moments.values(), *([self.weights] if self.weights else [])]

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def begin(self, unchanged: bool) -> None:
        """Begin a step. ``unchanged``: all parameters and gradients are where they were in the last one."""
        self.bound = unchanged and self.ready and self.table.is_current(self.device)
        if not self.bound:
            self._take_gradients()

    def end(self, zero: bool) -> None:
        """End it: let go of the gradients, so that they can be freed; ``zero`` those of which a copy was used."""
        for gradient in self.copied if zero else ():
            gradient.zero_()
        self.gradients, self.copied = [], []

    def _take_gradients(self) -> None:
        """The parameters' gradients; one laid out otherwise than its parameter is copied."""
        self.gradients, self.copied = [], []
        self.dense = all(is_dense(parameter) for parameter in self.parameters)
        for parameter in self.parameters:
            gradient = parameter.grad
            if not same_layout(parameter, gradient):
                self.copied.append(gradient)
                gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self.gradients.append(gradient)
        self.gradient_dtype = self.gradients[0].dtype

    def takes_kernels(self, name: str) -> bool:
        """Whether this step runs the kernels. RuntimeError where they are asked for and cannot."""
        tensors = [self.parameters[0], *(values[0] for values in self.moments.values())]
        chosen = self.dense and self.gradient_dtype in KERNEL_DTYPES and backend_for(*tensors, op=name) == "triton"
        if not chosen and not self.gradients:  # another backend than in the last step
            self._take_gradients()
        self.ready = chosen and not self.copied
        return chosen

    def bind(self) -> TensorTable:
        """The table of gradients, parameters, moments and weights."""
        if not self.bound:
            self.table.bind([self.gradients, self.parameters], self.fixed)
            self.bound = True
        return self.table

    def workspace(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros at first that keeps its place between steps."""
        found = self.scratch.get(name)
        if found is None or found.numel() < size:
            found = self.scratch[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return found

    def read(self, index: int) -> Tensor:
        """The weights of a parameter in the precision of the arithmetic, for the plain form."""
        parameter = self.parameters[index]
        if self.master == "fp32":
            return self.weights[index].clone()
        if self.master == "remainder":
            return rounding.join(parameter, self.weights[index])
        return parameter.to(arithmetic_dtype(parameter), copy=True)

    def write(self, index: int, x: Tensor, seed: int) -> None:
        """Store what `read` gave, after an update; ``steps`` holds the step that this is."""
        parameter = self.parameters[index]
        if self.master == "remainder":
            rounded, remainder = rounding.split(x)
            parameter.copy_(rounded)
            self.weights[index].copy_(remainder)
        elif self.master == "stochastic":
            dense = torch.empty_like(parameter, dtype=torch.float32).copy_(x)
            parameter.copy_(rounding.round_stochastically(dense, seed, index, int(self.steps[index])))
        else:
            parameter.copy_(x)
            if self.master == "fp32":
                self.weights[index].copy_(x)


def arithmetic_dtype(parameter: Tensor) -> torch.dtype:
    """float64 for float64 parameters, float32 for the others."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def master_of(parameter: Tensor, master: str) -> str:
    """The form of a parameter's weights, given what the optimizer was asked for. Only 16-bit parameters need one."""
    return master if parameter.dtype in (torch.float16, torch.bfloat16) else "none"


def initial_state(
    parameter: Tensor, names: Sequence[str], scalars: Sequence[str], master: str, dtype: torch.dtype | None, fill: float
) -> dict[str, Any]:
    """State of a parameter before its first step; ``dtype`` of the moments, None for that of the arithmetic."""
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    for name in names:
        state[name] = torch.full_like(parameter, fill, dtype=dtype or arithmetic_dtype(parameter))
    for name in scalars:
        state[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    adopt_master(parameter, state, master_of(parameter, master))
    return state


def adopt_master(parameter: Tensor, state: dict[str, Any], master: str) -> None:
    """Bring a state's master weights into the form asked for, from that in which they came, or from the parameter.

    ``master`` (float32), ``remainder`` (int16). Without loss, unless the optimizer has no place for a master.
    """
    if master == "fp32" and "master" not in state:
        if "remainder" in state:
            state["master"] = torch.empty_like(parameter, dtype=torch.float32).copy_(
                rounding.join(parameter, state["remainder"])
            )
        else:
            state["master"] = parameter.detach().float()
    if master == "remainder" and "remainder" not in state:
        if parameter.dtype != torch.bfloat16:
            raise ValueError(f"master_weights='remainder' needs bfloat16 parameters, not {parameter.dtype}")
        rounded, remainder = rounding.split(state["master"] if "master" in state else parameter.detach().float())
        parameter.copy_(rounded)
        state["remainder"] = torch.empty_like(parameter, dtype=torch.int16).copy_(remainder)
    if master == "stochastic" and parameter.dtype != torch.bfloat16:
        raise ValueError(f"master_weights='stochastic' needs bfloat16 parameters, not {parameter.dtype}")
    if master != "fp32":
        state.pop("master", None)
    if master != "remainder":
        state.pop("remainder", None)


def make_bucket(
    parameters: list[Tensor], states: list[dict[str, Any]], names: Sequence[str], scalars: Sequence[str], master: str,
    table: TensorTable,
) -> Bucket:  # fmt: skip
    """A bucket over parameters with their states, whose scalar entries become views of the bucket's own tensors."""
    gathered = {}
    for name in ("step", *scalars):
        values = [torch.as_tensor(state[name], dtype=torch.float32, device=parameters[0].device) for state in states]
        gathered[name] = torch.stack([value.reshape(()) for value in values])
        for state, view in zip(states, gathered[name].unbind(), strict=True):
            state[name] = view
    key = {"fp32": "master", "remainder": "remainder"}.get(master)
    return Bucket(
        parameters=parameters,
        master=master,
        moments={name: [state[name] for state in states] for name in names},
        weights=[state[key] for state in states] if key else [],
        steps=gathered.pop("step"),
        scalars=gathered,
        ticket=torch.zeros(1, dtype=torch.int32, device=parameters[0].device),
        table=table,
    )
