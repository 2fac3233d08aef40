"""`initialize`: models and optimizers of a script made ready for a level of mixed precision."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.amp.functions import cast, floating_tensors
from fusedops.amp.loss_scaler import LossScaler
from fusedops.amp.opt_levels import Properties, properties_for
from fusedops.amp.stash import Stash, patch_optimizer

__all__ = ["initialize", "load_state_dict", "master_params", "state_dict"]


class State:
    """What the last `initialize` of this process chose; `scale_loss` and the state dictionary work on it."""

    properties: Properties | None = None
    enabled: bool = True
    loss_scalers: list[LossScaler] = []
    verbosity: int = 1


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Make models and optimizers (each one or a list) ready for ``opt_level``; -> them in the structure given.

    O0: float32. O1: the forward passes run under `torch.autocast`, their outputs are cast to float32. O2: the model
    is cast to float16 but for its batch norms, the optimizer works on float32 masters, ``state_dict`` gives float32.
    O3: all float16. Other values of the table in `opt_levels` can be given; ``cast_model_type=torch.bfloat16`` is
    new. ``num_losses`` loss scalers are made, for the ``loss_id`` of `scale_loss`. RuntimeError for combinations
    without sense, models that are wrapped in DistributedDataParallel or hold 16-bit parameters already, and
    optimizers that were given before.
    """
    State.enabled, State.verbosity = enabled, verbosity
    if not enabled:
        return models if optimizers is None else (models, optimizers)
    properties = properties_for(
        opt_level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    )
    model_list = list(models) if isinstance(models, (list, tuple)) else [models]
    optimizer_list = _as_list(optimizers)
    _check(model_list, optimizer_list)
    State.properties = properties
    State.loss_scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    for model in model_list:
        _prepare_model(model, properties, cast_model_outputs)
    for optimizer in optimizer_list:
        patch_optimizer(optimizer, bool(properties.master_weights))
    for model in model_list:
        model.register_load_state_dict_post_hook(_MastersFollow(optimizer_list))
    if optimizers is None:
        return models
    return models, optimizers


def _as_list(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def _check(models: list[nn.Module], optimizers: list[Any]) -> None:
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise RuntimeError(
                "Incoming model is wrapped for parallel training. Call amp.initialize before wrapping it."
            )
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise RuntimeError(f"Found param {name} with type {parameter.dtype}, expected torch.float32.")
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_stash"):
            raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")


def _prepare_model(model: nn.Module, properties: Properties, output_dtype: torch.dtype | None) -> None:
    dtype = properties.cast_model_type
    if dtype is not None and dtype != torch.float32:
        _cast_model(model, dtype, bool(properties.keep_batchnorm_fp32))
        model.register_state_dict_post_hook(_state_in_float32)
        model.forward = _Forward(model, dtype, output_dtype or torch.float32, autocast=False)
    elif properties.patch_torch_functions:
        model.forward = _Forward(model, torch.float16, output_dtype or torch.float32, autocast=True)
    elif dtype == torch.float32:
        model.forward = _Forward(model, torch.float32, output_dtype or torch.float32, autocast=False)


class _MastersFollow:
    """Hook: loaded weights reach the masters, which would otherwise overwrite them at the next step.

    A copy of the model (deepcopy, pickle) is no business of the optimizers, which keep to the original's parameters.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def __call__(self, model: nn.Module, incompatible: Any) -> None:
        for optimizer in self.optimizers:
            optimizer._amp_stash.follow_parameters()

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": []}


def _cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Cast in place, so that the optimizer's references stay good; parameters keep their identity."""
    for module in model.modules():
        if keep_batchnorm and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


class _Forward:
    """A model's ``forward`` with casts of inputs and outputs, or under autocast.

    An object, not a closure, so that copying the model (deepcopy, pickle) binds it to the copy.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, output_dtype: torch.dtype, autocast: bool) -> None:
        self.model = model
        self.dtype, self.output_dtype, self.autocast = dtype, output_dtype, autocast
        functools.update_wrapper(self, model.forward, updated=())  # the original is __wrapped__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        original = self.__wrapped__
        if not self.autocast:
            return cast(original(*cast(arguments, self.dtype), **cast(named, self.dtype)), self.output_dtype)
        tensors = floating_tensors([arguments, named])
        tensors = tensors or [p for p in self.model.parameters() if p.is_floating_point()][:1]
        device = tensors[0].device.type if tensors else "cpu"
        with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else self.dtype):
            return cast(original(*arguments, **named), self.output_dtype)


def _state_in_float32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            state[name] = value.float()


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that the optimizer works on: float32 masters where there are any."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, dict[str, float | int]]:
    """The loss scalers' state: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``."""
    return {f"loss_scaler{number}": scaler.state_dict() for number, scaler in enumerate(State.loss_scalers)}


def load_state_dict(state: dict[str, dict[str, float | int]]) -> None:
    """Load what `state_dict` gave, after `initialize`. RuntimeError for keys that no scaler has; warns of a different
    count.
    """
    unexpected = [key for key in state if not key.startswith("loss_scaler")]
    if unexpected:
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {', '.join(unexpected)}")
    if len(state) != len(State.loss_scalers):
        warnings.warn(
            f"Loading state_dict containing {len(state)} loss_scalers, while {len(State.loss_scalers)} are in use.",
            stacklevel=2,
        )
    for number, scaler in enumerate(State.loss_scalers):
        if f"loss_scaler{number}" in state:
            scaler.load_state_dict(state[f"loss_scaler{number}"])


def stash_of(optimizer: Any) -> Stash:
    """What `initialize` attached to an optimizer. RuntimeError if it was not given to it."""
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None:
        raise RuntimeError("This optimizer was not passed to amp.initialize.")
    return stash
