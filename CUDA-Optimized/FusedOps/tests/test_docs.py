"""The pages' code runs as it stands, each page by itself, and the pages name nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fusedops
from fusedops import amp, distributed, nn, ops, optim, sparsity
from fusedops.amp.setup import State

TASK = Path(__file__).parents[1]
PAGES = [TASK / "README.md", *sorted((TASK / "docs").glob("*.md"))]
WITHOUT_CODE = {"apex.md", "apex_tests.md", "design.md"}


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page, monkeypatch, tmp_path):
    """One after the other in one namespace, as a reader would."""
    code = blocks(page)
    assert bool(code) == (page.name not in WITHOUT_CODE)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    backend = "plain" if not torch.cuda.is_available() else "auto"
    try:
        with fusedops.use(backend):
            for number, block in enumerate(code):
                exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    finally:
        State.properties, State.loss_scalers = None, []


def test_names_in_the_readme_exist():
    table = (TASK / "README.md").read_text().split("| | What | Page |")[1].split("\n\n")[0]
    modules = {"ops": ops, "nn": nn, "optim": optim, "amp": amp, "sparsity": sparsity, "distributed": distributed}
    seen = 0
    for line in table.splitlines():
        home = None
        for name in re.findall(r"`([^`]+)`", line.split("|")[1] if line.count("|") > 1 else ""):
            module, _, attribute = name.rpartition(".")
            home = modules.get(module, home)
            if home is None or name.endswith("/") or name.endswith("*"):
                continue
            assert hasattr(home, attribute), name
            seen += 1
    assert seen > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
