"""The verb `prepare` of text-to-speech tasks: make a corpus or check recordings; see and hear what is learnt from."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlx import config as configs
from dlx.files import atomic_path, atomic_write

from . import overview
from .datasets import Split
from .options import DataOptions


@dataclass
class PrepareOptions(DataOptions):
    """Make a corpus or validate lists, keep the spectrograms, report."""

    output_dir: str | None = configs.field(
        None, help="folder for data.json, data.txt, data.png and sounds to listen to"
    )
    listen: int = configs.field(4, help="utterances copied to output_dir", ge=0)
    measured: int = configs.field(500, help="files that are listened to for the report; 0: all", ge=0)


def run(config: PrepareOptions) -> dict[str, Any]:
    """Make and measure the data of a configuration, print and write the report; returns it."""
    splits = config.open(progress=Progress())
    real = {name: split for name, split in splits.items() if isinstance(split, Split)}
    if not real:
        raise ValueError("synthetic data needs no preparation")
    report = overview.measure(
        {name: split.utterances for name, split in real.items()}, config.front_end(), sample=config.measured
    )
    report["frames"] = {name: int(split.frames.sum()) for name, split in real.items()}
    skipped = [fault for split in real.values() for fault in split.skipped]
    report["skipped"] = len(skipped)
    text = overview.describe(report)
    if skipped:
        text += f"\nleft out: {len(skipped):,} utterances, e.g. {': '.join(skipped[0])}"
    print(text)
    if config.output_dir is not None:
        write(Path(config.output_dir), report, text, real, config.listen)
        print(f"report: {config.output_dir}")
    print(f"ready: {config.data}")
    return report


class Progress:
    """A bar for each thing that is counted up, on a terminal."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None or done <= self.bar.n:
            self.bar = tqdm(total=total, unit="utterance", leave=False, disable=not sys.stderr.isatty())
        self.bar.update(done - self.bar.n)
        if done >= total:
            self.bar.close()
            self.bar = None


def write(folder: Path, report: dict[str, Any], text: str, splits: dict[str, Split], listen: int) -> None:
    """The report in three forms, and some utterances with their texts."""
    atomic_write(folder / "data.json", json.dumps(report, indent=1) + "\n")
    atomic_write(folder / "data.txt", text + "\n")
    overview.draw(report, folder / "data.png")
    lines, named = [], Counter()
    for name, split in splits.items():
        for utterance in split.utterances[:: max(1, len(split) // max(listen, 1))][:listen]:
            target = folder / "sounds" / f"{name}-{named[name]}{utterance.path.suffix}"
            named[name] += 1
            with atomic_path(target) as temporary:
                shutil.copyfile(utterance.path, temporary)
            lines.append(f"{target.name}|{utterance.text}")
    if lines:
        atomic_write(folder / "sounds" / "texts.txt", "\n".join(lines) + "\n")
