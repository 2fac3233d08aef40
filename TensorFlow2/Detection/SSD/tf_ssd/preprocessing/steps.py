"""Lists of steps as YAML, and the table of all steps.

    steps:
      - random_horizontal_flip
      - random_crop_image: {min_object_covered: 0.0, area_range: [0.75, 1.0]}
      - resize_image:
          new_height: 320
          new_width: 320

`python -m tf_ssd.preprocessing --list-steps` prints every step with its parameters and defaults.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import yaml

from .registry import SEEDS, STEPS, Step, find

__all__ = ["list_steps", "load_steps", "parse_steps"]


def load_steps(path: str | os.PathLike) -> list[tuple[Any, dict[str, Any]]]:
    """The steps of a YAML file, as `preprocess` takes them. ValueErrors name file, step and key."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or list(content) != ["steps"]:
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: expected the one key 'steps', found: {found}")
    return parse_steps(content["steps"], str(path))


def parse_steps(steps: Any, source: str = "steps") -> list[tuple[Any, dict[str, Any]]]:
    """Steps from plain values: a list of names, and of maps from one name to its parameters."""
    if not isinstance(steps, list):
        raise ValueError(f"{source}: steps must be a list, got {steps!r}")
    return [_parse(entry, f"{source}: step {number}") for number, entry in enumerate(steps, 1)]


def _parse(entry: Any, where: str) -> tuple[Any, dict[str, Any]]:
    if isinstance(entry, dict) and len(entry) == 1:
        name, given = next(iter(entry.items()))
    elif isinstance(entry, str):
        name, given = entry, None
    else:
        raise ValueError(f"{where}: expected a name, or one name with its parameters, got {entry!r}")
    try:
        step = find(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    where = f"{where} ({name})"
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected parameters as key: value, got {given!r}")
    for key, words in step.faults(given):
        raise ValueError(f"{where}: {key}: {words}")
    for key in SEEDS:
        if given.get(key) is not None and (not isinstance(given[key], int) or isinstance(given[key], bool)):
            raise ValueError(f"{where}: {key}: {key} must be a whole number, got {given[key]!r}")
    return step.function, dict(given)


def list_steps() -> str:
    """Every step, what it does, and its parameters with their defaults; the parameters in YAML's notation."""
    return "\n".join(_describe(step) for _, step in sorted(STEPS.items()))


def _describe(step: Step) -> str:
    summary = (inspect.getdoc(step.function) or "").split("\n\n")[0].replace("\n", " ")
    lines = [step.name, f"    {summary}", f"    tensors: {', '.join(step.tensors)}"]
    for name, default in step.defaults.items():
        text = "(required)" if default is inspect.Parameter.empty else _yaml(default)
        lines.append(f"    {name}: {text}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    plain = yaml.safe_dump(_lists(value), default_flow_style=True, width=10**6).strip()
    return plain.removesuffix("...").strip()


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
