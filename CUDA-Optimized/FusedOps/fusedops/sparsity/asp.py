"""`ASP`: train a dense network, prune it to 2:4 once, and go on training with the masks (Mishra et al., 2021)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.sparsity.masks import create_mask
from fusedops.sparsity.network import permute_model

__all__ = ["ASP"]

WHITELIST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass
class Pruned:
    """A parameter that gets a mask, with the names of its buffers in the module."""

    name: str
    module: nn.Module
    parameter_name: str

    @property
    def parameter(self) -> Tensor:
        return getattr(self.module, self.parameter_name)

    @property
    def mask(self) -> Tensor:
        return self.module.get_buffer(f"__{self.parameter_name}_mma_mask")

    @property
    def saved(self) -> Tensor | None:
        return self.module._buffers.get(f"__{self.parameter_name}_mma_pruned_p")


@dataclass
class Session:
    """What `ASP` knows of the model that is being pruned."""

    model: nn.Module | None = None
    optimizer: Any = None
    calculate: Callable[[Tensor], Tensor] = create_mask
    pruned: list[Pruned] = field(default_factory=list)
    allow_recompute_mask: bool = False
    allow_permutation: bool = True
    search: dict[str, Any] = field(default_factory=dict)
    verbosity: int = 3

    def note(self, level: int, line: str) -> None:
        if self.verbosity >= level:
            print(f"[ASP] {line}")


class ASP:
    """Apex's interface: class methods on one model per process. `reset` lets go of it.

    ``init_model_for_pruning(model)``, ``init_optimizer_for_pruning(optimizer)``, ``compute_sparse_masks()``; or all
    three by ``prune_trained_model(model, optimizer)``. The masks are buffers of the modules (``__weight_mma_mask``),
    so they are part of the model's ``state_dict``, and a run that resumes from one goes on with them.
    """

    _session = Session()

    @classmethod
    def reset(cls) -> None:
        """Forget model and optimizer, to prune another."""
        cls._session = Session()

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[Tensor], Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type[nn.Module]] = WHITELIST,
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: dict[type[nn.Module], Sequence[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Choose what is pruned, and give it masks of ones.

        ``whitelist``: types of layers; ``allowed_layer_names``: only these; ``disallowed_layer_names``: not these;
        ``custom_layer_dict``: names of the parameters of types that are not known here. Weights whose first dimension
        is no multiple of 8, or second of 16, are left alone, since the sparse product does not take them.
        ``allow_recompute_mask``: keep what was pruned, for `restore_pruned_weights`. ``allow_permutation``: permute
        channels first so that more is kept (`permute_model`).
        """
        if cls._session.model is not None:
            raise RuntimeError("ASP.init_model_for_pruning was called before; ASP.reset() lets go of that model")
        names_of = {kind: tuple(names) for kind, names in (custom_layer_dict or {}).items()}
        calculate = (
            mask_calculator if callable(mask_calculator) else functools.partial(create_mask, pattern=mask_calculator)
        )
        session = Session(
            model, None, calculate, [], allow_recompute_mask, allow_permutation, cls._session.search, verbosity
        )
        kinds = (*whitelist, *names_of)
        for name, module in model.named_modules():
            if not isinstance(module, kinds) or name in disallowed_layer_names:
                continue
            if allowed_layer_names is not None and name not in allowed_layer_names:
                continue
            for parameter_name in _parameter_names(module, names_of):
                parameter = getattr(module, parameter_name)
                if parameter.dim() < 2 or parameter.shape[0] % 8 or parameter.shape[1] % 16:
                    session.note(
                        3, f"{name}.{parameter_name} {tuple(parameter.shape)} does not fit a sparse product, skipped"
                    )
                    continue
                module.register_buffer(f"__{parameter_name}_mma_mask", torch.ones_like(parameter).detach())
                if allow_recompute_mask:
                    module.register_buffer(
                        f"__{parameter_name}_mma_pruned_p", torch.zeros_like(parameter).detach().cpu()
                    )
                session.pruned.append(Pruned(f"{name}.{parameter_name}", module, parameter_name))
        cls._session = session

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Whether a model was given."""
        return cls._session.model is not None

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: Any) -> None:
        """Make the optimizer mask the gradients before each step and the weights (and their masters) after it."""
        session = cls._session
        if session.model is None:
            raise RuntimeError("call ASP.init_model_for_pruning before ASP.init_optimizer_for_pruning")
        if session.optimizer is not None:
            raise RuntimeError("ASP.init_optimizer_for_pruning was called before")
        session.optimizer = optimizer
        original = optimizer.step

        @functools.wraps(original)
        def step(self: Any, *arguments: Any, **named: Any) -> Any:
            with torch.no_grad():
                for each in session.pruned:
                    for tensor in (each.parameter, *_amp_masters(optimizer, each.parameter)):
                        if tensor.grad is not None:
                            tensor.grad.mul_(each.mask)
            result = original(*arguments, **named)
            _mask_weights(session)
            return result

        optimizer.step = types.MethodType(step, optimizer)

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Permute (the first time, if allowed), compute the masks from the weights as they are, and prune."""
        session = cls._session
        if session.model is None:
            raise RuntimeError("call ASP.init_model_for_pruning before ASP.compute_sparse_masks")
        if session.allow_permutation and not cls.is_sparsity_enabled():
            chosen = {id(each.module) for each in session.pruned}
            permute_model(
                session.model,
                lambda layer: id(layer) in chosen,
                session.optimizer if isinstance(session.optimizer, torch.optim.Optimizer) else None,
                functools.partial(session.note, 2),
                **session.search,
            )
        for each in session.pruned:
            weight = each.parameter
            if each.saved is not None:
                weight = weight + each.saved.to(weight.device)
            each.mask.copy_(session.calculate(weight))
            if each.saved is not None:
                each.saved.copy_(weight * (1 - each.mask))
            each.parameter.copy_(weight * each.mask)
            share = 100 * float(each.mask.double().mean())
            session.note(2, f"enabled {share:.2f}% density for {each.name} {tuple(each.parameter.shape)}")
        _mask_weights(session)

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Dense again: masks of ones, and what was pruned put back (needs ``allow_recompute_mask=True``)."""
        session = cls._session
        if not session.allow_recompute_mask:
            raise RuntimeError("ASP.restore_pruned_weights needs init_model_for_pruning(allow_recompute_mask=True)")
        for each in session.pruned:
            each.parameter.add_(each.saved.to(each.parameter.device))
            each.saved.zero_()
            each.mask.fill_(1)
            for master in _masters(session.optimizer, each.parameter):
                master.copy_(each.parameter)

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Whether the masks prune. RuntimeError if some do and others do not."""
        dense = [bool((each.mask == 1).all()) for each in cls._session.pruned]
        if any(dense) and not all(dense):
            names = [each.name for each, whole in zip(cls._session.pruned, dense, strict=True) if whole]
            raise RuntimeError(f"masks are inconsistent: these are all ones, others are not: {', '.join(names)}")
        return bool(dense) and not any(dense)

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: Any) -> None:
        """Prune a trained dense model in one call: masks m4n2_1d of Linear, Conv2d and MultiheadAttention layers."""
        cls.init_model_for_pruning(
            model, "m4n2_1d", verbosity=2, whitelist=[nn.Linear, nn.Conv2d, nn.MultiheadAttention]
        )
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(cls, allow_permutation: bool = True, **search: Any) -> None:
        """Whether to permute, and the arguments of `search_for_good_permutation` (strategy, window, escapes, seed)."""
        cls._session.allow_permutation = allow_permutation
        cls._session.search = search


def _parameter_names(module: nn.Module, custom: dict[type[nn.Module], tuple[str, ...]]) -> Iterator[str]:
    for kind, names in custom.items():
        if isinstance(module, kind):
            yield from names
            return
    names = ATTENTION if isinstance(module, nn.MultiheadAttention) else ("weight",)
    yield from (name for name in names if getattr(module, name, None) is not None)


def _amp_masters(optimizer: Any, parameter: Tensor) -> list[Tensor]:
    """Float32 masters that `fusedops.amp` made of a parameter."""
    stash = getattr(optimizer, "_amp_stash", None)
    return [] if stash is None else [master for p, master in stash.pairs if p is parameter]


def _masters(optimizer: Any, parameter: Tensor) -> list[Tensor]:
    """All float32 masters of a parameter."""
    if optimizer is None:
        return []
    state = optimizer.state.get(parameter, {})
    return _amp_masters(optimizer, parameter) + ([state["master"]] if "master" in state else [])


@torch.no_grad()
def _mask_weights(session: Session) -> None:
    for each in session.pruned:
        each.parameter.mul_(each.mask)
        for master in _masters(session.optimizer, each.parameter):
            master.mul_(each.mask)
        if session.optimizer is not None and "remainder" in session.optimizer.state.get(each.parameter, {}):
            session.optimizer.state[each.parameter]["remainder"].masked_fill_(each.mask == 0, 0)
