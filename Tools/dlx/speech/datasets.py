"""What text-to-speech tasks train on: the splits of a corpus or of lists, validated, spectrograms in the cache.

splits = open_data("flite-speech", utterances=3000)
splits["train"].text[0], splits["train"].mels.get(splits["train"].utterances[0].path)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dlx.loading import DataError, Loader, Plan, to_device

from . import corpora, filelists
from .batching import ahead
from .corpora import Utterance
from .feature_cache import FeatureCache, mel_cache, sound_cache
from .frontend import FrontEnd
from .mel import MelConfig

AnyBatch = TypeVar("AnyBatch", bound=tuple)


@dataclass
class Split:
    """One split: utterances with their symbols and numbers of frames, and where features are kept."""

    name: str
    utterances: list[Utterance]
    text: list[np.ndarray]
    frames: np.ndarray
    mels: FeatureCache
    sounds: FeatureCache
    mel: MelConfig
    front_end: FrontEnd
    skipped: list[tuple[str, str]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.utterances)

    def __post_init__(self) -> None:
        if not self.classes:
            self.classes = sorted({utterance.speaker for utterance in self.utterances})


@dataclass
class Synthetic:
    """`size` utterances of one length that are made up, for measuring speed."""

    name: str
    size: int = 12800
    text_length: int = 128
    mel_length: int = 800
    mel: MelConfig = field(default_factory=MelConfig)
    front_end: FrontEnd = field(default_factory=FrontEnd)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    classes: list[str] = field(default_factory=lambda: [""])

    def __len__(self) -> int:
        return self.size


AnySplit = Split | Synthetic


def open_data(
    data: str | os.PathLike[str] = "flite-speech",
    *,
    lists: Mapping[str, str | os.PathLike[str]] | None = None,
    front_end: FrontEnd | None = None,
    mel: MelConfig | None = None,
    home: str | os.PathLike[str] | None = None,
    utterances: int = 3000,
    voices: Sequence[str] = ("rms",),
    speakers: bool = False,
    resample: bool = True,
    min_seconds: float = 0.3,
    max_seconds: float = 12.0,
    tolerant: bool = False,
    mel_dtype: str = "float16",
    progress: Callable[[int, int], None] | None = None,
    synthetic: Mapping[str, int] | None = None,
) -> dict[str, AnySplit]:
    """The splits of `data`, validated as a whole, with every spectrogram in the cache.

    `data`: "flite-speech" (made if it is not here, of `utterances` texts read by `voices`), "asterisk-en", "synthetic"
    (of sizes `synthetic`) or the folder of a corpus. `lists` of the user's own (split: path of `file|text` lines) stand
    in for it; their faults, listed in one error, are left out if `tolerant`. Without `resample` files of another sample
    rate are faults. Utterances of a corpus that are shorter or longer than the limits are left out and counted.
    """
    front_end, mel = front_end or FrontEnd(), mel or MelConfig()
    if data == "synthetic" and not lists:
        sizes = dict(synthetic or {})
        return {name: Synthetic(name, mel=mel, front_end=front_end, **sizes) for name in ("train", "val")}
    skipped: list[tuple[str, str]] = []
    if lists:
        listed = filelists.read_lists(
            lists,
            front_end=front_end,
            speakers=speakers,
            sample_rate=None if resample else mel.sample_rate,
            min_seconds=min_seconds,
            max_seconds=max_seconds,
            tolerant=tolerant,
        )
        found = listed.splits
        skipped = [(fault.partition(": ")[0], fault.partition(": ")[2]) for fault in listed.faults]
    else:
        found, skipped = _read_corpus(data, home, utterances, voices, (min_seconds, max_seconds), progress)
    caches = mel_cache(mel, dtype=mel_dtype, home=home), sound_cache(mel.sample_rate, home=home)
    return {name: _split(name, part, front_end, mel, caches, skipped, progress) for name, part in found.items()}


def _read_corpus(
    data: str | os.PathLike[str],
    home: str | os.PathLike[str] | None,
    utterances: int,
    voices: Sequence[str],
    limits: tuple[float, float],
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, list[Utterance]], list[tuple[str, str]]]:
    folder = Path(data)
    if data in corpora.NAMES:
        options = {"utterances": utterances, "voices": tuple(voices)} if data == "flite-speech" else {}
        folder = corpora.prepare(str(data), home=home, progress=progress, **options)
    elif not folder.is_dir():
        raise DataError(f"{data}: neither a folder nor one of {', '.join(corpora.NAMES)}, synthetic")
    splits, skipped = {}, []
    for name, found in corpora.read(folder).items():
        splits[name] = [utterance for utterance in found if limits[0] <= utterance.seconds <= limits[1]]
        skipped += [
            (str(utterance.path), f"{utterance.seconds:.2f} s, not between {limits[0]:g} and {limits[1]:g} s")
            for utterance in found
            if not limits[0] <= utterance.seconds <= limits[1]
        ]
        if not splits[name]:
            raise DataError(
                f"{folder}: not one of {len(found)} utterances of {name} lasts {limits[0]:g} to {limits[1]:g} s"
            )
    return splits, skipped


def _split(
    name: str,
    utterances: list[Utterance],
    front_end: FrontEnd,
    mel: MelConfig,
    caches: tuple[FeatureCache, FeatureCache],
    skipped: list[tuple[str, str]],
    progress: Callable[[int, int], None] | None,
) -> Split:
    text, faults = [], []
    for utterance in utterances:
        try:
            text.append(np.array(front_end.encode(utterance.text, strict=True), np.int64))
        except ValueError as error:
            faults.append(f"{utterance.path}: {error}")
    if faults:
        raise DataError(f"{len(faults)} texts of {name} cannot be read:\n" + "\n".join(faults[: filelists.SHOWN]))
    shapes = caches[0].fill([utterance.path for utterance in utterances], progress=progress)
    frames = np.array([shape[1] for shape in shapes], np.int64)
    return Split(name, utterances, text, frames, *caches, mel, front_end, list(skipped) if name == "train" else [])


def split_of(data: Mapping[str, AnySplit], name: str) -> AnySplit:
    """DataError with the names there are, if `name` is not one."""
    if name not in data:
        raise DataError(f"the data has no split {name!r}, only {', '.join(data)}")
    return data[name]


def check_buckets(split: Split, text_buckets: Sequence[int], mel_buckets: Sequence[int]) -> None:
    """DataError names an utterance that is longer than the largest bucket of its kind."""
    for kind, lengths, sizes in (
        ("symbols", [len(text) for text in split.text], text_buckets),
        ("frames", split.frames.tolist(), mel_buckets),
    ):
        if sizes and max(lengths) > max(sizes):
            worst = split.utterances[int(np.argmax(lengths))]
            raise DataError(f"{worst.path}: {max(lengths)} {kind}, more than the largest bucket of {max(sizes)}")


def read_mels(split: Split, indices: np.ndarray) -> list[np.ndarray]:
    """Spectrograms (M, F) of these utterances; index -1 gives none. DataError where a file has changed."""
    empty = np.zeros((split.mel.num_mels, 0), np.float32)
    mels = [split.mels.get(split.utterances[index].path) if index >= 0 else empty for index in indices]
    for index, mel in zip(indices, mels, strict=True):
        if index >= 0 and mel.shape[1] != split.frames[index]:
            raise DataError(f"{split.utterances[index].path}: the file has changed since the data was opened")
    return mels


def pin(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """The named tuple of tensors in memory that a GPU copies from without waiting."""
    return type(batch)(*(tensor.pin_memory() for tensor in batch)) if device.type == "cuda" else batch


class UtteranceLoader(Loader):
    """Batches of text and cached spectrograms, read ahead by threads; a subclass says what `read` makes of indices."""

    def __init__(
        self,
        split: Split,
        plan: Plan,
        device: torch.device,
        text_buckets: Sequence[int] = (),
        mel_buckets: Sequence[int] = (),
        workers: int = 2,
    ) -> None:
        super().__init__(split, plan, device)
        self.text_buckets, self.mel_buckets, self.workers = sorted(text_buckets), sorted(mel_buckets), workers
        check_buckets(split, self.text_buckets, self.mel_buckets)

    def __iter__(self) -> Iterator[Any]:
        batches = ahead(self.plan.batches(self.epoch, self.start_batch), self.read, self.workers)
        return to_device(batches, self.device)

    def read(self, indices: np.ndarray) -> Any:
        """The batch of these utterances on the CPU; index -1 gives a row of one symbol 0 and no frames."""
        raise NotImplementedError
