"""The command line of the launcher: one function per command, and help that teaches by example."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

from dlx import __version__, container, readme, stores, testrun, vendor
from dlx.paths import home
from dlx.task import Task, TaskError, default, discover, find, nearest, require_root

OVERVIEW = """examples:
  ./dlx list                                     what is here
  ./dlx quickstart                               make the environment, fetch a small data set, train, evaluate, report
  ./dlx run ConvNets train -- --config NAME      one verb of a task; what follows -- goes to the task
  ./dlx test                                     every task's tests
  ./dlx copy ConvNets ~/my-product               take a task away; the copy works alone

A task is named by its folder (PyTorch/Classification/ConvNets), the last part of it, or its package.
Environments, data and weights are kept in $DLX_HOME (now {home}).
`./dlx COMMAND --help` shows each command with examples."""


def main(argv: list[str]) -> int:
    """Run one command; returns the exit status: 0, 1 for failed tests or drift, 2 for a wrong call, 130 for Ctrl-C."""
    own, extra = argv, []
    if "--" in argv:
        cut = argv.index("--")
        own, extra = argv[:cut], argv[cut + 1 :]
    parser, commands = build_parser()
    if not own:
        parser.print_help()
        return 0
    if not own[0].startswith("-") and own[0] not in commands:
        print(f"dlx: no command {own[0]!r}{nearest(own[0], commands)}; `./dlx --help` shows all", file=sys.stderr)
        return 2
    options, unknown = parser.parse_known_args(own)
    if unknown and "takes_extra" not in options:
        print(f"dlx: no option {' '.join(unknown)}; `./dlx --help` shows all", file=sys.stderr)
        return 2
    if unknown:
        hint = "; options for the task itself go after --" if options.takes_extra else ""
        print(f"dlx: {own[0]} does not know {' '.join(unknown)}{hint}", file=sys.stderr)
        return 2
    if extra and not options.takes_extra:
        print(f"dlx: {own[0]} takes nothing after --, but was given: {shlex.join(extra)}", file=sys.stderr)
        return 2
    options.extra, options.argv = extra, argv
    try:
        return options.function(options) or 0
    except KeyboardInterrupt:
        print("\ndlx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # ./dlx list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        if os.environ.get("DLX_DEBUG"):
            traceback.print_exc()
        print(f"dlx: {error}", file=sys.stderr)
        return 2


def build_parser() -> tuple[argparse.ArgumentParser, dict]:
    """The parser, and its commands by name."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="./dlx", description="Run, test and take away the tasks of this repository.",
        epilog=OVERVIEW.format(home=home()), formatter_class=plain,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dlx {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, function, summary: str, examples: str, extra: bool = False, parent=commands):
        lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        made = parent.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"examples:\n{lines}", formatter_class=plain,
        )  # fmt: skip
        made.set_defaults(function=function, takes_extra=extra)
        return made

    def isolated(made) -> None:
        made.add_argument("--isolated", action="store_true", help="an environment for this task alone, not its group's")

    made = command("list", list_tasks, "show the tasks, their verbs and states", "./dlx list\n./dlx list --json")
    made.add_argument("--json", action="store_true", help="the same for programs")

    made = command(
        "quickstart", quickstart, "prepare a small real data set, train minutes on a CPU, evaluate, infer, report",
        """./dlx quickstart                          ConvNets on Fashion-MNIST
        ./dlx quickstart ConvNets -- --max_steps 50   options of the task follow --""", extra=True,
    )  # fmt: skip
    made.add_argument("task", nargs="?", metavar="TASK", help="default: ConvNets")
    isolated(made)

    made = command(
        "run", run, "run one verb of a task in its environment",
        """./dlx run ConvNets prepare
        ./dlx run ConvNets train -- --config quickstart --epochs 2
        ./dlx run ConvNets train --nproc 8 -- --config NAME      8 processes through torchrun
        ./dlx run ConvNets infer -- --help                       the task's own options""", extra=True,
    )  # fmt: skip
    made.add_argument("task", metavar="TASK")
    made.add_argument("verb", metavar="VERB", help="prepare, train, evaluate, infer, ... (./dlx list)")
    made.add_argument("--nproc", type=_nproc, metavar="N", help="processes on this machine, or 'gpu': one per GPU")
    isolated(made)

    made = command(
        "test", test, "run the tasks' tests; the last line says N passed, N failed, N skipped",
        f"""./dlx test                                  everything that runs on this CPU
        ./dlx test ConvNets Tools -k export         only some
        ./dlx test --markers gpu                    tests that need a GPU (by default: {testrun.DEFAULT_MARKERS})
        ./dlx test --junit results.xml
        ./dlx test ConvNets -- -x --durations 5     pytest's own options""", extra=True,
    )  # fmt: skip
    made.add_argument("tasks", nargs="*", metavar="TASK", help="default: every task, and Tools")
    made.add_argument("--markers", metavar="EXPR", help="pytest -m: gpu, multigpu, container, slow; '': every test")
    made.add_argument("-k", dest="keyword", metavar="EXPR", help="pytest -k: only tests whose names match")
    made.add_argument("--junit", type=Path, metavar="FILE", help="write the results as JUnit XML")
    isolated(made)

    made = command(
        "bench", bench, "run a task's benchmark verb",
        """./dlx bench ConvNets -- --mode inference --arch resnet50 --batch_sizes 1 64
        ./dlx bench ConvNets -- --help              the task's own options, with more examples""", extra=True,
    )  # fmt: skip
    made.add_argument("task", metavar="TASK")
    isolated(made)

    made = command(
        "build", build, "build a task's container image with docker, podman or buildah",
        """./dlx build ConvNets
        ./dlx build ConvNets --engine podman --tag my/convnets:1
        ./dlx build ConvNets --build-arg FROM_IMAGE_NAME=docker.io/library/python:3.12-slim-bookworm
        ./dlx build ConvNets -- --no-cache          the engine's own options""", extra=True,
    )  # fmt: skip
    made.add_argument("task", metavar="TASK")
    made.add_argument("--engine", choices=container.ENGINES, help="default: the first of these that works")
    made.add_argument("--tag", metavar="NAME", help="default: dlx/PACKAGE:latest")
    made.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", dest="build_args")

    _add_results(command)
    _add_stores(command, isolated)
    return parser, commands.choices


def _add_results(command) -> None:
    """Commands that write something to take away or to read: copy, report, readme."""
    made = command(
        "copy", copy, "copy a task, dlx and the launcher to a folder that works alone",
        "./dlx copy ConvNets ~/my-product && cd ~/my-product && ./dlx test",
    )  # fmt: skip
    made.add_argument("task", metavar="TASK")
    made.add_argument("destination", type=Path, metavar="DEST", help="a new or empty folder")

    made = command("report", report, "write a run's report.html again", "./dlx report runs/quickstart")
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that holds record.json")

    made = command(
        "readme", regenerate, "regenerate the READMEs' tables from results/*.json",
        "./dlx readme\n./dlx readme --check          writes nothing; status 1 and a diff on drift",
    )  # fmt: skip
    made.add_argument("--check", action="store_true", help="only compare")


def _add_stores(command, isolated) -> None:
    """Commands about what is kept in $DLX_HOME: weights, cache, env."""

    def group(name: str, summary: str, examples: str):
        made = command(name, None, summary, examples)
        return functools.partial(command, parent=made.add_subparsers(metavar="ACTION", title="actions", required=True))

    action = group("weights", "list, fetch and verify published weights", "./dlx weights list")
    action("list", stores.weights_list, "show every card", "./dlx weights list")
    made = action(
        "fetch", stores.weights_fetch, "get weights into the cache", "./dlx weights fetch mobilenet_v2.imagenet"
    )
    made.add_argument("names", nargs="+", metavar="NAME")
    examples = "./dlx weights verify mobilenet_v2.imagenet"
    made = action("verify", stores.weights_verify, "evaluate again and compare with the card", examples)
    made.add_argument("names", nargs="+", metavar="NAME")

    action = group("cache", "list, verify and prune fetched data and weights", "./dlx cache list\n./dlx cache verify")
    action("list", stores.cache_list, "show what is kept and how big it is", "./dlx cache list")
    examples = "./dlx cache verify\n./dlx cache verify --repair"
    made = action("verify", stores.cache_verify, "hash everything again; status 1 when it differs", examples)
    made.add_argument("--repair", action="store_true", help="fetch what is damaged again")
    examples = "./dlx cache prune --dry-run\n./dlx cache prune --all        prepared sets, weights and indexes, too"
    _pruning(
        action("prune", stores.cache_prune, "remove downloads (what was made from them stays) and leftovers", examples)
    )

    examples = "./dlx env list\nsource $(./dlx env path ConvNets)/bin/activate"
    action = group("env", "list, make and prune environments", examples)
    action("list", stores.env_list, "show the environments", "./dlx env list")
    made = action("path", stores.env_path, "print where a task's environment is", "./dlx env path ConvNets")
    made.add_argument("task", nargs="?", metavar="TASK")
    isolated(made)
    made = action("make", stores.env_make, "make environments now", "./dlx env make\n./dlx env make ConvNets")
    made.add_argument("tasks", nargs="*", metavar="TASK", help="default: every group")
    isolated(made)
    _pruning(
        action("prune", stores.env_prune, "remove those that this clone does not use", "./dlx env prune --dry-run")
    )


def _pruning(made) -> None:
    made.add_argument("--dry-run", action="store_true", help="only show what would go")
    made.add_argument("--all", action="store_true", help="everything, used or not")


def _nproc(text: str) -> str:
    if text == "gpu" or (text.isdigit() and int(text) >= 1):
        return text
    raise argparse.ArgumentTypeError(f"must be 1 or more, or 'gpu', not {text!r}")


def start(task: Task, verb: str, options: argparse.Namespace, nproc: str | None = None) -> int:
    """Become the verb: the process is replaced, so signals and the exit status are the verb's own."""
    return _become(task, task.command(verb, options.extra, nproc), options, options.isolated)


def _become(task: Task, command: list[str], options: argparse.Namespace, isolated: bool = False) -> int:
    folder = stores.environment(task, isolated)
    variables = task.environment(folder, options.argv)
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise TaskError(f"{task.name}: program {command[0]!r} is not installed")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, [program, *command[1:]], variables)


def list_tasks(options: argparse.Namespace) -> None:
    tasks = [task for task in discover(require_root()) if task.kind == "task"]
    if options.json:
        keys = ("name", "framework", "summary", "package", "state", "state_note", "env")
        print(json.dumps([{k: getattr(t, k) for k in keys} | {"verbs": list(t.verbs)} for t in tasks], indent=2))
        return
    for framework in sorted({task.framework for task in tasks}):
        print(framework)
        for task in (t for t in tasks if t.framework == framework):
            note = f": {task.state_note}" if task.state_note else ""
            print(f"  {task.name}  ({task.state}{note})\n      {task.summary}\n      {' '.join(task.verbs)}")


def quickstart(options: argparse.Namespace) -> int:
    root = require_root()
    return start(find(options.task, root) if options.task else default(root), "quickstart", options)


def run(options: argparse.Namespace) -> int:
    return start(find(options.task, require_root()), options.verb, options, options.nproc)


def bench(options: argparse.Namespace) -> int:
    return start(find(options.task, require_root()), "benchmark", options)


def test(options: argparse.Namespace) -> int:
    root = require_root()
    tasks = [find(name, root) for name in options.tasks]
    tasks = tasks or [task for task in discover(root) if task.state != "planned"]
    choice = {"markers": options.markers, "keyword": options.keyword, "junit": options.junit}
    command = ["test", *options.argv[1:]]
    return testrun.run(tasks, command, isolated=options.isolated, extra=options.extra, **choice)


def build(options: argparse.Namespace) -> int:
    task = find(options.task, require_root())
    container.command(task, "docker", options.tag, options.build_args)  # complain about the call before the engine
    command = container.command(task, container.choose(options.engine), options.tag, options.build_args, options.extra)
    print(f"dlx: {shlex.join(command)}", flush=True)
    status = subprocess.run(command, check=False).returncode
    base = container.base_image(task, options.build_args)
    if status and base:
        print(
            f"dlx: the build failed. If its base image {base} could not be pulled, name one that can be: "
            f"./dlx build {options.task} --build-arg FROM_IMAGE_NAME=IMAGE", file=sys.stderr,
        )  # fmt: skip
    return status


def copy(options: argparse.Namespace) -> None:
    task = find(options.task, require_root())
    print(f"{task.name} is in {vendor.copy(task, options.destination.expanduser())}; try ./dlx test there")


def report(options: argparse.Namespace) -> int:
    root, record = require_root(), options.run_dir / "record.json"
    if not record.is_file():
        raise ValueError(f"{record} does not exist; RUN_DIR is the folder that a run wrote, its output_dir")
    name = json.loads(record.read_text()).get("task")
    known = [task for task in discover(root) if task.name == name]
    module = ["python", "-m", "dlx.entry", "dlx.report", str(options.run_dir.absolute())]
    return _become(known[0] if known else default(root), module, options)


def regenerate(options: argparse.Namespace) -> int:
    return readme.update(require_root(), options.check)
