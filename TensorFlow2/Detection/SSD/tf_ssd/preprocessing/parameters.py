"""Checks of the values that a step's parameters may have.

A check takes a value and returns None if it is good, or else the words that complete "must be ...". Tensors pass: their
values are known only when the graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Check = Callable[[Any], str | None]


def number(low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Check:
    """A finite number from `low` (or greater than `above`) to `high`."""

    def check(value: Any) -> str | None:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if good and low <= value <= high and value > above:
            return None
        limits = [f"at least {low:g}"] if low > -math.inf else []
        limits += [f"greater than {above:g}"] if above > -math.inf else []
        limits += [f"at most {high:g}"] if high < math.inf else []
        return " ".join(["a number", " and ".join(limits)]).rstrip()

    return check


def whole(low: int = 1) -> Check:
    """A whole number from `low` on."""

    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        return None if good else f"a whole number of at least {low}"

    return check


def flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def one_of(*choices: Any) -> Check:
    def check(value: Any) -> str | None:
        good = any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)
        return None if good else f"one of {', '.join(map(str, choices))}"

    return check


def optional(inner: Check) -> Check:
    """None or what `inner` accepts."""

    def check(value: Any) -> str | None:
        words = None if value is None else inner(value)
        return words and f"null or {words}"

    return check


def pair(inner: Check, ordered: bool = False) -> Check:
    """Two values that `inner` accepts; `ordered`: the first is not greater than the second."""

    def check(value: Any) -> str | None:
        if not _is_list(value) or len(value) != 2:
            return "a list of two values"
        words = next((words for words in map(inner, value) if words), None)
        if words:
            return f"a list of two values, each {words}"
        return "a list of two values, the smaller one first" if ordered and value[0] > value[1] else None

    return check


def list_of(inner: Check) -> Check:
    """A list, not empty, of values that `inner` accepts."""

    def check(value: Any) -> str | None:
        if not _is_list(value) or not len(value):
            return "a list of values"
        words = next((words for words in map(inner, value) if words), None)
        return words and f"a list of values, each {words}"

    return check


def either(*checks: Check) -> Check:
    """What one of the checks accepts."""

    def check(value: Any) -> str | None:
        words = [words for words in (one(value) for one in checks) if words]
        return " or ".join(words) if len(words) == len(checks) else None

    return check


def permutation(value: Any) -> str | None:
    good = _is_list(value) and all(isinstance(item, int) for item in value) and sorted(value) == list(range(len(value)))
    return None if good else "a list that holds each of 0, 1, ... once"


fraction = number(0, 1)
positive = number(above=0)
range_of_positive = pair(positive, ordered=True)
range_of_area = pair(number(above=0, high=1), ordered=True)
size = either(pair(whole()), optional(whole()))
# The parameters of every random crop of a window that is drawn until it suits the objects.
CROP: dict[str, Check] = {
    "min_object_covered": fraction,
    "aspect_ratio_range": range_of_positive,
    "area_range": range_of_area,
    "overlap_thresh": fraction,
    "clip_boxes": flag,
    "random_coef": fraction,
}
CASES: dict[str, Check] = {name: list_of(check) for name, check in CROP.items()}
PADDED: dict[str, Check] = {
    "min_padded_size_ratio": pair(positive),
    "max_padded_size_ratio": pair(positive),
}
colour = optional(either(number(), list_of(number())))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def first_fault(name: str, check: Check, value: Any) -> str | None:
    """'NAME must be ..., got VALUE', or None."""
    words = None if _has_tensor(value) else check(value)
    return words and f"{name} must be {words}, got {value!r}"


def _has_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or (_is_list(value) and any(_has_tensor(item) for item in value))
