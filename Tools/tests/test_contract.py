"""The contract, checked on every task of the tree: a new task gets these tests by being there."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlx import env
from dlx.task import Task, discover
from dlx.vendor import listing

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = discover(ROOT)
TASKS = [task for task in EVERYTHING if task.kind == "task"]
BUILT = [task for task in TASKS if task.state != "planned"]
FILES = ["README.md", "requirements.txt", "Dockerfile", "scripts/docker/build.sh", "scripts/docker/run.sh"]
FOLDERS = ["configs", "tests"]
VERBS = {"quickstart", "train", "evaluate"}  # the others where they apply
# Words that a heading of the README must have, in this order.
SECTIONS = ["overview", "setup", "quick start", "advanced", "performance", "differ"]
FORBIDDEN = {"utils", "util", "common", "helpers", "helper", "misc"}
LINES, FUNCTION_LINES, README_LINES = 550, 95, 260  # about 500, 80 and 200, with room for a good reason
COPY_LINES = 6


def per_task(tasks: list[Task]):
    return pytest.mark.parametrize("task", tasks, ids=[task.name for task in tasks])


@functools.cache
def sources(folder: Path) -> list[Path]:
    """The Python files of a folder that git does not ignore."""
    files = [ROOT / name for name in listing(ROOT) if name.suffix == ".py"]
    return [file for file in files if file.is_relative_to(folder)]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every absolutely imported module of a file, with its line."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module, node.lineno


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def place(file: Path, line: int = 0) -> str:
    return f"{file.relative_to(ROOT)}:{line}" if line else str(file.relative_to(ROOT))


def test_there_is_a_task():
    assert TASKS or not (ROOT / "PyTorch").exists()


@per_task(BUILT)
def test_files_are_there(task):
    missing = [name for name in FILES if not (task.folder / name).is_file()]
    missing += [name for name in FOLDERS if not (task.folder / name).is_dir()]
    missing += [] if (task.folder / task.package / "__init__.py").is_file() else [f"{task.package}/__init__.py"]
    missing += [] if (task.folder / "configs" / "quickstart.yaml").is_file() else ["configs/quickstart.yaml"]
    assert not missing
    assert list((task.folder / "tests").glob("test_*.py"))


@per_task(BUILT)
def test_verbs_resolve(task):
    assert task.state != "complete" or task.verbs.keys() >= VERBS
    for verb, entry in task.verbs.items():
        if isinstance(entry, str):
            stem = task.folder / entry.replace(".", "/")
            assert entry.split(".")[0] == task.package, f"{verb}: {entry} lies outside the task's package"
            found = [stem.with_suffix(".py"), stem / "__main__.py"]
            assert any(path.is_file() for path in found), f"{verb}: no module {entry}"


def test_pins_agree_within_a_group():
    for group in env.groups(ROOT).values():  # merging refuses pins that disagree
        for pin in group.pins:
            assert re.match(r"[\w.-]+(\[[\w,-]+\])?==[\w.+!-]+(;|$)", pin), (
                f"{group.group}: {pin!r} is not NAME==VERSION"
            )


@per_task(BUILT)
def test_dockerfile_and_scripts(task):
    text = (task.folder / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert re.fullmatch(r"ARG FROM_IMAGE_NAME=\S+:\S+", lines[0]) and lines[1] == "FROM ${FROM_IMAGE_NAME}"
    assert f"{task.name}/requirements.txt" in text and "./Tools" in text
    assert re.search(r"^USER (?!root)", text, re.MULTILINE), "the image runs as root"
    for script in task.folder.glob("scripts/**/*.sh"):
        assert script.stat().st_mode & 0o111, f"{place(script)} is not executable"


def test_package_names_are_unique():
    packages = [task.package for task in EVERYTHING]
    assert len(set(packages)) == len(packages)
    clash = [
        p for p in packages if p in sys.stdlib_module_names or p in ("torch", "numpy", "tensorflow", "paddle", "mxnet")
    ]
    assert not clash


@per_task(TASKS)
def test_a_task_imports_no_other(task):
    others = {other.package for other in TASKS} - {task.package}
    bad = [
        f"{place(f, line)} {name}"
        for f in sources(task.folder)
        for name, line in imports(f)
        if name.split(".")[0] in others
    ]
    assert not bad


def test_the_shared_package_imports_no_task():
    packages = {task.package for task in TASKS}
    files = [file for file in sources(ROOT / "Tools") if "tests" not in file.parts]
    assert not [
        f"{place(f, line)} {name}" for f in files for name, line in imports(f) if name.split(".")[0] in packages
    ]


@per_task(EVERYTHING)
def test_module_names_say_something(task):
    bad = [place(f) for f in sources(task.folder) if FORBIDDEN & {f.stem, *f.relative_to(task.folder).parent.parts}]
    assert not bad


def test_the_import_path_is_edited_in_hubconf_only():
    bad = []
    for file in sources(ROOT):
        for node in ast.walk(tree_of(file)):
            is_path = isinstance(node, ast.Attribute) and node.attr == "path"
            if is_path and isinstance(node.value, ast.Name) and node.value.id == "sys" and file != ROOT / "hubconf.py":
                bad.append(place(file, node.lineno))
    assert not bad


@per_task(EVERYTHING)
def test_files_and_functions_stay_readable(task):
    bad = []
    for file in sources(task.folder):
        count = len(file.read_text().splitlines())
        if "kernels" in file.stem or "tests" in file.parts:
            continue
        bad += [f"{place(file)}: {count} lines"] if count > LINES else []
        for node in functions(file):
            length = node.end_lineno - node.lineno + 1
            bad += [f"{place(file, node.lineno)} {node.name}: {length} lines"] if length > FUNCTION_LINES else []
    assert not bad


def normalised(function: ast.FunctionDef) -> str:
    """The function without docstrings, annotations and the names that are its own: a renamed copy is still a copy."""
    node = ast.parse(ast.unparse(function)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            part.name = "_"
            if ast.get_docstring(part) is not None:
                part.body = part.body[1:] or [ast.Pass()]
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            part.returns = None
        if isinstance(part, ast.arg):
            part.annotation = None
    own: dict[str, str] = {}
    for part in ast.walk(node):
        name = part.arg if isinstance(part, ast.arg) else getattr(part, "id", "")
        if isinstance(part, ast.arg) or isinstance(getattr(part, "ctx", None), ast.Store):
            own.setdefault(name, f"v{len(own)}")
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            part.arg = own[part.arg]
        elif isinstance(part, ast.Name):
            part.id = own.get(part.id, part.id)
    return ast.dump(node)


def test_normalising_sees_through_renaming():
    one = ast.parse("def f(a: int) -> int:\n    'Doc.'\n    b = a + 1\n    return b").body[0]
    two = ast.parse("def g(x):\n    y = x + 1\n    return y").body[0]
    three = ast.parse("def g(x):\n    y = x + 2\n    return y").body[0]
    assert normalised(one) != normalised(ast.parse("def f(a):\n    b = c + 1\n    return b").body[0])
    assert normalised(one) == normalised(two) != normalised(three)


def test_no_function_is_copied_from_another_task():
    seen: dict[str, tuple[str, str]] = {}
    copies = []
    for task in EVERYTHING:
        for file in sources(task.folder):
            for node in functions(file):
                if node.end_lineno - node.lineno + 1 >= COPY_LINES:
                    where = f"{place(file, node.lineno)} {node.name}"
                    owner, first = seen.setdefault(normalised(node), (task.name, where))
                    copies += [f"{where} is {first}"] if owner != task.name else []
    assert not copies, "what two tasks need belongs into dlx"


@per_task(TASKS)
def test_readme_has_its_sections(task):
    readme = task.folder / "README.md"
    assert readme.is_file()
    if task.state == "planned":
        return
    text = readme.read_text()
    code_free = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = [line.lstrip("#").strip().lower() for line in code_free.splitlines() if line.startswith("##")]
    found = [next((i for i, h in enumerate(headings) if word in h), None) for word in SECTIONS]
    assert None not in found, f"no section about {SECTIONS[found.index(None)]!r}; headings: {headings}"
    assert found == sorted(found), f"the sections come in another order: {headings}"
    assert len(text.splitlines()) <= README_LINES


@per_task(TASKS)
def test_weights_are_small_and_have_cards(task):
    for file in (task.folder / "weights").glob("*"):
        assert file.suffix == ".json" or file.stat().st_size <= 12 * 2**20, f"{place(file)} is over 12 MiB"
        assert file.suffix != ".safetensors" or file.with_suffix(".json").is_file(), f"{place(file)} has no card"


def test_links_in_documents_lead_somewhere():
    bad = []
    for name in listing(ROOT):
        if name.suffix != ".md":
            continue
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not target.startswith("mailto:") and not (ROOT / name.parent / target).exists():
                bad.append(f"{name}: {target}")
    assert not bad
