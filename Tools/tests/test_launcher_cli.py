"""The command line: help, names, running verbs, their environment variables, signals and exit statuses."""

from __future__ import annotations

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlx import __version__
from dlx.task import TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    "list",
    "quickstart",
    "run",
    "test",
    "bench",
    "build",
    "copy",
    "report",
    "readme",
    "weights",
    "cache",
    "env",
]


def test_help_names_every_command_with_examples(tree):
    shown = tree.dlx("--help")
    assert shown.returncode == 0
    for command in COMMANDS:
        assert f"    {command}" in shown.stdout
    assert "examples:\n  ./dlx list" in shown.stdout
    assert tree.dlx().stdout == shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_teaches_by_example(tree, command):
    shown = tree.dlx(command, "--help")
    assert shown.returncode == 0
    assert "examples:\n  ./dlx " + command in shown.stdout or "  source $(./dlx" in shown.stdout


def test_unknown_command_suggests(tree):
    done = tree.dlx("tset")
    assert done.returncode == 2
    assert "no command 'tset'; did you mean 'test'?" in done.stdout


def test_unknown_task_and_verb_suggest(tree):
    tree.task("PyTorch/Area/ConvNets")
    done = tree.dlx("run", "ConNets", "train")
    assert done.returncode == 2 and "did you mean 'ConvNets'?" in done.stdout
    done = tree.dlx("run", "ConvNets", "trian")
    assert done.returncode == 2 and "has no verb 'trian'; did you mean 'train'?" in done.stdout


def test_arguments_without_dashes_are_explained(tree):
    tree.task()
    done = tree.dlx("run", "Alpha", "train", "--epochs", "3")
    assert done.returncode == 2 and "options for the task itself go after --" in done.stdout
    done = tree.dlx("list", "--", "x")
    assert done.returncode == 2 and "takes nothing after --" in done.stdout


def test_list_shows_tasks_verbs_and_honest_states(tree):
    tree.task()
    tree.task("TensorFlow2/Area/Beta", state='"partial"', state_note='"no export yet"')
    shown = tree.dlx("list").stdout
    assert "PyTorch/Area/Alpha  (complete)" in shown and "(partial: no export yet)" in shown and "train" in shown
    rows = json.loads(tree.dlx("list", "--json").stdout)
    assert [row["name"] for row in rows] == ["PyTorch/Area/Alpha", "TensorFlow2/Area/Beta"]


@pytest.mark.parametrize("name", ["PyTorch/Area/Alpha", "pytorch/area/alpha/", "Alpha", "alpha"])
def test_a_task_has_several_names(ready, name):
    ready.task()
    assert ready.dlx("run", name, "train", "--", "1").stdout.strip().endswith("|1")


def test_an_ambiguous_name_lists_the_tasks(tree):
    tree.task("PyTorch/Area/Same", package="one")
    tree.task("Kaldi/Same", package="two")
    done = tree.dlx("run", "same", "train")
    assert "'same' can be Kaldi/Same or PyTorch/Area/Same" in done.stdout


def test_run_keeps_the_callers_folder_and_passes_arguments_on(ready, tmp_path):
    ready.task()
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')\n")  # must not hide Python's own module
    done = ready.dlx("run", "Alpha", "train", "--", "--name", "a b", "--", "-x", cwd=tmp_path, DLX_ROOT="")
    assert done.stdout.strip() == f"{tmp_path}|--name|a b|--|-x"


def test_verbs_see_where_they_are(ready):
    folder = ready.task()
    code = "import json, os, sys, dlx\nprint(json.dumps({**os.environ, 'exe': sys.executable, 'dlx': dlx.__file__}))\n"
    ready.write("PyTorch/Area/Alpha/alpha/train.py", code)
    seen = json.loads(ready.dlx("run", "Alpha", "train", "--", "--name", "a b", PYTHONPATH="/elsewhere").stdout)
    assert seen["PYTHONPATH"] == f"{ready.root}/Tools:{folder}"
    assert seen["DLX_ROOT"] == str(ready.root)
    assert seen["DLX_TASK"] == "PyTorch/Area/Alpha" and seen["DLX_TASK_DIR"] == str(folder)
    assert shlex.split(seen["DLX_COMMAND"]) == ["./dlx", "run", "Alpha", "train", "--", "--name", "a b"]
    assert seen["PYTHONUNBUFFERED"] == "1"
    assert seen["exe"].startswith(str(ready.home / "envs" / "fake-"))
    assert seen["dlx"] == str(ready.root / "Tools" / "dlx" / "__init__.py")


def test_a_verb_can_be_a_command_line(ready):
    ready.task(verbs='train = ["bash", "{task_dir}/go.sh", "first"]')
    ready.write("PyTorch/Area/Alpha/go.sh", 'command -v python; echo "$@"; exit 7\n')
    done = ready.dlx("run", "Alpha", "train", "--", "second")
    assert done.returncode == 7
    assert done.stdout.splitlines()[1] == "first second" and str(ready.home) in done.stdout
    done = ready.dlx("run", "Alpha", "train", "--nproc", "2")
    assert done.returncode == 2 and "--nproc is for verbs that are Python modules" in done.stdout


def test_nproc_starts_torchrun(ready):
    ready.task()
    fake = "import sys\nprint(sys.argv[1:])\n"
    ready.write("PyTorch/Area/Alpha/torch/__init__.py", "")
    ready.write("PyTorch/Area/Alpha/torch/distributed/__init__.py", "")
    ready.write("PyTorch/Area/Alpha/torch/distributed/run.py", fake)
    done = ready.dlx("run", "Alpha", "train", "--nproc", "2", "--", "--epochs", "1")
    torchrun, worker = [*TORCHRUN[1:], "--nproc-per-node", "2"], ["-m", "dlx.entry", "alpha.train", "--epochs", "1"]
    assert ast.literal_eval(done.stdout) == torchrun + worker
    assert ready.dlx("run", "Alpha", "train", "--nproc", "0").returncode == 2
    ready.task("Kaldi/Gamma")
    assert "which Kaldi does not use" in ready.dlx("run", "Gamma", "train", "--nproc", "2").stdout


def test_version_and_options_without_a_command(tree):
    done = tree.dlx("--version")
    assert done.returncode == 0 and done.stdout == f"dlx {__version__}\n"
    done = tree.dlx("--verbose")
    assert done.returncode == 2 and done.stdout == "dlx: no option --verbose; `./dlx --help` shows all\n"


def test_quickstart_and_bench_are_verbs(ready):
    ready.task("PyTorch/Area/Alpha", verbs='quickstart = "alpha.train"\nbenchmark = "alpha.train"')
    ready.task("PyTorch/Area/ConvNets", verbs='quickstart = "convnets.train"')
    ready.write("PyTorch/Area/ConvNets/convnets/train.py", "print('the default')\n")
    assert ready.dlx("quickstart").stdout == "the default\n"
    assert ready.dlx("quickstart", "Alpha", "--", "x").stdout.endswith("|x\n")
    assert ready.dlx("bench", "Alpha", "--", "y").stdout.endswith("|y\n")


def test_exit_status_is_the_verbs_own(ready):
    ready.task()
    ready.write("PyTorch/Area/Alpha/alpha/train.py", "raise SystemExit(3)\n")
    assert ready.dlx("run", "Alpha", "train").returncode == 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_reach_the_verb(ready, number, status):
    ready.task()
    ready.write("PyTorch/Area/Alpha/alpha/train.py", "import time\nprint('go', flush=True)\ntime.sleep(60)\n")
    child = subprocess.Popen(
        ready.command("run", "Alpha", "train"), env=ready.environment(), cwd=ready.root, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert child.stdout.readline() == "go\n"
    os.killpg(child.pid, number)
    output, _ = child.communicate(timeout=20)
    assert child.returncode == status
    assert "Traceback" not in output


def test_torchrun_ends_without_a_traceback(ready):
    """It turns a signal into an exception that carries its number."""
    ready.task()
    code = "class SignalException(Exception):\n    sigval = 15\nraise SignalException\n"
    ready.write("PyTorch/Area/Alpha/alpha/train.py", code)
    done = ready.dlx("run", "Alpha", "train")
    assert done.returncode == 143 and done.stdout == "\nended by SIGTERM\n"
    ready.write("PyTorch/Area/Alpha/alpha/train.py", "raise KeyError('mine')\n")
    done = ready.dlx("run", "Alpha", "train")
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stdout


def test_a_verb_may_start_processes_of_its_own(ready):
    """`spawn` imports the main module again by its name; that must work under the launcher, too."""
    ready.task()
    code = """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """
    ready.write("PyTorch/Area/Alpha/alpha/train.py", "\n".join(line[8:] for line in code.splitlines()))
    assert ready.dlx("run", "Alpha", "train").stdout == "[2, 4]\n"


def test_report_finds_the_task_in_the_record(ready, tmp_path):
    ready.task()
    ready.write("Tools/dlx/report.py", "import os, sys\nprint(os.environ['DLX_TASK'], *sys.argv[1:])\n")
    ready.task("PyTorch/Area/Beta")
    run = tmp_path / "run"
    run.mkdir()
    done = ready.dlx("report", str(run))
    assert done.returncode == 2 and "record.json does not exist" in done.stdout
    (run / "record.json").write_text('{"task": "PyTorch/Area/Beta"}')
    assert ready.dlx("report", "run", cwd=tmp_path).stdout.strip() == f"PyTorch/Area/Beta {run}"


def test_works_from_any_folder_and_through_a_link(ready, tmp_path):
    ready.task()
    (tmp_path / "link").symlink_to(ready.root / "dlx")
    words = [sys.executable, str(tmp_path / "link"), "list"]
    done = subprocess.run(words, cwd="/", env=ready.environment(), capture_output=True, text=True, check=True)
    assert "PyTorch/Area/Alpha" in done.stdout


def test_an_old_python_is_refused_in_one_line():
    """The check runs before anything that an old interpreter could not read."""
    source = (ROOT / "dlx").read_text()
    compile(source, "dlx", "exec", dont_inherit=True)
    faked = source.replace("sys.version_info", "(3, 8, 1)", 1)
    done = subprocess.run([sys.executable, "-c", faked], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr and len(done.stderr.splitlines()) == 1


def test_errors_have_no_traceback_unless_asked(tree):
    tree.task(state='"partial"')
    done = tree.dlx("list")
    assert done.returncode == 2 and "key 'state_note'" in done.stdout and "Traceback" not in done.stdout
    assert "Traceback" in tree.dlx("list", DLX_DEBUG="1").stdout


def test_a_users_mistake_in_a_verb_is_one_line_and_a_fault_keeps_its_traceback(ready):
    ready.task()
    ready.write("PyTorch/Area/Alpha/alpha/train.py", "import sys\nraise eval(sys.argv[1])('what is wrong')\n")
    done = ready.dlx("run", "Alpha", "train", "--", "ValueError")
    assert done.returncode == 1 and "alpha.train: error: what is wrong" in done.stdout
    assert "Traceback" not in done.stdout
    assert "Traceback" in ready.dlx("run", "Alpha", "train", "--", "ValueError", DLX_DEBUG="1").stdout
    assert "Traceback" in ready.dlx("run", "Alpha", "train", "--", "KeyError").stdout


def test_interrupt_of_the_launcher_itself(tree):
    """Ctrl-C while an environment is being made: 130, no traceback, nothing half-made."""
    tree.task()
    child = subprocess.Popen(
        tree.command("env", "make", "Alpha"), env=tree.environment(), cwd=tree.root, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    folder = tree.env_folder()
    deadline = time.monotonic() + 20
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=20)
    assert child.returncode == 130, output
    assert "Traceback" not in output
    assert not folder.exists()
