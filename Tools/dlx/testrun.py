"""Run each task's tests in its environment and count the results over all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from dlx import env, system
from dlx.files import atomic_path
from dlx.task import Task

DEFAULT_MARKERS = "not gpu and not multigpu and not container and not slow"
NO_TESTS = 5  # pytest's exit status when nothing was collected


@dataclass
class Counts:
    """How many tests ended how; an error counts as a failure."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        return self

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run(
    tasks: list[Task],
    command: list[str],
    *,
    markers: str | None = None,
    keyword: str | None = None,
    junit: Path | None = None,
    isolated: bool = False,
    extra: list[str] = (),
) -> int:
    """Test the tasks one after the other; the last line printed is the summary. Returns the exit status.

    A task in which nothing is collected is a failure, unless a filter was given that selects tests elsewhere.
    """
    selection = ["--continue-on-collection-errors", "-m", DEFAULT_MARKERS if markers is None else markers]
    selection += ["-k", keyword] if keyword else []
    filtered = bool(markers or keyword or extra)
    total, suites, report = Counts(), ElementTree.Element("testsuites"), []
    for task in tasks:
        print(f"\n=== {task.name}", flush=True)
        started = time.monotonic()
        counts, suite, note = _test(task, command, [*selection, *extra], filtered, isolated)
        total += counts
        suites.extend(suite)
        state = "FAIL" if counts.failed else "ok"
        report.append(f"  {state:4}  {task.name}  {time.monotonic() - started:.1f} s{note}")
    if filtered and total == Counts():
        report.append("  FAIL  no test in any task matches the selection")
        total.failed = 1
    if junit:
        with atomic_path(junit) as temporary:
            ElementTree.ElementTree(suites).write(temporary, encoding="utf-8", xml_declaration=True)
    print("\n" + "\n".join(report))
    print(total, flush=True)
    return 1 if total.failed else 0


def _test(task: Task, command: list[str], arguments: list[str], filtered: bool, isolated: bool):
    """One task: (counts, its junit suites, a note for the report)."""
    try:
        system.ensure(task.apt, task.name)
        folder = env.ensure(env.for_task(task, isolated)).folder
    except (ValueError, OSError) as error:
        print(f"dlx: {error}", file=sys.stderr, flush=True)
        return Counts(failed=1), [_failure(task, str(error))], "  (no environment)"
    with tempfile.TemporaryDirectory(prefix="dlx-test-") as scratch:
        xml = Path(scratch) / "junit.xml"
        pytest = [str(folder / "bin" / "python"), "-m", "pytest", *task.test_args, *arguments, f"--junitxml={xml}"]
        status = _wait(subprocess.Popen(pytest, cwd=task.folder, env=task.environment(folder, command)))
        suite, counts = read_junit(xml, task.name)
    if status == NO_TESTS and filtered:
        return counts, suite, "  (nothing selected)"
    if status and not counts.failed:
        reason = "no tests were collected" if status == NO_TESTS else f"pytest ended with status {status}"
        print(f"dlx: {task.name}: {reason}", file=sys.stderr, flush=True)
        counts.failed += 1
        return counts, [*suite, _failure(task, reason)], f"  ({reason})"
    return counts, suite, ""


def _wait(process: subprocess.Popen) -> int:
    """Wait for pytest; on Ctrl-C it has the signal too, so let it print its summary before we leave."""
    try:
        return process.wait()
    except BaseException:
        if process.poll() is None:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
        raise


def read_junit(path: Path, name: str) -> tuple[list[ElementTree.Element], Counts]:
    """The suites of one junit file, named after the task, and the counts of its cases; none where there is no file."""
    if not path.is_file():
        return [], Counts()
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = Counts()
    for suite in suites:
        suite.set("name", name)
        for case in suite.iter("testcase"):
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                counts.failed += 1
            elif "skipped" in kinds:
                counts.skipped += 1
            else:
                counts.passed += 1
    return suites, counts


def _failure(task: Task, reason: str) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=task.name, tests="1", failures="0", errors="1", skipped="0")
    case = ElementTree.SubElement(suite, "testcase", classname=task.package, name="run")
    ElementTree.SubElement(case, "error", message=reason.splitlines()[0]).text = reason
    return suite
