"""The table of preprocessing functions: what tensors each takes, which parameters it has, and what they may be.

`step` enters a function into the table and lets it check its parameters on every call, so that a wrong value is the
same ValueError in a direct call, in a list given to `preprocess`, and in a YAML file.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from . import fields
from .parameters import Check, first_fault

__all__ = ["STEPS", "Step", "arguments_of", "find", "step"]

SEEDS = ("seed", "random_seed")
CACHE = "preprocess_vars_cache"
STEPS: dict[str, Step] = {}


@dataclass(frozen=True)
class Step:
    """One function of the library. `tensors`: the fields of an example that it takes, in the order of its arguments."""

    name: str
    function: Callable[..., Any]
    tensors: tuple[str, ...]
    checks: Mapping[str, Check]
    defaults: Mapping[str, Any]  # of every parameter that is no tensor, seed or cache; inspect._empty without one
    ordered: tuple[tuple[str, str], ...] = ()
    cases: tuple[str, ...] = field(default=())

    def faults(self, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(parameter, what is wrong) for the first fault of these keyword arguments, or nothing."""
        for name in given:
            if name not in self.defaults and name not in SEEDS:
                close = difflib.get_close_matches(str(name), self.defaults, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; it has: {', '.join(self.defaults) or 'none'}"
                return [(str(name), f"{self.name} has no parameter {name!r}{hint}")]
        values = {**self.defaults, **given}
        for name, default in self.defaults.items():
            if values[name] is inspect.Parameter.empty:
                return [(name, f"{name} is missing, which {self.name} needs")]
            words = first_fault(name, self.checks[name], values[name])
            # A default is good by definition, unless it stands for "must be given" and its check refuses None.
            if words and (name in given or default is None):
                return [(name, words)]
        for low, high in self.ordered:
            if _comparable(values[low]) and _comparable(values[high]) and np.any(np.greater(values[low], values[high])):
                return [(low, f"{low} must not be greater than {high}, got {values[low]!r} and {values[high]!r}")]
        lengths = {name: len(values[name]) for name in self.cases}
        if len(set(lengths.values())) > 1:
            odd = next((name for name in given if name in lengths), self.cases[0])
            words = ", ".join(f"{name} {length}" for name, length in lengths.items())
            return [(odd, f"{self.name} needs as many values of each case's parameters; there are {words}")]
        return []


def step(
    checks: Mapping[str, Check] | None = None,
    ordered: Iterable[tuple[str, str]] = (),
    cases: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: enter a function into the table.

    `checks` has one check for each parameter that is neither a tensor nor the seed or the cache. `ordered` pairs must
    not be the wrong way round; `cases` are the lists that hold one value per case and so must be of one length.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters
        tensors = tuple(fields.ARGUMENTS[name] for name in parameters if name in fields.ARGUMENTS)
        own = [name for name in parameters if name not in (*fields.ARGUMENTS, *SEEDS, CACHE)]
        missing = set(own) ^ set(checks or {})
        if missing:
            raise TypeError(f"{function.__name__}: parameters and checks differ in {', '.join(sorted(missing))}")
        defaults = {name: parameters[name].default for name in own}
        entry = Step(function.__name__, function, tensors, checks or {}, defaults, tuple(ordered), tuple(cases))
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise ValueError(f"{entry.name}: {error}") from None
            for _, words in entry.faults({name: value for name, value in bound.items() if name in entry.defaults}):
                raise ValueError(f"{entry.name}: {words}")
            _check_tensors(entry.name, bound)
            return function(*args, **kwargs)

        STEPS[entry.name] = Step(**{**vars(entry), "function": checked})
        return checked

    return enter


def find(name: str) -> Step:
    """The step of this name. ValueError with the nearest one."""
    if name not in STEPS:
        close = difflib.get_close_matches(str(name), STEPS, n=1)
        raise ValueError(f"no step {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return STEPS[name]


def arguments_of(function: Callable[..., Any]) -> tuple[str | None, bool]:
    """(name of the seed's argument or None, whether it takes a cache), for functions of the library and of users."""
    names = inspect.signature(function).parameters
    return next((name for name in SEEDS if name in names), None), CACHE in names


_SHAPES = {
    "image": ("[height, width, channels]", [None, None, None]),
    "boxes": ("[objects, 4]", [None, 4]),
    "labels": ("[objects] or [objects, classes]", None),
    "label_weights": ("[objects]", [None]),
    "label_confidences": ("[objects]", [None]),
    "multiclass_scores": ("[objects, classes]", [None, None]),
    "masks": ("[objects, height, width]", [None, None, None]),
    "keypoints": ("[objects, keypoints, 2]", [None, None, 2]),
}


def _check_tensors(name: str, bound: Mapping[str, Any]) -> None:
    for argument, (words, shape) in _SHAPES.items():
        value = bound.get(argument)
        if value is None or shape is None:
            continue
        found = value.shape if tf.is_tensor(value) else tf.TensorShape(np.shape(value))
        if not found.is_compatible_with(shape):
            raise ValueError(f"{name}: {argument} must have the shape {words}, got {found}")


def _comparable(value: Any) -> bool:
    return value is not None and not tf.is_tensor(value)
