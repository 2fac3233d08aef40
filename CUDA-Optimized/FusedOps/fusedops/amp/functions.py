"""Functions of a script's own in a chosen precision, and what the wrapped models share with them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "disable_casts", "float_function", "half_function", "promote_function", "register_float_function",
    "register_half_function", "register_promote_function",
]  # fmt: skip

DEVICES = ("cuda", "cpu")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in nested lists, tuples and dictionaries to a dtype; all else is kept."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, cast(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def floating_tensors(value: Any) -> list[Tensor]:
    """Floating tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in floating_tensors(item)]


@contextlib.contextmanager
def disable_casts() -> Any:
    """Functions run in the dtypes of their arguments, inside a model under O1 too."""
    with contextlib.ExitStack() as stack:
        for device in DEVICES:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocast_dtype() -> torch.dtype | None:
    """The dtype of the autocast that is on, if one is."""
    for device in DEVICES:
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def half_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: under O1 the function gets its floating arguments in the 16-bit dtype."""
    return _wrapped(function, lambda arguments: autocast_dtype())


def float_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: under O1 the function gets its floating arguments in float32."""
    return _wrapped(function, lambda arguments: torch.float32)


def promote_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: under O1 the function gets its floating arguments in the widest of their dtypes."""
    return _wrapped(function, _widest)


def register_half_function(module: Any, function_name: str) -> None:
    """Replace ``module.function_name`` by its `half_function`. ValueError if there is none."""
    _register(module, function_name, half_function)


def register_float_function(module: Any, function_name: str) -> None:
    """Replace ``module.function_name`` by its `float_function`. ValueError if there is none."""
    _register(module, function_name, float_function)


def register_promote_function(module: Any, function_name: str) -> None:
    """Replace ``module.function_name`` by its `promote_function`. ValueError if there is none."""
    _register(module, function_name, promote_function)


def _register(module: Any, name: str, decorator: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    setattr(module, name, decorator(getattr(module, name)))


def _widest(arguments: Any) -> torch.dtype | None:
    dtypes = [tensor.dtype for tensor in floating_tensors(arguments)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _wrapped(function: Callable[..., Any], choose: Callable[[Any], torch.dtype | None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        if autocast_dtype() is None:
            return function(*arguments, **named)
        dtype = choose([arguments, named])
        with disable_casts():
            if dtype is None:
                return function(*arguments, **named)
            return function(*cast(arguments, dtype), **cast(named, dtype))

    return wrapper
