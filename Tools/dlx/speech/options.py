"""Options that the verbs of text-to-speech tasks share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dlx import files
from dlx.config import field

from . import corpora, flite
from .datasets import AnySplit, Split, open_data
from .frontend import FrontEnd
from .mel import MelConfig
from .symbols import SymbolTable


@dataclass
class AudioOptions:
    """What a spectrogram means; a vocoder must agree."""

    sample_rate: int = field(22050, help="of the sound in Hz", ge=1000, group="audio")
    n_fft: int = field(1024, help="samples of a transform", ge=8, group="audio")
    hop_length: int = field(256, help="samples between frames", ge=1, group="audio")
    win_length: int = field(1024, help="samples of the window", ge=1, group="audio")
    num_mels: int = field(80, help="bands of a frame", ge=1, group="audio")
    fmin: float = field(0.0, help="where the lowest band begins, in Hz", ge=0, group="audio")
    fmax: float = field(8000.0, help="where the highest band ends, in Hz", gt=0, group="audio")

    def mel(self) -> MelConfig:
        names = ("sample_rate", "n_fft", "hop_length", "win_length", "num_mels", "fmin", "fmax")
        return MelConfig(**{name: getattr(self, name) for name in names})


@dataclass
class DataOptions(AudioOptions):
    """Which utterances, and how they are read."""

    data: str = field(
        "flite-speech", help="flite-speech, asterisk-en, synthetic or the folder of a corpus", group="data"
    )
    train_list: str | None = field(
        None, help="your own recordings (instead of data): a file with lines `sound file|text`", group="data"
    )
    val_list: str | None = field(None, help="the like, for validation", group="data")
    speakers: bool = field(False, help="lines of the lists end in `|speaker`", group="data")
    resample: bool = field(True, help="accept sound files of any sample rate", group="data")
    utterances: int = field(3000, help="texts read aloud for flite-speech", ge=3, group="data")
    voices: list[str] = field(["rms"], help="of flite-speech, in turn", choices=flite.VOICES, group="data")
    min_seconds: float = field(0.3, help="shortest utterance", ge=0, group="data")
    max_seconds: float = field(12.0, help="longest utterance", gt=0, group="data")
    tolerant: bool = field(False, help="leave out and count bad lines of the lists instead of stopping", group="data")
    cleaner: Literal["english", "basic"] = field(
        "english", help="english spells out numbers and abbreviations; basic is for any alphabet", group="data"
    )
    alphabet: str | None = field(
        None, help="the letters of another alphabet; by default the 148 published English symbols", group="data"
    )
    punctuation: bool = field(True, help="end every text with a mark", group="data")
    text_buckets: list[int] = field([], help="numbers of symbols that batches are padded to", ge=1, group="data")
    mel_buckets: list[int] = field([], help="numbers of frames that batches are padded to", ge=1, group="data")
    bucket_window: int = field(
        32, help="batches among which utterances of like length are found; 1: none", ge=1, group="data"
    )
    mel_dtype: Literal["float16", "float32"] = field("float16", help="how spectrograms are kept", group="data")
    workers: int = field(2, help="threads per device that read ahead", ge=0, group="data")
    batch_size: int = field(32, help="utterances per device and micro-batch", ge=1, group="data")
    seed: int = field(1, help="of weights, order and dropout", ge=0)
    device: str = field("auto", help="auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        if bool(self.train_list) != bool(self.val_list):
            raise ValueError(f"train_list and val_list go together, got {self.train_list!r} and {self.val_list!r}")
        self._lists = {"train": self.train_list, "val": self.val_list} if self.train_list else None
        if self._lists:
            self.data = f"{self.train_list}, {self.val_list}"  # so that logs and records name what was read
        if self.alphabet is not None and self.cleaner == "english":
            raise ValueError("an alphabet of your own goes with cleaner basic: the English rules give English letters")

    def front_end(self) -> FrontEnd:
        table = SymbolTable.english() if self.alphabet is None else SymbolTable.of_letters(self.alphabet)
        return FrontEnd(table, self.cleaner, self.punctuation)

    def open(self, progress: Any = None, **synthetic: int) -> dict[str, AnySplit]:
        """Read and validate the data, all problems reported at once; spectrograms are made where they are missing."""
        return open_data(
            self.data,
            lists=self._lists,
            front_end=self.front_end(),
            mel=self.mel(),
            utterances=self.utterances,
            voices=self.voices,
            speakers=self.speakers,
            resample=self.resample,
            min_seconds=self.min_seconds,
            max_seconds=self.max_seconds,
            tolerant=self.tolerant,
            mel_dtype=self.mel_dtype,
            progress=progress,
            synthetic=synthetic,
        )

    def identity(self, splits: dict[str, AnySplit]) -> dict[str, str]:
        """Hashes of what was read, for the run record: of the lists, or of a corpus."""
        if self._lists:
            return {str(path): files.sha256(path) for path in self._lists.values()}
        for split in splits.values():
            if isinstance(split, Split):
                folder = corpora.folder_of(split.utterances[0].path)
                return {self.data: corpora.identity(folder)} if folder is not None else {}
        return {}
