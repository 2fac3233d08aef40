"""Make a corpus, or check your own recordings before training; see and hear what the network will learn from.

./dlx run Tacotron2 prepare                                            flite-speech: 3,000 texts, 4 hours of speech
./dlx run Tacotron2 prepare -- --utterances 300 --voices rms slt       a small one, two voices in turn
./dlx run Tacotron2 prepare -- --data asterisk-en                      25 minutes of studio recordings
./dlx run Tacotron2 prepare -- --train_list train.txt --val_list val.txt    validate: every fault, with file and line
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlx import config as configs
from dlx.speech import preparing

from .options import CONFIGS, DataOptions


@dataclass
class PrepareConfig(preparing.PrepareOptions, DataOptions):
    """Make a corpus or validate lists, keep the spectrograms, report."""


def main(args: list[str] | None = None) -> dict[str, Any]:
    return preparing.run(configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare"))


if __name__ == "__main__":
    main()
