"""Every code block of a README that is marked `<!-- dlx:run -->` is run, in a copy of the tree, as a user would.

Options of the mark: timeout=SECONDS (default 120), marker=slow (or another marker of pyproject.toml).
The block runs in bash at the root of the copy, with the cache of this machine: environments are re-used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dlx.vendor import listing

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^<!-- dlx:run(?P<options>[^>]*?) *-->\n+```(?:bash|sh|shell)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)
MARK = re.compile(r"^<!-- dlx:run\b", re.MULTILINE)


def blocks(text: str, name: str) -> list:
    """The marked blocks of a document as pytest parameters: (code, timeout)."""
    found = []
    for match in BLOCK.finditer(text):
        options = dict(word.split("=", 1) for word in match["options"].split())
        unknown = options.keys() - {"timeout", "marker"}
        if unknown:
            raise ValueError(f"{name}: dlx:run has an unknown option {unknown.pop()!r}")
        marks = [getattr(pytest.mark, options["marker"])] if "marker" in options else []
        line = text[: match.start()].count("\n") + 1
        found.append(pytest.param(match["code"], float(options.get("timeout", 120)), id=f"{name}:{line}", marks=marks))
    if len(found) != len(MARK.findall(text)):
        raise ValueError(f"{name}: a dlx:run mark is not followed by a bash block")
    return found


DOCUMENTS = [name for name in listing(ROOT) if name.suffix == ".md"]
BLOCKS = [block for name in DOCUMENTS for block in blocks((ROOT / name).read_text(), name.as_posix())]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the tree, so that what the commands write does not land in it."""
    for name in listing(ROOT):
        target = tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return tmp_path / "tree"


@pytest.mark.parametrize(("code", "timeout"), BLOCKS)
def test_block_runs(code, timeout, copied):
    variables = {k: v for k, v in os.environ.items() if k not in ("DLX_ROOT", "DLX_TASK", "DLX_TASK_DIR", "PYTHONPATH")}
    command = ["bash", "-euo", "pipefail", "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=copied, env=variables, timeout=timeout, check=False, **pipes)
    assert done.returncode == 0, f"{code}\n{done.stdout[-6000:]}"


def test_marks_are_read():
    text = "a\n<!-- dlx:run timeout=5 marker=slow -->\n```bash\n./dlx list\n```\n<!-- dlx:run -->\n\n```sh\ntrue\n```\n"
    first, second = blocks(text, "X.md")
    assert first.values == ("./dlx list\n", 5.0) and first.id == "X.md:2" and first.marks[0].name == "slow"
    assert second.values == ("true\n", 120.0) and not second.marks
    with pytest.raises(ValueError, match="not followed by a bash block"):
        blocks("<!-- dlx:run -->\ntext\n", "X.md")
    with pytest.raises(ValueError, match="unknown option 'time'"):
        blocks("<!-- dlx:run time=5 -->\n```bash\ntrue\n```\n", "X.md")
