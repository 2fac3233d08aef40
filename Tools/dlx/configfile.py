"""The files behind `dlx.config`: YAML with the place of every value, files that build on others, one-line output."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

__all__ = ["ConfigError", "Entry", "read_config", "show", "to_text"]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line and names where the value came from."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A value as written (a string from the command line, any YAML value from a file) and where it was written."""

    value: Any
    source: str


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-3` is a number, `12:30` and `no` are strings (PyYAML follows 1.1, where they are not)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":int", ":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this loader, or one that follows YAML 1.1, would read as something else."""


_Dumper.yaml_implicit_resolvers = {
    first: _Loader.yaml_implicit_resolvers.get(first, []) + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
    for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
}


def read_config(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Entry]:
    """The entries of a file over those of its `base`."""
    shown = os.path.relpath(path) if not os.path.relpath(path).startswith("..") else str(path)
    if path.resolve() in seen:
        raise ConfigError(f"{shown}: base: files refer to each other in a circle: {', '.join(p.name for p in seen)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}: cannot be read: {error}") from None
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{shown}: expected `key: value` lines, got a {root.id}")
        entries: dict[str, Entry] = {}
        for key_node, value_node in root.value:
            source = f"{shown}:{key_node.start_mark.line + 1}"
            key = str(loader.construct_object(key_node, deep=True))
            if key in entries:
                raise ConfigError(f"{source}: {key}: given twice, first at {entries[key].source}")
            entries[key] = Entry(loader.construct_object(value_node, deep=True), source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{shown}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    finally:
        loader.dispose()
    base = entries.pop("base", None)
    if base is None:
        return entries
    if not isinstance(base.value, str):
        raise ConfigError(f"{base.source}: base: expected a file name, got {show(base.value)}")
    parent = next((p for p in (path.parent / base.value, path.parent / f"{base.value}.yaml") if p.is_file()), None)
    if parent is None:
        raise ConfigError(f"{base.source}: base: no such file: {path.parent / base.value}")
    return {**read_config(parent, (*seen, path.resolve())), **entries}


def to_text(value: Any) -> str:
    """`value` as YAML on one line."""
    # Inside a list, a scalar of any kind is dumped without a document end marker.
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6).strip()[1:-1]
    return json.dumps(value) if "\n" in text else text


def show(value: Any) -> str:
    """`value` as an error message shows it, in the words of YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
