"""The search over tuning tables works (on any device, in seconds); what is fastest is looked at on a GPU, not here."""

from __future__ import annotations

import importlib

import pytest

from dlx import record
from fusedops_benchmarks import tune


@pytest.mark.parametrize("name, size", [("norm_forward", 128), ("rms_backward", 128), ("xentropy", 512)])
def test_a_search_ranks_its_candidates_and_leaves_the_table(device, triton_backend, monkeypatch, tmp_path, name, size):
    search = tune.SEARCHES[name]
    rows = list(search.candidates(size))
    assert len(set(rows)) == len(rows) > 3 and all(row[0] == size for row in rows)
    search = tune.Search(search.module, search.table, lambda size: iter(rows[:2]), search.build, search.passes)
    monkeypatch.setitem(tune.SEARCHES, name, search)
    module = importlib.import_module(f"fusedops.ops.{search.module}")
    before = getattr(module, search.table)
    words = [name, "--sizes", str(size), "--elements", str(4 * size), "--output", str(tmp_path / "x.json")]
    found = record.load(tune.main(words)).fields["attachments"]["rows"]
    assert getattr(module, search.table) is before
    times = [entry["ms"] for entry in found]
    assert times == sorted(times) and any(entry["present"] for entry in found)
    assert {tuple(entry["row"]) for entry in found} >= set(rows[:2])


def test_a_candidate_that_cannot_be_says_why(device, triton_backend, monkeypatch):
    def refuse(*_):
        raise RuntimeError("out of resource\nshared memory")

    search = tune.Search("norm_kernels", "FORWARD", lambda size: iter([(size, size, 1, 0, 1)]), refuse, 2)
    monkeypatch.setitem(tune.SEARCHES, "norm_forward", search)
    found = tune.measure("norm_forward", 128, device, 512)
    assert {entry["error"] for entry in found} == {"RuntimeError: out of resource"}
