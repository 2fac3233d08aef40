"""Make data folders in Kaldi's format, or check and repair your own.

./dlx run Kaldi/SpeechRecognition prepare                                         digits, read by four voices
./dlx run Kaldi/SpeechRecognition prepare -- --data asterisk-en                   23 minutes of one real voice
./dlx run Kaldi/SpeechRecognition prepare -- --data own --recordings list.txt     PATH|TEXT|SPEAKER a line
./dlx run Kaldi/SpeechRecognition prepare -- --action validate --data_dir data/train
./dlx run Kaldi/SpeechRecognition prepare -- --action fix --data_dir data/train
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlx import config as configs
from dlx.speech import audio
from dlx.speech.preparing import Progress

from . import corpora, datadir
from .options import CONFIGS, SourceOptions


@dataclass
class PrepareConfig(SourceOptions):
    """Make, validate or fix data folders."""

    action: Literal["make", "validate", "fix"] = configs.field(
        "make", help="make data; or list the faults of data_dir; or repair it", group="data"
    )

    def __post_init__(self) -> None:
        if self.action != "make" and self.data_dir is None:
            raise ValueError(f"--action {self.action} needs --data_dir, the data folder")


def data_folders(folder: Path) -> list[Path]:
    """The folder itself if it holds data, else those in it that do."""
    if not folder.is_dir() or any((folder / name).is_file() for name in datadir.FILES):
        return [folder]
    return sorted(path for path in folder.iterdir() if (path / "text").is_file()) or [folder]


def summary(folder: Path) -> dict[str, Any]:
    """Utterances, speakers, words and hours of a data folder."""
    utterances = datadir.read(folder)
    seconds = {u.recording or u.id: audio.duration(u.path)[0] for u in utterances}
    whole = sum((u.end if u.end is not None else seconds[u.recording or u.id]) - u.start for u in utterances)
    return {
        "utterances": len(utterances),
        "speakers": len({u.speaker for u in utterances}),
        "words": sum(len(u.words) for u in utterances),
        "minutes": round(whole / 60, 2),
    }


def main(args: list[str] | None = None) -> int:
    config = configs.parse(PrepareConfig, args, configs_dir=CONFIGS, prog="prepare")
    if config.action == "make":
        folder = corpora.prepare(config, Progress())
        for path in data_folders(folder):
            print(f"{path}: " + ", ".join(f"{value} {name}" for name, value in summary(path).items()))
        return 0
    status = 0
    for path in data_folders(Path(config.data_dir)):
        lines = [str(fault) for fault in datadir.check(path)] if config.action == "validate" else datadir.fix(path)
        print("\n".join(lines) if lines else f"{path}: nothing to {config.action}, all is right")
        status |= int(bool(lines) and config.action == "validate")
    return status


if __name__ == "__main__":
    sys.exit(main())
