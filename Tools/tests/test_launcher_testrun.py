"""`./dlx test`: what is counted, the last line, the exit status, the selection, JUnit."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

SUMMARY = re.compile(r"\d+ passed, \d+ failed, \d+ skipped")
MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken(): raise OSError("no")
def test_error(broken): pass
def test_skip(): pytest.skip("lacks a thing")
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.slow
def test_slow(): pass
"""


def summary(output: str) -> str:
    lines = [line for line in output.splitlines() if SUMMARY.fullmatch(line)]
    assert len(lines) == 1 and output.splitlines()[-1] == lines[0], output
    return lines[0]


def test_counts_over_all_tasks_in_one_last_line(ready, tmp_path):
    ready.task("PyTorch/Area/Alpha")
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", MIXED)
    ready.task("Kaldi/Beta")
    ready.write("Kaldi/Beta/tests/test_it.py", "import beta.train\ndef test_good(): pass\n")
    done = ready.dlx("test", "--junit", str(tmp_path / "out" / "junit.xml"))
    assert done.returncode == 1
    assert summary(done.stdout) == "2 passed, 2 failed, 1 skipped"
    assert "2 deselected" in done.stdout  # gpu and slow
    assert "FAIL  PyTorch/Area/Alpha" in done.stdout and "ok    Kaldi/Beta" in done.stdout
    suites = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    assert {suite.get("name") for suite in suites} == {"PyTorch/Area/Alpha", "Kaldi/Beta"}
    assert len(list(suites.iter("testcase"))) == 5


def test_success_and_selection(ready):
    ready.task()
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", MIXED)
    done = ready.dlx("test", "Alpha", "-k", "good or skip")
    assert done.returncode == 0 and summary(done.stdout) == "1 passed, 0 failed, 1 skipped"
    done = ready.dlx("test", "alpha", "--markers", "gpu or slow")
    assert done.returncode == 0 and summary(done.stdout) == "2 passed, 0 failed, 0 skipped"
    done = ready.dlx("test", "alpha", "--markers", "", "--", "-k", "not bad")
    assert summary(done.stdout) == "3 passed, 1 failed, 1 skipped"


def test_nothing_collected_is_a_failure(ready):
    ready.task("PyTorch/Area/Alpha")
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", "def test_good(): pass\n")
    ready.task("PyTorch/Area/Empty")
    done = ready.dlx("test")
    assert done.returncode == 1 and summary(done.stdout) == "1 passed, 1 failed, 0 skipped"
    done = ready.dlx("test", "-k", "good")  # a filter may leave a task without tests
    assert done.returncode == 1  # Empty has no tests folder at all, which pytest calls a usage error
    ready.write("PyTorch/Area/Empty/tests/test_it.py", "def test_other(): pass\n")
    assert summary(ready.dlx("test", "-k", "good").stdout) == "1 passed, 0 failed, 0 skipped"
    done = ready.dlx("test", "-k", "nowhere")
    assert done.returncode == 1 and "no test in any task matches the selection" in done.stdout


def test_a_file_that_does_not_import_and_a_crash_count(ready):
    ready.task()
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", "import no_such_module\n")
    done = ready.dlx("test")
    assert done.returncode == 1 and summary(done.stdout) == "0 passed, 1 failed, 0 skipped"
    good = ready.write("PyTorch/Area/Alpha/tests/test_good.py", "def test_good(): pass\n")
    assert summary(ready.dlx("test").stdout) == "1 passed, 1 failed, 0 skipped"  # the other files run all the same
    good.unlink()
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", "import os\ndef test_dies(): os._exit(9)\n")
    done = ready.dlx("test")
    assert done.returncode == 1 and summary(done.stdout) == "0 passed, 1 failed, 0 skipped"
    assert "pytest ended with status 9" in done.stdout


def test_an_environment_that_fails_counts_and_the_others_go_on(ready):
    ready.task("PyTorch/Area/Alpha", env='"other"', requirements="no-such-package-exists==9.9\n")
    ready.task("PyTorch/Area/Beta")
    ready.write("PyTorch/Area/Beta/tests/test_it.py", "def test_good(): pass\n")
    done = ready.dlx("test")
    assert done.returncode == 1 and summary(done.stdout) == "1 passed, 1 failed, 0 skipped"
    assert "No matching distribution found" in done.stdout


def test_planned_tasks_and_unknown_markers(ready):
    ready.task("PyTorch/Area/Alpha")
    ready.write("PyTorch/Area/Alpha/tests/test_it.py", "import pytest\n@pytest.mark.gqu\ndef test_good(): pass\n")
    ready.task("PyTorch/Area/Later", state='"planned"')
    done = ready.dlx("test")
    assert "'gqu' not found in `markers`" in done.stdout and "Later" not in done.stdout
    assert summary(done.stdout) == "0 passed, 1 failed, 0 skipped"
