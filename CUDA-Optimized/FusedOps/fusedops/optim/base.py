"""What the optimizers share: buckets, master weights, gradient scaling, clipping, skipped steps, checkpoints.

A step is at most two launches per group and combination of dtypes: one that reads the gradients, where their norm is
wanted (to clip, or to look for infinities), and one that does all else: unscale, clip, update, round, clear the
gradients and count the step. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedops.dispatch import device_guard, is_distributed
from fusedops.ops.multi_tensor import multi_tensor_l2norm_plain, run_squares
from fusedops.ops.multi_tensor_table import TensorTable
from fusedops.optim.bucket import MASTERS, Bucket, adopt_master, initial_state, make_bucket, master_of

__all__ = ["Control", "FusedOptimizer", "Options"]


@dataclass(frozen=True)
class Options:
    """How a fused optimizer keeps its weights and treats gradients; the keyword arguments that all of them take.

    master_weights   for 16-bit parameters: "none"; "fp32", a float32 copy; "remainder", the 16 bits that a bfloat16
                     parameter lacks of its float32 master; "stochastic", bfloat16 parameters rounded at random without
                     a master
    moment_dtype     dtype of the moments; None: float32 (float64 for float64 parameters)
    max_grad_norm    clip the gradients' global norm inside the step; None: do not
    skip_nonfinite   leave out a step in which a gradient is infinite or not a number (a GradScaler asks for it by
                     itself)
    zero_grads       set the gradients to zero in the step itself, which saves a pass over them
    seed             of the stochastic rounding
    """

    master_weights: str = "none"
    moment_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    zero_grads: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.master_weights not in MASTERS:
            raise ValueError(f"master_weights is one of {', '.join(MASTERS)}, not {self.master_weights!r}")
        if self.moment_dtype is not None and not self.moment_dtype.is_floating_point:
            raise ValueError(f"moment_dtype must be a floating dtype, not {self.moment_dtype}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, not {self.max_grad_norm}")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """From keyword arguments, among which torch's choices of an implementation may be: ``foreach``, ``fused`` and
        ``capturable``, which choose nothing here, where every step is fused and can be captured, and
        ``differentiable``, which is not supported. ValueError for that, and for contradictions; TypeError for others.
        """
        chosen = {name: given.pop(name, None) for name in ("foreach", "fused", "capturable", "differentiable")}
        if chosen["differentiable"]:
            raise ValueError("differentiable=True is not supported: a fused step has no derivative")
        if chosen["foreach"] and chosen["fused"]:
            raise ValueError("`fused` and `foreach` cannot be `True` together.")  # torch's words
        return cls(**given)


@dataclass
class Control:
    """What decides a step beside the gradients. Tensors are on the bucket's device.

    ``partials[:count]``: partial sums of the squared norm of the gradients as they are (scaled), where it is wanted.
    """

    scale: Tensor | None
    found_inf: Tensor | None
    partials: Tensor | None
    count: int
    max_norm: float
    clip_epsilon: float
    checked: bool
    clipped: bool
    norm_out: Tensor
    found_out: Tensor

    def arguments(self, sign: float) -> tuple[Any, ...]:
        """The arguments ``scale ... found_out`` of the kernels' `gate`; a tensor that is not used is given as any
        other.
        """
        unused = self.found_out
        return (
            self.scale if self.scale is not None else unused,
            self.found_inf if self.found_inf is not None else unused,
            self.partials if self.partials is not None else unused,
            self.count,
            float(self.max_norm),
            float(self.clip_epsilon),
            sign,
            self.norm_out,
            self.found_out,
        )

    def switches(self) -> dict[str, bool]:
        """The switches of the kernels' `gate`."""
        return {
            "SCALED": self.scale is not None,
            "FOUND": self.found_inf is not None,
            "NORMED": self.partials is not None,
            "CHECKED": self.checked,
            "CLIPPED": self.clipped,
        }

    def plain(self, sign: float) -> tuple[float, bool]:
        """-> what gradients are multiplied by, and whether the step is skipped. Waits for the device."""
        inverse = 1.0 if self.scale is None else 1.0 / float(self.scale)
        factor, skip = sign * inverse, self.found_inf is not None and bool(self.found_inf != 0)
        if self.partials is not None:
            norm = math.sqrt(float(self.partials[: self.count].double().sum())) * inverse
            skip = skip or (self.checked and not math.isfinite(norm))
            if self.clipped:
                factor *= (
                    1.0 if norm + self.clip_epsilon <= self.max_norm else self.max_norm / (norm + self.clip_epsilon)
                )
            self.norm_out.fill_(norm)
        self.found_out.fill_(float(skip))
        return factor, skip


class FusedOptimizer(Optimizer):
    """Base of the optimizers. Subclasses name their state and give one update for a bucket in two forms.

    A drop-in for torch's: parameter groups, state by parameter (``step`` and the moments as torch names them, beside
    them ``master`` or ``remainder``), learning rates as numbers or tensors (a tensor on the device for captured CUDA
    graphs, which torch's schedulers then change in place), `torch.amp.GradScaler` (through ``grad_scale`` and
    ``found_inf``).

    Two more attributes steer a step: ``finds_inf`` (a step with gradients that are not finite is skipped) and
    ``given_squares`` (float32 [1], the sum of squares of all gradients, for an optimizer that sees only a part of
    them).

    After a step ``grad_norm`` (float32 [1], where a norm was wanted) and ``skipped`` (float32 [1], 1 if the step was
    left out) are on the device.
    """

    _step_supports_amp_scaling = True
    finds_inf_itself = True  # for fusedops.amp.GradScaler
    moment_names: tuple[str, ...] = ()
    scalar_names: tuple[str, ...] = ()
    clip_epsilon = 1e-6  # torch's

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options) -> None:
        self.options = options
        self._buckets: dict[int, tuple[list[tuple[Any, ...]], list[Bucket]]] = {}
        self._workspaces: dict[torch.device, Tensor] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets, self._workspaces = {}, {}

    # -- to be given by each optimizer

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the element-wise state that a group needs."""
        return self.moment_names

    def initial_value(self, group: dict[str, Any]) -> float:
        """What the moments begin with."""
        return 0.0

    def new_table(self) -> TensorTable:
        """The table of a new bucket."""
        return TensorTable()

    def update(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        """One step of a bucket by the kernels."""
        raise NotImplementedError

    def update_plain(self, group: dict[str, Any], bucket: Bucket, factor: float) -> None:
        """One step of a bucket with PyTorch's operators on gradients * ``factor``; ``bucket.steps`` are counted
        already.
        """
        raise NotImplementedError

    # -- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient; -> what ``closure`` gave, if there is one."""
        return self.take_step(closure)

    def take_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`step` for subclasses' own: torch runs the hooks around every class's ``step``, and they are to run once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, bucket) for group in self.param_groups for bucket in self._buckets_of(group)]
        kernels = [bucket.takes_kernels(type(self).__name__) for _, bucket in work]
        controls = self._controls(work, kernels)
        for (group, bucket), by_kernels in zip(work, kernels, strict=True):
            control = controls[bucket.device]
            if by_kernels:
                with device_guard(bucket.parameters[0]):
                    self.update(group, bucket, control)
            else:
                self._update_plainly(group, bucket, control)
            bucket.end(self.options.zero_grads)
        return loss

    def _update_plainly(self, group: dict[str, Any], bucket: Bucket, control: Control) -> None:
        factor, skip = control.plain(-1.0 if group.get("maximize") else 1.0)
        if not skip:
            bucket.steps += 1
            self.update_plain(group, bucket, factor)
        if self.options.zero_grads:
            for gradient in bucket.gradients:
                gradient.zero_()

    def _buckets_of(self, group: dict[str, Any]) -> list[Bucket]:
        """The buckets of a group's parameters that have gradients now, from the last step if they are the same."""
        gradients = [parameter.grad for parameter in group["params"]]
        # Where everything lies; looked at in each step, so it is as little as will do.
        try:
            now = [
                ((id(p), p.dtype, p.stride(), g.dtype), p.data_ptr(), g.data_ptr(), g.is_contiguous())
                for p, g in zip(group["params"], gradients, strict=True)
                if g is not None
            ]
            now.append((self.moments_of(group),))
        except RuntimeError:  # a sparse gradient has no address
            for parameter in group["params"]:
                self._check_gradient(parameter)
            raise
        known = self._buckets.get(id(group))
        if known is not None and known[0] == now:
            for bucket in known[1]:
                bucket.begin(True)
            return known[1]
        parameters = [p for p, g in zip(group["params"], gradients, strict=True) if g is not None]
        if known is not None and [entry[0] for entry in known[0]] == [entry[0] for entry in now]:
            buckets = known[1]  # the same parameters as they lay, dtypes of gradients and moments, elsewhere
        else:
            if parameters and parameters[0].is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("take a step with the same gradients before capturing a CUDA graph")
            buckets = self._make_buckets(group, parameters)
        for bucket in buckets:
            bucket.begin(False)
        self._buckets[id(group)] = (now, buckets)
        return buckets

    def _make_buckets(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Bucket]:
        """Sort parameters by device and dtypes, and give those that are new their state."""
        names = self.moments_of(group)
        sorted_out: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in parameters:
            self._check_gradient(parameter)
            state = self.state[parameter]
            if not all(name in state for name in ("step", *names, *self.scalar_names)):
                fresh = initial_state(
                    parameter, names, self.scalar_names, self.options.master_weights, self.options.moment_dtype,
                    self.initial_value(group),
                )  # fmt: skip
                kept = {name: value for name, value in state.items() if value is not None}
                if names and all(name in kept for name in names):  # torch's SGD does not count steps
                    fresh["step"].fill_(1.0)
                state.update({**fresh, **kept})
            master = master_of(parameter, self.options.master_weights)
            adopt_master(parameter, state, master)
            for name in (*names, *(key for key in ("master", "remainder") if isinstance(state.get(key), Tensor))):
                state[name] = laid_out_as(parameter, state[name])
            dtypes = (parameter.dtype, parameter.grad.dtype, *(state[name].dtype for name in names))
            traits = (parameter.device, master, is_distributed(parameter), *dtypes)
            sorted_out.setdefault(traits, []).append(parameter)
        return [
            make_bucket(chosen, [self.state[p] for p in chosen], names, self.scalar_names, traits[1], self.new_table())
            for traits, chosen in sorted_out.items()
        ]

    def _check_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        if not parameter.is_floating_point():
            raise ValueError(f"{type(self).__name__} needs real floating parameters, not {parameter.dtype}")

    def _controls(self, work: list[tuple[dict[str, Any], Bucket]], kernels: list[bool]) -> dict[torch.device, Control]:
        """What decides this step, on each device; launches the norm of the gradients where it is wanted."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found: Tensor | None = getattr(self, "found_inf", None)
        options = self.options
        checked = options.skip_nonfinite or getattr(self, "finds_inf", False)
        normed = checked or options.max_grad_norm is not None or self.always_normed()
        devices = list(dict.fromkeys(bucket.device for _, bucket in work))
        if normed and len(devices) > 1:
            raise ValueError(
                f"the norm of gradients on several devices ({', '.join(map(str, devices))}) is not supported"
            )
        controls = {}
        for device in devices:
            if device not in self._workspaces:
                self._workspaces[device] = torch.zeros(2, dtype=torch.float32, device=device)
            norm_out, found_out = self._workspaces[device].split(1)
            self.grad_norm, self.skipped = norm_out, found_out
            controls[device] = Control(
                scale=None if scale is None else scale.to(device, non_blocking=True),
                found_inf=None if found is None else found.to(device, non_blocking=True),
                partials=None,
                count=0,
                max_norm=options.max_grad_norm or 0.0,
                clip_epsilon=self.clip_epsilon,
                checked=checked,
                clipped=options.max_grad_norm is not None,
                norm_out=norm_out,
                found_out=found_out,
            )
        if normed and work:
            control = controls[devices[0]]
            given: Tensor | None = getattr(self, "given_squares", None)
            control.partials, control.count = (given, 1) if given is not None else self._sum_squares(work, kernels)
        return controls

    def always_normed(self) -> bool:
        """Whether each step needs the sums of squares of the gradients."""
        return False

    def _sum_squares(self, work: list[tuple[dict[str, Any], Bucket]], kernels: list[bool]) -> tuple[Tensor, int]:
        if not all(kernels):
            gradients = [parameter.grad for _, bucket in work for parameter in bucket.parameters]
            norm, _ = multi_tensor_l2norm_plain(gradients, False, 1.0)
            if not any(kernels):
                return norm.square(), 1
        tables = [bucket.bind() if by_kernels else None for (_, bucket), by_kernels in zip(work, kernels, strict=True)]
        total = sum(table.programs for table in tables if table is not None)
        partials = work[0][1].workspace("partials", total)
        done = 0
        for (group, bucket), table in zip(work, tables, strict=True):
            if table is None:
                continue
            items = bucket.workspace("gradient_partials", table.num_items) if self.always_normed() else None
            with device_guard(bucket.parameters[0]):
                largest = group.get("norm_type") == 0
                run_squares(table, 0, bucket.gradient_dtype, partials[done:], items, largest)
            done += table.programs
        return (partials, total) if all(kernels) else (norm.square(), 1)

    # -- checkpoints

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """After parameters were set from outside: float32 masters that do not round to theirs become them.

        A later step would write the masters over such parameters. In place; waits for the device.
        """
        for parameter, state in self.state.items():
            master = state.get("master")
            if master is not None and not torch.equal(master.to(parameter.dtype), parameter):
                rounded = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(rounded, master, parameter.to(master.dtype)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of torch's namesake.

        Tensors keep their dtype (torch's own method would cast the moments to that of the parameters); masters that the
        file lacks are made from the parameters at the next step.
        """
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._buckets = {}


def laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """The tensor itself, or a copy in the parameter's memory layout."""
    if value.shape != parameter.shape:
        raise ValueError(f"state of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}")
    strides = zip(value.stride(), parameter.stride(), parameter.shape, strict=True)
    if all(a == b for a, b, size in strides if size != 1):
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def whole(value: Tensor) -> float:
    """A number, of all shards where it is that of a DTensor. Waits for the device."""
    return float(value.full_tensor() if is_distributed(value) else value)


def rate(group: dict[str, Any], device: torch.device) -> tuple[float | Tensor, bool]:
    """-> a group's learning rate as the kernels take it, and whether it is in device memory."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device == device:
        return lr, True
    return float(lr), False


def check_hyperparameters(**values: float | Tensor) -> None:
    """ValueError for the first value that is negative or not a number."""
    for name, value in values.items():
        if not float(value) >= 0.0:
            raise ValueError(f"{name} must not be negative: {value}")


def check_betas(betas: Iterable[float]) -> None:
    """ValueError unless there are two betas in [0, 1)."""
    betas = tuple(betas)
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers, not {betas}")
    for number, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{number}] must be in [0, 1): {beta}")
