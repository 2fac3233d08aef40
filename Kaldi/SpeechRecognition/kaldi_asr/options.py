"""What the verbs share: the task's name, its folder of configurations, and option groups to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlx.config import field

TASK = "Kaldi/SpeechRecognition"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SAMPLE_RATE = 16000


@dataclass
class SourceOptions:
    """Which recordings are prepared."""

    data: str = field("digits", help="digits, asterisk-en, flite-speech, or own", group="data")
    data_dir: str | None = field(None, help="folder to make, with train, val and test in it", group="data")
    recordings: str | None = field(
        None, help="own: a list with PATH|TEXT|SPEAKER a line, paths relative to the list", group="data"
    )
    utterances: int = field(400, help="digits and flite-speech: how many are read", ge=4, group="data")
    voices: list[str] = field(
        ["rms", "slt", "awb", "kal16"], help="digits and flite-speech: voices of Flite", group="data"
    )
    max_seconds: float = field(60.0, help="longest recording", gt=0, group="data")
    test_share: float = field(0.15, help="part of the texts that is held out for testing", gt=0, lt=1, group="data")
    val_share: float = field(0.05, help="part of the texts that is held out for tuning", gt=0, lt=1, group="data")
    seed: int = field(1, help="of every draw", group="data")
