"""`./dlx weights` and `./dlx cache`, on cards and files of the test's own."""

from __future__ import annotations

import hashlib
import json

import pytest

EVALUATE = """
import json, os, sys
folder = sys.argv[sys.argv.index("--output_dir") + 1]
assert sys.argv[sys.argv.index("--weights") + 1] == "tiny.photos"
with open(os.path.join(folder, "record.json"), "w") as stream:
    json.dump({"metrics": {"top1": {"value": float(os.environ["TOP1"]), "unit": "%"}}}, stream)
"""


@pytest.fixture
def carded(ready):
    """A task with one weights file in the tree and its card; its evaluation gives the accuracy in $TOP1."""
    folder = ready.task(verbs='evaluate = "alpha.evaluate"')
    ready.write("PyTorch/Area/Alpha/alpha/evaluate.py", EVALUATE)
    ready.write("PyTorch/Area/Alpha/weights/tiny.photos.bin", "numbers")
    card = {
        "name": "tiny.photos", "task": "PyTorch/Area/Alpha", "arch": "tiny",
        "sha256": hashlib.sha256(b"numbers").hexdigest(),
        "source": {"kind": "file", "path": "tiny.photos.bin"}, "size": 7, "licence": "Apache-2.0", "credit": "us",
        "preprocessing": {}, "recipe": "quickstart", "commit": "0", "classes": 2,
        "verify": ["evaluate", "--weights", "NAME"],
        "metric": {"name": "top1", "value": 90.0, "tolerance": 0.5, "data": "photos", "samples": 20},
    }  # fmt: skip
    ready.write("PyTorch/Area/Alpha/weights/tiny.photos.json", json.dumps(card))
    ready.weights = folder / "weights"
    return ready


def test_weights_list_and_fetch(carded):
    assert (
        "tiny.photos\n    PyTorch/Area/Alpha, tiny, 7 B, Apache-2.0\n    top1 90.0 on photos"
        in carded.dlx("weights", "list").stdout
    )
    done = carded.dlx("weights", "fetch", "tiny.photos")
    assert done.stdout.strip() == str(carded.weights / "tiny.photos.bin")
    done = carded.dlx("weights", "fetch", "tiny.photo")
    assert done.returncode == 2 and "did you mean 'tiny.photos'" in done.stdout


def test_weights_verify_compares_with_the_card(carded):
    done = carded.dlx("weights", "verify", "tiny.photos", TOP1="89.6")
    assert done.returncode == 0 and "top1 89.6, as published (90 within 0.5)" in done.stdout
    done = carded.dlx("weights", "verify", "tiny.photos", TOP1="89.4")
    assert done.returncode == 1 and "NOT as published" in done.stdout
    done = carded.dlx("weights", "verify", "tiny.photos", TOP1="oops")
    assert done.returncode == 2 and "its evaluation ended with status 1" in done.stdout


def test_cache_list_verify_prune(tree):
    assert "0 entries, 0 B" in tree.dlx("cache", "list").stdout
    (tree.home / "weights").mkdir(parents=True)
    (tree.home / "weights" / "tiny.bin").write_text("12345")
    assert "1 entries, 5 B" in tree.dlx("cache", "list").stdout
    assert tree.dlx("cache", "verify").returncode == 0
    assert tree.dlx("cache", "prune").stdout == ""
    assert "would remove" in tree.dlx("cache", "prune", "--all", "--dry-run").stdout
    assert "removed" in tree.dlx("cache", "prune", "--all").stdout
    assert "0 entries" in tree.dlx("cache", "list").stdout


def test_cache_verify_finds_damage(carded, tmp_path):
    path = carded.weights / "tiny.photos.json"
    home = tmp_path / "own"
    (home / "weights").mkdir(parents=True)
    (home / "weights" / "tiny.photos.bin").write_text("numbers")
    assert path.exists() and "ok       tiny.photos" in carded.dlx("cache", "verify", DLX_HOME=str(home)).stdout
    (home / "weights" / "tiny.photos.bin").write_text("numberz")
    done = carded.dlx("cache", "verify", DLX_HOME=str(home))
    assert done.returncode == 1 and "DAMAGED  tiny.photos" in done.stdout and "expected sha256" in done.stdout
    assert done.stdout.splitlines()[-1] == "`./dlx cache verify --repair` fetches what is damaged again"
    assert carded.dlx("cache", "verify", "--repair", DLX_HOME=str(home)).returncode == 0
    assert not (home / "weights" / "tiny.photos.bin").exists(), "this one's source is the tree, which is whole"


def test_cache_verify_looks_at_sets_of_tasks(tree):
    """A set that only its task registers: its stamp says what belongs in it."""
    folder = tree.home / "data" / "molecules-1"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("1")
    entry = {"sha256": hashlib.sha256(b"1").hexdigest(), "size": 1, "mtime_ns": (folder / "a.csv").stat().st_mtime_ns}
    (folder / ".dlx-complete.json").write_text(
        json.dumps({"name": "molecules", "version": "1", "files": {"a.csv": entry}})
    )
    done = tree.dlx("cache", "verify")
    assert done.returncode == 0 and "ok       molecules-1" in done.stdout
    (folder / "a.csv").write_text("2")
    done = tree.dlx("cache", "verify")
    assert done.returncode == 1 and "DAMAGED  molecules-1" in done.stdout and "`prepare` makes it anew" in done.stdout


def test_half_made_data_is_reported(tree):
    (tree.home / "data" / "foolbox-images-3.3.4").mkdir(parents=True)
    done = tree.dlx("cache", "verify")
    assert done.returncode == 1 and "foolbox-images-3.3.4: not complete" in done.stdout


def test_indexes_are_listed_and_stay_unless_all(tree):
    (tree.home / "index").mkdir(parents=True)
    (tree.home / "index" / "x.npz").write_text("12345")
    assert "index           5 B  complete" in tree.dlx("cache", "list").stdout
    assert tree.dlx("cache", "prune").stdout == ""
    assert "removed" in tree.dlx("cache", "prune", "--all").stdout and not (tree.home / "index").exists()
