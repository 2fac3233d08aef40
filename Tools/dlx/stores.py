"""Commands about what is kept in $DLX_HOME: weights, fetched data, environments."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from dlx import env, system
from dlx.files import human_bytes, sha256
from dlx.paths import home, weight_dir
from dlx.task import Task, TaskError, default, find, require_root

# `dlx.data` and `dlx.weights` are imported where they are used: the launcher starts without them.


def environment(task: Task, isolated: bool = False) -> Path:
    """The folder of the environment that the task runs in, made if need be; its system packages, too."""
    system.ensure(task.apt, task.name)
    return env.ensure(env.for_task(task, isolated)).folder


def weights_list(options: argparse.Namespace) -> None:
    from dlx import weights

    for card in weights.cards(require_root()).values():
        print(f"{card.name}\n    {card.task}, {card.arch}, {human_bytes(card.size)}, {card.licence}")
        if card.metric:
            print("    {name} {value} on {data}".format_map(card.metric))


def weights_fetch(options: argparse.Namespace) -> None:
    from dlx import weights

    for name in options.names:
        print(weights.resolve(weights.card(name, require_root())))


def weights_verify(options: argparse.Namespace) -> int:
    """./dlx weights verify NAME...: run the card's own evaluation and compare; status 1 when a number is missed."""
    from dlx import weights

    root, status = require_root(), 0
    for name in options.names:
        card = weights.card(name, root)
        if not (card.verify and card.metric):
            raise ValueError(f"{card.path}: key 'verify' or 'metric' is missing, so there is nothing to compare with")
        measured = _evaluate(card, find(card.task, root), options.argv)
        wanted, tolerance = card.metric["value"], card.metric.get("tolerance", 0)
        good = abs(measured - wanted) <= tolerance + 1e-12
        verdict = "as published" if good else "NOT as published"
        print(f"{name}: {card.metric['name']} {measured:g}, {verdict} ({wanted:g} within {tolerance:g})", flush=True)
        status |= not good
    return int(status)


def _evaluate(card, task: Task, command: list[str]) -> float:
    """Run the card's verify command in the task's environment; the metric from the record that it writes."""
    verb, *arguments = [card.name if word == "NAME" else word for word in card.verify]
    folder = environment(task)
    with tempfile.TemporaryDirectory(prefix="dlx-verify-") as scratch:
        words = task.command(verb, [*arguments, "--output_dir", scratch])
        words[0] = shutil.which(words[0], path=f"{folder}/bin") or words[0]
        done = subprocess.run(words, env=task.environment(folder, command), check=False)
        if done.returncode:
            raise ValueError(f"{card.name}: its evaluation ended with status {done.returncode}")
        record = Path(scratch) / "record.json"
        if not record.is_file():
            raise ValueError(f"{card.name}: `{verb}` wrote no record.json into its --output_dir")
        metrics = json.loads(record.read_text())["metrics"]
    metric = card.metric["name"]
    if metric not in metrics:
        raise ValueError(f"{card.path}: key 'metric.name' is {metric!r}, but the evaluation gives {', '.join(metrics)}")
    return float(metrics[metric]["value"])


def _weight_files() -> list[Path]:
    return sorted(path for path in weight_dir().glob("*") if path.is_file() and path.suffix != ".lock")


def cache_list(options: argparse.Namespace) -> None:
    from dlx import data

    rows = [(entry.kind, entry.size, entry.state, entry.path) for entry in data.entries()]
    rows += [("weights", path.stat().st_size, "complete", path) for path in _weight_files()]
    for kind, size, state, path in rows:
        print(f"{kind:8} {human_bytes(size):>10}  {state:8}  {path}")
    print(f"{len(rows)} entries, {human_bytes(sum(row[1] for row in rows))} in {home()}")


def cache_verify(options: argparse.Namespace) -> int:
    """./dlx cache verify: hash the prepared data sets and the weights again; status 1 when something is damaged.

    With --repair what is damaged is fetched again first, and what then still is counts.
    """
    from dlx import data, weights

    faults, seen = [], set()
    for name in data.names():
        folder = data.data_folder(data.get(name))
        if not folder.is_dir():
            continue
        seen.add(folder)
        if options.repair:
            data.prepare(name, check=True)
        found = data.verify(name) if (folder / data.STAMP).is_file() else [f"{folder}: not complete"]
        faults += found
        print(f"{'ok' if not found else 'DAMAGED':8} {name}")
    for entry in data.entries():  # sets of tasks, which only these know how to fetch
        if entry.kind == "data" and (entry.path / data.STAMP).is_file() and entry.path not in seen:
            found = data.verify_folder(entry.path)
            faults += [f"{fault}; its task's `prepare` makes it anew" for fault in found]
            print(f"{'ok' if not found else 'DAMAGED':8} {entry.name}")
    for card in weights.cards(require_root()).values():
        path = weight_dir() / card.filename
        if path.is_file():
            good = sha256(path) == card.sha256
            if options.repair and not good:
                path.unlink()
                good = bool(weights.resolve(card))  # which verifies
            faults += [] if good else [f"{path}: changed, expected sha256 {card.sha256}"]
            print(f"{'ok' if good else 'DAMAGED':8} {card.name}")
    for fault in faults:
        print(fault)
    if faults and not options.repair:
        print("`./dlx cache verify --repair` fetches what is damaged again")
    return 1 if faults else 0


def cache_prune(options: argparse.Namespace) -> None:
    from dlx import data

    for entry in data.entries():
        if options.all or entry.kind == "package" or entry.state != "complete":
            _remove(entry.path, entry.size, options.dry_run)
    for path in _weight_files() if options.all else []:
        _remove(path, path.stat().st_size, options.dry_run)


def _remove(path: Path, size: int, dry_run: bool) -> None:
    if not dry_run:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(f"{'would remove' if dry_run else 'removed'} {path} ({human_bytes(size)})")


def env_list(options: argparse.Namespace) -> None:
    root = require_root()
    current = {group.folder for group in env.groups(root).values()}
    stamps = dict(env.existing())
    for folder in sorted({*stamps, *current}):
        stamp = stamps.get(folder)
        absent = "half-made" if folder in stamps else "not made yet"
        state = f"{stamp['megabytes']:.0f} MB, made {stamp['made']}" if stamp else absent
        print(f"{folder}  {state}{'' if folder in current else '  (not a group of this clone)'}")


def env_path(options: argparse.Namespace) -> None:
    root = require_root()
    print(env.for_task(find(options.task, root) if options.task else default(root), options.isolated).folder)


def env_make(options: argparse.Namespace) -> None:
    root = require_root()
    if options.isolated and not options.tasks:
        raise TaskError("--isolated needs the names of tasks")
    for name in options.tasks:
        print(environment(find(name, root), options.isolated))
    for group in [] if options.tasks else env.groups(root).values():
        print(env.ensure(group).folder)


def env_prune(options: argparse.Namespace) -> None:
    for folder in env.prune(require_root(), options.all, options.dry_run):
        print(f"{'would remove' if options.dry_run else 'removed'} {folder}")
