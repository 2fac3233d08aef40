"""Make a corpus, or check your own recordings before training; see and hear what the network will learn from.

./dlx run FastSpeech prepare                                            flite-speech: 3,000 texts, 4 hours of speech
./dlx run FastSpeech prepare -- --train_list train.txt --val_list val.txt    every fault, with file and line; then the
                                                                        alignment of texts and recordings is learnt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlx import config as configs
from dlx import dist
from dlx.speech import preparing

from .data import TimedSplit
from .options import CONFIGS, DataOptions


@dataclass
class PrepareConfig(preparing.PrepareOptions, DataOptions):
    """Make a corpus or validate lists, keep the spectrograms and durations, report."""


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
    report = preparing.run(config)
    with dist.init(config.device) as world:
        splits = config.open_timed(world.device, preparing.Progress())
    for name, split in splits.items():
        if isinstance(split, TimedSplit):
            silent = sum(int((row == 0).sum()) for row in split.durations) / sum(map(len, split.durations))
            mean = split.frames.sum() / sum(map(len, split.durations))
            report.setdefault("durations", {})[name] = {"frames_per_symbol": round(mean, 3), "silent": round(silent, 4)}
            print(f"{name}: {mean:.2f} frames per symbol, {silent:.1%} of the symbols last none")
    return report


if __name__ == "__main__":
    main()
