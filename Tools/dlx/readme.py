"""READMEs whose numbers come from the run records: text between markers is regenerated from JSON files.

    <!-- dlx:table file="results/speed.json" rows="comparison" columns="Model:name, img/s:throughput|,.0f" --> ... <!-- /dlx -->
    <!-- dlx:value file="results/accuracy.json" key="metrics.top1" format=".2%" -->92.30%<!-- /dlx -->
    <!-- dlx:tasks --> ... <!-- /dlx -->

`file` is relative to the README. `rows` is a dotted path to a list of objects (empty: the file itself is the list); a
column is `Heading:dotted.key|format` with Python's format rules, and columns are separated by a comma and a space. A key
that not every row has ends in `?`, and so does a file that is not there before something has been measured.
Markers inside code (fenced or in backticks) are left alone.
"""  # noqa: E501

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from dlx.files import atomic_write
from dlx.task import Task, discover, nearest

# Code first: what it matches is passed through.
PIECES = re.compile(
    r"^```.*?^```|`[^`\n]+`"
    r"|(?P<open><!-- dlx:(?P<kind>table|value|tasks)(?P<options>(?: [^\n]*?)?) -->)"
    r"(?P<body>.*?)(?P<close><!-- /dlx -->)"
    r"|(?P<stray><!-- dlx:(?:table|value|tasks)\b[^\n]*)",
    re.DOTALL | re.MULTILINE,
)
MISSING = "not measured yet"
OPTIONS = {"table": {"file", "rows", "columns"}, "value": {"file", "key", "format"}, "tasks": set()}


class ReadmeError(ValueError):
    """A marker that cannot be filled: names the README, the JSON file and the key."""


def update(root: Path, check: bool = False) -> int:
    """Regenerate every README of the repository; with `check` write nothing, print a diff, return 1 on drift."""
    tasks = discover(root)
    drift = 0
    for path in [root / "README.md", *(task.folder / "README.md" for task in tasks)]:
        if not path.is_file():
            continue
        old = path.read_text()
        new = render(old, path, tasks)
        if new == old:
            continue
        name = path.relative_to(root).as_posix()
        if check:
            drift = 1
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, f"{name} (from the records)", lineterm=""
            )
            print("\n".join(lines))
        else:
            atomic_write(path, new)
            print(f"updated {name}")
    if drift:
        print("dlx: the READMEs above differ from the records; `./dlx readme` writes them anew")
    return drift


def render(text: str, path: Path, tasks: list[Task]) -> str:
    """The README's text with every marker filled. `path` is where it lies: for its JSON files, and for messages."""

    def fill(match: re.Match[str]) -> str:
        if match["stray"]:
            raise ReadmeError(f"{path}: {match['stray']!r} has no <!-- /dlx -->, or is not written as documented")
        if not match["kind"]:
            return match[0]
        options = _options(match["kind"], match["options"], path)
        name = options.get("file", "")
        options["file"] = name.removesuffix("?")
        if name.endswith("?") and not (path.parent / options["file"]).exists():
            content = MISSING if match["kind"] == "value" else f"\n{MISSING.capitalize()}.\n"
        elif match["kind"] == "value":
            data, file = _load(path, options["file"])
            content = _format(_look_up(data, options["key"], file), options.get("format", ""), file, options["key"])
        elif match["kind"] == "table":
            content = f"\n{_table(path, options)}\n"
        else:
            content = f"\n{task_table(tasks)}\n"
        return match["open"] + content + match["close"]

    return PIECES.sub(fill, text)


def task_table(tasks: list[Task]) -> str:
    """The table of tasks, with their honest states."""
    rows = []
    for task in tasks:
        if task.kind == "task":
            state = task.state + (f": {task.state_note}" if task.state_note else "")
            rows.append([f"[{task.name}]({task.name}/README.md)", task.framework, task.summary, state])
    return _markdown(["Task", "Framework", "What", "State"], rows, [False] * 4)


def _table(path: Path, options: dict[str, str]) -> str:
    data, file = _load(path, options["file"])
    rows = _look_up(data, options["rows"], file) if options["rows"] else data
    if not isinstance(rows, list):
        raise ReadmeError(f"{file}: key {options['rows']!r} is not a list")
    headings, cells, numeric = [], [[] for _ in rows], []
    for column in re.split(r",\s+", options["columns"].strip()):
        head, _, pattern = column.partition("|")
        heading, colon, key = head.rpartition(":")
        if not colon:
            raise ReadmeError(f"{path}: column {column!r} is not Heading:key or Heading:key|format")
        headings.append(heading)
        optional, key = key.endswith("?"), key.removesuffix("?")
        if optional and not any(key in row for row in rows):
            raise ReadmeError(f"{file}: no row of {options['rows']!r} has the key {key!r}")
        values = [
            None if optional and key not in row else _look_up(row, key, file, f"{options['rows']}[{i}].")
            for i, row in enumerate(rows)
        ]
        numeric.append(all(value is None or isinstance(value, (int, float)) for value in values))
        for i, value in enumerate(values):
            cells[i].append(_format(value, pattern, file, key))
    return _markdown(headings, cells, numeric)


def _markdown(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    rule = "|" + "|".join("---:" if number else "---" for number in numeric) + "|"
    escaped = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [headings, *rows])
    first, *rest = (f"| {' | '.join(row)} |" for row in escaped)
    return "\n".join([first, rule, *rest])


def _options(kind: str, text: str, path: Path) -> dict[str, str]:
    options = dict(re.findall(r'(\w+)="([^"]*)"', text))
    for name in options:
        if name not in OPTIONS[kind]:
            raise ReadmeError(f"{path}: dlx:{kind} has an unknown option {name!r}{nearest(name, OPTIONS[kind])}")
    for name in OPTIONS[kind] - {"format"}:
        if name not in options:
            raise ReadmeError(f'{path}: dlx:{kind} needs {name}="..."')
    return options


def _load(readme: Path, name: str) -> tuple[Any, Path]:
    file = readme.parent / name
    try:
        return json.loads(file.read_text()), file
    except FileNotFoundError:
        raise ReadmeError(f"{readme}: {file} does not exist") from None
    except ValueError as error:
        raise ReadmeError(f"{file}: not valid JSON: {error}") from None


def _look_up(data: Any, key: str, file: Path, prefix: str = "") -> Any:
    """Follow a dotted key through objects and lists (by index); ReadmeError names the file and the key."""
    value, parts = data, key.split(".")
    while parts:
        for length in range(len(parts), 0, -1):  # metrics have dots in their names: the longest key that exists wins
            part = ".".join(parts[:length])
            if isinstance(value, dict) and part in value:
                value = value[part]
                break
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
                break
        else:
            offers = list(value) if isinstance(value, dict) else []
            raise ReadmeError(f"{file}: no key {prefix + key!r} (at {parts[0]!r}){nearest('.'.join(parts), offers)}")
        parts = parts[length:]
    return value


def _format(value: Any, pattern: str, file: Path, key: str) -> str:
    if value is None:
        return "–"
    try:
        return format(value, pattern) if pattern else str(value)
    except (ValueError, TypeError) as error:
        raise ReadmeError(f"{file}: key {key!r} is {value!r}, which format {pattern!r} does not fit: {error}") from None
