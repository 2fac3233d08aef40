"""Make a corpus, or check your own recordings before training; see and hear what the network will learn from.

./dlx run Tacotron2 prepare                                            flite-speech: 3,000 texts, 4 hours of speech
./dlx run Tacotron2 prepare -- --utterances 300 --voices rms slt       a small one, two voices in turn
./dlx run Tacotron2 prepare -- --data asterisk-en                      25 minutes of studio recordings
./dlx run Tacotron2 prepare -- --train_list train.txt --val_list val.txt    validate: every fault, with file and line
"""

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
from dlx.speech import overview

from .data import Split
from .options import CONFIGS, DataOptions


@dataclass
class PrepareConfig(DataOptions):
    """Make a corpus or validate lists, keep the spectrograms, report."""

    output_dir: str | None = configs.field(
        None, help="folder for data.json, data.txt, data.png and sounds to listen to"
    )
    listen: int = configs.field(4, help="utterances copied to output_dir", ge=0)
    measured: int = configs.field(500, help="files that are listened to for the report; 0: all", ge=0)


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
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


if __name__ == "__main__":
    main()
