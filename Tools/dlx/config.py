"""Typed configuration: a dataclass, YAML files over its defaults, and `--key value` over both.

    @dataclass
    class TrainConfig:
        batch_size: int = field(64, help="images per device", ge=1, group="data")
        precision: Literal["fp32", "bf16"] = field("bf16", help="arithmetic of the matrix products")

    config = parse(TrainConfig, configs_dir=Path(__file__).parent.parent / "configs")

jsonargparse checks the types and prints the help; this module adds what a training recipe needs around it: files that
build on each other (`base:`), ranges next to the field they limit, and errors of one line that name file, line, key
and value. A key that no field has is an error everywhere: a misspelt learning rate must not train with the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import re
import shlex
import shutil
import sys
import types
import typing
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from .configfile import ConfigError, Entry, read_config, show, to_text
from .files import atomic_write

__all__ = ["ConfigError", "field", "from_dict", "parse", "save", "to_dict"]

T = TypeVar("T")
COMMAND_LINE = "command line"
_BOUNDS = {
    "ge": (lambda value, bound: value >= bound, "at least"),
    "gt": (lambda value, bound: value > bound, "greater than"),
    "le": (lambda value, bound: value <= bound, "at most"),
    "lt": (lambda value, bound: value < bound, "less than"),
}


def field(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    help: str = "",
    group: str = "options",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: typing.Sequence[Any] | None = None,
) -> Any:
    """`dataclasses.field` with a help text, a heading for `--help`, and limits.

    The limits hold for a number, and for every element of a list; None (an optional field left out) passes them.
    A list or dict given as `default` is copied for every instance. Without a default the key is required.
    """
    if isinstance(default, list | dict | set):
        value, default = default, dataclasses.MISSING
        default_factory = value.copy
    metadata = {"help": help, "group": group, "choices": tuple(choices) if choices is not None else None}
    metadata.update({name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt))})
    if default is not dataclasses.MISSING:
        return dataclasses.field(default=default, metadata=metadata)
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    # kw_only lets a required key follow one with a default, in a base class or in the class itself.
    return dataclasses.field(kw_only=True, metadata=metadata)


def parse(
    config_class: type[T],
    args: typing.Sequence[str] | None = None,
    *,
    configs_dir: str | os.PathLike | None = None,
    prog: str | None = None,
    description: str | None = None,
    exit_on_error: bool = True,
    recipe: type | None = None,
    shared: type | None = None,
) -> T:
    """Build `config_class` from its defaults, the `--config` files in order, and the `--key value` pairs.

    `--config` takes a file or a NAME looked up in `configs_dir`, and may be repeated: the later file wins, and the
    command line wins over all files. `--print_config` prints the result as YAML and exits. An error prints one line
    and exits with status 2, or raises ConfigError if `exit_on_error` is False. `args` defaults to `sys.argv[1:]`.
    `--help` ends with the examples of the program's docstring: each paragraph that starts with `./dlx`.

    With `recipe` and `shared` files of another verb are read, too: a file with keys that `recipe` has and
    `config_class` has not is one of that verb, and of those that `recipe` has only the fields of `shared` are taken
    (evaluation on the data of a training's recipe, but not into its folder).
    """
    args = list(sys.argv[1:] if args is None else args)
    schema = _Schema(config_class, recipe, shared)
    prog = prog or _program_name()
    try:
        config_names, pairs, actions = _split_arguments(args, schema)
        if "help" in actions:
            sys.stdout.write(schema.help(prog, description, configs_dir))
            raise SystemExit(0)
        entries: dict[str, Entry] = {}
        for name in config_names:
            entries.update(schema.relevant(read_config(_find_config(name, configs_dir, schema))))
        entries.update({key: Entry(text, COMMAND_LINE) for key, text in pairs})
        config = schema.build(entries)
        if "print_config" in actions:
            sys.stdout.write(schema.to_yaml(config))
            raise SystemExit(0)
        return config
    except ConfigError as error:
        if not exit_on_error:
            raise
        _fail(prog, str(error))


def from_dict(config_class: type[T], values: dict[str, Any], source: str = "configuration") -> T:
    """Build and check `config_class` from plain values, such as those in a checkpoint; errors call them `source`."""
    schema = _Schema(config_class)
    return schema.build({key: Entry(value, source) for key, value in values.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """The fields as plain JSON- and YAML-ready values (tuples become lists, paths become strings)."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def save(config: Any, path: str | os.PathLike) -> None:
    """Write `config` as YAML with the help texts as comments; `--config PATH` reads it back to an equal object."""
    atomic_write(Path(path), _Schema(type(config)).to_yaml(config))


# --------------------------------------------------------------------------------------------------------- fields


def _names(config_class: type | None) -> set[str]:
    return {item.name for item in dataclasses.fields(config_class) if item.init} if config_class is not None else set()


class _Schema:
    """The fields of a dataclass with their resolved types: what builds a parser, checks values and prints YAML."""

    def __init__(self, config_class: type, recipe: type | None = None, shared: type | None = None) -> None:
        if not dataclasses.is_dataclass(config_class):
            raise TypeError(f"{config_class!r} is not a dataclass")
        self.config_class = config_class
        self.recipe = _names(recipe) - _names(shared)  # keys of the other verb's files that say nothing here
        hints = typing.get_type_hints(config_class)
        self.fields = {item.name: item for item in dataclasses.fields(config_class) if item.init}
        self.types = {name: hints[name] for name in self.fields}

    def relevant(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """A file's entries that count here: all, unless it is the other verb's."""
        if not entries.keys() & (self.recipe - self.fields.keys()):
            return entries
        return {key: entry for key, entry in entries.items() if key not in self.recipe}

    def default(self, name: str) -> Any:
        item = self.fields[name]
        if item.default is not dataclasses.MISSING:
            return item.default
        return item.default_factory() if item.default_factory is not dataclasses.MISSING else dataclasses.MISSING

    def accepts_bare(self, name: str) -> bool:
        """Whether `--name` alone means true."""
        return _without_none(self.types[name]) is bool

    def takes_many(self, name: str) -> bool:
        """Whether `--name a b c` means a list."""
        return typing.get_origin(_without_none(self.types[name])) in (list, tuple)

    def parser(self) -> ArgumentParser:
        """The parser that converts and checks one value at a time."""
        parser = ArgumentParser(exit_on_error=False, add_help=False)
        for name, annotation in self.types.items():
            parser.add_argument(f"--{name}", type=annotation, default=None)
        return parser

    def help(self, prog: str, description: str | None, configs_dir: str | os.PathLike | None) -> str:
        """The text of `--help`: the fields under their headings with type, limits and default."""
        known = _config_names(configs_dir, self)
        metavar, names = ("NAME|FILE", f", or a name of {', '.join(known)}") if known else ("FILE", "")
        parser = argparse.ArgumentParser(
            prog=prog, description=description or _first_line(self.config_class), add_help=False,
            usage=f"{_launched() or prog} [--config {metavar}] [--KEY VALUE ...]".replace("%", "%%"),
            formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=32, width=_help_width()),
        )  # fmt: skip
        general = parser.add_argument_group("general")
        general.add_argument("-h", "--help", action="store_true", help="show this text and exit")
        text = f"YAML file{names}; may be repeated, the later wins"
        general.add_argument("--config", metavar=metavar, help=text)
        general.add_argument("--print_config", action="store_true", help="print the resulting configuration and exit")
        groups: dict[str, Any] = {}
        for name, item in self.fields.items():
            heading = item.metadata.get("group", "options")
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            groups[heading].add_argument(f"--{name}", help=self._help(name), metavar=_metavar(self.types[name]))
        return parser.format_help() + _examples()

    def _help(self, name: str) -> str:
        metadata, default = self.fields[name].metadata, self.default(name)
        parts = [metadata.get("help") or name.replace("_", " ")]
        bounds = [f"{words} {metadata[key]:g}" for key, (_, words) in _BOUNDS.items() if metadata.get(key) is not None]
        if bounds:
            parts.append(" and ".join(bounds))
        if metadata.get("choices"):
            parts.append("one of " + ", ".join(map(str, metadata["choices"])))
        note = "required" if default is dataclasses.MISSING else f"default: {to_text(_plain(default))}"
        return f"{'; '.join(parts)} ({note})".replace("%", "%%")

    def build(self, entries: dict[str, Entry]) -> Any:
        """Check every entry and construct the dataclass. Raises ConfigError."""
        parser = self.parser()
        values = {name: self._check(name, entry, parser) for name, entry in entries.items()}
        for name in self.fields:
            if name not in values and self.default(name) is dataclasses.MISSING:
                raise ConfigError(f"missing key {name!r}: set it with --{name} or in a configuration file")
        try:
            return self.config_class(**values)
        except ConfigError:
            raise
        except ValueError as error:  # a check across fields in __post_init__
            raise ConfigError(str(error)) from error

    def _check(self, name: str, entry: Entry, parser: ArgumentParser) -> Any:
        if name not in self.fields:
            prefix = "--" if entry.source == COMMAND_LINE else ""
            raise ConfigError(
                f"{entry.source}: unknown key {prefix + str(name)!r}{_nearest(str(name), self.fields, prefix)}"
            )
        annotation = self.types[name]
        try:
            if entry.source == COMMAND_LINE:
                value = parser.parse_args([f"--{name}={entry.value}"])[name]
            elif isinstance(entry.value, str) and _without_none(annotation) is str:
                value = entry.value  # as it stands: a quoted "null" is a word
            elif isinstance(entry.value, str) and _number_from_text(annotation, entry.value):
                raise ConfigError("")
            else:
                value = parser.parse_object({name: entry.value})[name]
        except (ArgumentError, ConfigError):
            raise ConfigError(self._type_message(name, entry)) from None
        if value is None and not _allows_none(annotation):  # jsonargparse lets any key be left null
            raise ConfigError(self._type_message(name, entry))
        self._check_range(name, value, entry.source)
        return value

    def _type_message(self, name: str, entry: Entry) -> str:
        expected = _describe(self.types[name])
        hint = ""
        if not isinstance(entry.value, str) and _without_none(self.types[name]) is str and entry.value is not None:
            hint = " (put it in quotes)"
        literals = typing.get_args(self.types[name]) if typing.get_origin(self.types[name]) is typing.Literal else ()
        if literals and isinstance(entry.value, str):
            hint = _nearest(entry.value, [str(item) for item in literals])
        return f"{entry.source}: {name}: expected {expected}, got {show(entry.value)}{hint}"

    def _check_range(self, name: str, value: Any, source: str) -> None:
        metadata = self.fields[name].metadata
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is None:
                continue
            choices = metadata.get("choices")
            if choices is not None and item not in choices:
                hint = _nearest(str(item), [str(choice) for choice in choices])
                raise ConfigError(
                    f"{source}: {name}: expected one of {', '.join(map(str, choices))}, got {show(item)}{hint}"
                )
            for key, (holds, words) in _BOUNDS.items():
                bound = metadata.get(key)
                if bound is not None and not holds(item, bound):
                    raise ConfigError(f"{source}: {name}: must be {words} {bound:g}, got {show(item)}")

    def to_yaml(self, config: Any) -> str:
        lines = []
        for name, value in to_dict(config).items():
            if name not in self.fields:
                continue
            text = to_text(value)
            comment = (self.fields[name].metadata.get("help") or "").replace("\n", " ")
            lines.append(f"{f'{name}: {text}':<32}  # {comment}" if comment else f"{name}: {text}")
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------- files


def _config_names(configs_dir: str | os.PathLike | None, schema: _Schema) -> list[str]:
    """The files there whose keys are all fields: a recipe for training is none for inference."""

    def fits(path: Path) -> bool:
        try:
            return schema.relevant(read_config(path)).keys() <= schema.fields.keys()
        except (ConfigError, OSError):
            return False

    return sorted(path.stem for path in Path(configs_dir).glob("*.yaml") if fits(path)) if configs_dir else []


def _find_config(name: str, configs_dir: str | os.PathLike | None, schema: _Schema) -> Path:
    """A bare name means `configs_dir` first, anything that looks like a path means the path first."""
    candidates = [Path(name)]
    if configs_dir:
        candidates += [Path(configs_dir) / name, Path(configs_dir) / f"{name}.yaml"]
    if os.sep not in name and not Path(name).suffix:
        candidates = candidates[::-1]
    for path in candidates:
        if path.is_file():
            return path
    known = _config_names(configs_dir, schema)
    listing = f" (names: {', '.join(known)})" if known else ""
    raise ConfigError(f"--config {name}: no such file or name{_nearest(Path(name).stem, known)}{listing}")


# --------------------------------------------------------------------------------------------------- command line


def _split_arguments(args: list[str], schema: _Schema) -> tuple[list[str], list[tuple[str, str]], set[str]]:
    """Split into `--config` names, (key, text) pairs and the actions among help and print_config."""
    configs: list[str] = []
    pairs: list[tuple[str, str]] = []
    actions: set[str] = set()
    position = 0
    while position < len(args):
        token = args[position]
        position += 1
        if token in ("-h", "--help", "--print_config", "--print-config"):
            actions.add("help" if token in ("-h", "--help") else "print_config")
            continue
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"{COMMAND_LINE}: unexpected {token!r}: options are written --key value")
        key, equals, value = token[2:].partition("=")
        key = key.replace("-", "_")
        following = []
        while not equals and position < len(args) and not args[position].startswith("--"):
            following.append(args[position])
            position += 1
            if not (key in schema.fields and schema.takes_many(key)):
                break
        if not equals:
            if not following:
                if key not in schema.fields and key != "config":
                    raise ConfigError(f"{COMMAND_LINE}: unknown key {token!r}{_nearest(key, schema.fields, '--')}")
                if key == "config" or not schema.accepts_bare(key):
                    raise ConfigError(f"{COMMAND_LINE}: {token} needs a value")
                following = ["true"]
            many = key in schema.fields and schema.takes_many(key) and not _is_bracketed(following[0])
            value = f"[{', '.join(following)}]" if many else following[0]
        if key == "config":
            configs.append(value)
        else:
            pairs.append((key, value))
    return configs, pairs, actions


def _is_bracketed(text: str) -> bool:
    return text.lstrip().startswith(("[", "(")) or text in ("null", "None", "~")


def _program_name() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name and spec.name != "__main__":
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name


def _launched() -> str:
    """How the launcher was called, up to what it hands on, or nothing: './dlx run ConvNets train --'."""
    words = shlex.split(os.environ.get("DLX_COMMAND", ""))
    words = words[: words.index("--")] if "--" in words else words
    return shlex.join([*words, "--"]) if words[1:2] and words[1] in ("run", "bench", "quickstart") else ""


def _examples() -> str:
    text = inspect.cleandoc(getattr(sys.modules.get("__main__"), "__doc__", None) or "")
    paragraphs = [inspect.cleandoc(part).splitlines() for part in re.split(r"\n\s*\n", text)]
    lines = [line for part in paragraphs if part and part[0].startswith("./dlx ") for line in part]
    return "\n".join(["", "examples:", *(f"  {line.strip()}" for line in lines), ""]) if lines else ""


def _help_width() -> int:
    return max(60, min(120, shutil.get_terminal_size((100, 24)).columns - 2))


def _fail(prog: str, message: str) -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------- types and words


def _arms(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return list(typing.get_args(annotation))
    return [annotation]


def _allows_none(annotation: Any) -> bool:
    return annotation is Any or type(None) in _arms(annotation) or None in typing.get_args(annotation)


def _without_none(annotation: Any) -> Any:
    arms = [arm for arm in _arms(annotation) if arm is not type(None)]
    return arms[0] if len(arms) == 1 else annotation


def _number_from_text(annotation: Any, text: str) -> bool:
    """Whether a quoted YAML string would silently become a number or bool: `batch_size: "8"` is a mistake to name."""
    return _without_none(annotation) in (int, bool) and text not in ("yes", "no")


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(str(item) for item in typing.get_args(annotation))
    if len(_arms(annotation)) > 1:
        return " or ".join(_describe(arm) for arm in _arms(annotation))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return f"list of {_describe(arguments[0])}"
    if origin is tuple:
        return f"list [{', '.join(_describe(item) if item is not Ellipsis else '...' for item in arguments)}]"
    if origin is dict:
        return f"mapping of {_describe(arguments[0])} to {_describe(arguments[1])}"
    if annotation is type(None):
        return "null"
    return {bool: "true or false", str: "string"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _metavar(annotation: Any) -> str:
    inner = _without_none(annotation)
    if typing.get_origin(inner) is typing.Literal:
        return "{" + ",".join(str(item) for item in typing.get_args(inner)) + "}"
    if typing.get_origin(inner) in (list, tuple):
        return "VALUE ..."
    return {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}.get(inner, "VALUE")


def _nearest(word: str, known: typing.Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'x'?`, or nothing where no known word is close."""
    matches = difflib.get_close_matches(word.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix + matches[0]!r}?" if matches else ""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _first_line(config_class: type) -> str | None:
    text = (config_class.__doc__ or "").strip()
    # A dataclass without a docstring gets its signature as one.
    return text.splitlines()[0] if text and not text.startswith(f"{config_class.__name__}(") else None
