"""Batches of text and spectrograms for Tacotron 2, and of pieces of sound for WaveGlow.

    splits = open_data("flite-speech", utterances=3000)
    loader = build_loader("train", data=splits, batch_size=32, train=True, seed=1)
    loader.set_epoch(3, start_batch=10)                # resume in the middle of epoch 3
    for batch in loader: ...                           # TextMelBatch on the loader's device

Which utterances come together depends only on (seed, epoch) and the global batch size; the ragged tail of a training
epoch is dropped. In evaluation every utterance comes exactly once over all ranks; missing rows have mel length 0.
B batch, T symbols, M mels, F frames, S samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlx import draws
from dlx.loading import DataError, Loader, Plan, to_device
from dlx.speech import audio, corpora, filelists
from dlx.speech.batching import BucketPlan, ahead, bucket, pad
from dlx.speech.corpora import Utterance
from dlx.speech.feature_cache import FeatureCache, mel_cache, sound_cache
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig

SEGMENTS = 45  # stream of the draws that place pieces of sound
KINDS = ("text-mel", "audio")


class TextMelBatch(NamedTuple):
    """Padded with 0. `gate` is 1 from an utterance's last frame on, through the padding."""

    text: Tensor  # (B, T) int64
    text_lengths: Tensor  # (B,) int64
    mel: Tensor  # (B, M, F) float32
    mel_lengths: Tensor  # (B,) int64
    gate: Tensor  # (B, F) float32


class AudioBatch(NamedTuple):
    """Pieces of utterances; those shorter than a piece end in silence."""

    audio: Tensor  # (B, S) float32 in -1..1
    lengths: Tensor  # (B,) int64


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


# Loaders


def build_loader(
    split: str,
    *,
    data: Mapping[str, AnySplit],
    batch_size: int,
    train: bool,
    kind: str = "text-mel",
    seed: int = 0,
    epoch: int = 0,
    start_batch: int = 0,
    window: int = 32,
    text_buckets: Sequence[int] = (),
    mel_buckets: Sequence[int] = (),
    segment: int = 8000,
    workers: int = 2,
    world_rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
) -> Loader:
    """The loader of a split of `data` (see `open_data`) on one rank; batches arrive on `device`.

    `kind`: "text-mel" (TextMelBatch) or "audio" (AudioBatch of `segment` samples). `window`: see `BucketPlan`. With
    buckets a batch is padded to the smallest sizes that hold it, so that few shapes occur; without, to its longest.
    `workers`: threads that read ahead.
    """
    if kind not in KINDS:
        raise ValueError(f"loader kind {kind!r} is none of {', '.join(KINDS)}")
    chosen, device = split_of(data, split), torch.device(device)
    plan = Plan(len(chosen), batch_size, train, seed, world_rank, world_size)
    loader: Loader
    if isinstance(chosen, Synthetic):
        loader = SyntheticLoader(chosen, plan, device, kind, segment)
    elif kind == "audio":
        loader = AudioLoader(chosen, plan, device, segment, workers)
    else:
        plan = BucketPlan(len(chosen), batch_size, train, seed, world_rank, world_size, chosen.frames, window)
        loader = TextMelLoader(chosen, plan, device, tuple(text_buckets), tuple(mel_buckets), workers)
    loader.set_epoch(epoch, start_batch)
    return loader


class TextMelLoader(Loader):
    """Batches of text and cached spectrograms."""

    def __init__(
        self,
        split: Split,
        plan: Plan,
        device: torch.device,
        text_buckets: tuple[int, ...],
        mel_buckets: tuple[int, ...],
        workers: int,
    ) -> None:
        super().__init__(split, plan, device)
        self.text_buckets, self.mel_buckets, self.workers = sorted(text_buckets), sorted(mel_buckets), workers
        for kind, lengths, sizes in (
            ("symbols", [len(text) for text in split.text], self.text_buckets),
            ("frames", split.frames.tolist(), self.mel_buckets),
        ):
            if sizes and max(lengths) > sizes[-1]:
                worst = split.utterances[int(np.argmax(lengths))]
                raise DataError(f"{worst.path}: {max(lengths)} {kind}, more than the largest bucket of {sizes[-1]}")

    def __iter__(self) -> Iterator[TextMelBatch]:
        batches = ahead(self.plan.batches(self.epoch, self.start_batch), self.read, self.workers)
        return to_device(batches, self.device)

    def read(self, indices: np.ndarray) -> TextMelBatch:
        """The batch of these utterances on the CPU; index -1 gives a row of one symbol 0 and no frames."""
        split: Split = self.split
        empty = np.zeros((split.mel.num_mels, 0), np.float32)
        text = [split.text[index] if index >= 0 else np.zeros(1, np.int64) for index in indices]
        mels = [split.mels.get(split.utterances[index].path) if index >= 0 else empty for index in indices]
        for index, mel in zip(indices, mels, strict=True):
            if index >= 0 and mel.shape[1] != split.frames[index]:
                raise DataError(f"{split.utterances[index].path}: the file has changed since the data was opened")
        lengths = np.array([mel.shape[1] for mel in mels], np.int64)
        width = bucket(max(int(lengths.max()), 1), self.mel_buckets)
        gate = np.arange(width) >= lengths[:, None] - 1
        found = TextMelBatch(
            pad(text, bucket(max(map(len, text)), self.text_buckets), 0),
            torch.tensor([len(row) for row in text]),
            pad(mels, width),
            torch.from_numpy(lengths),
            torch.from_numpy(gate.astype(np.float32)),
        )
        return _pin(found, self.device)


class AudioLoader(Loader):
    """Pieces of `segment` samples, one of each utterance; where it begins is drawn for the epoch.

    In evaluation pieces are the same in every epoch.
    """

    def __init__(self, split: Split, plan: Plan, device: torch.device, segment: int, workers: int) -> None:
        super().__init__(split, plan, device)
        if segment < 1:
            raise ValueError(f"segment must be at least one sample, got {segment}")
        self.segment, self.workers = segment, workers

    def __iter__(self) -> Iterator[AudioBatch]:
        epoch = self.epoch if self.plan.train else 0
        jobs = ((epoch, indices) for indices in self.plan.batches(self.epoch, self.start_batch))
        return to_device(ahead(jobs, self.read, self.workers), self.device)

    def read(self, job: tuple[int, np.ndarray]) -> AudioBatch:
        """The batch of (epoch, utterances) on the CPU; index -1 gives silence of length 0."""
        epoch, indices = job
        split: Split = self.split
        chances = draws.draws(self.plan.seed, epoch, indices, 1, SEGMENTS)[:, 0]
        pieces = []
        for index, chance in zip(indices, chances, strict=True):
            sound = split.sounds.get(split.utterances[index].path) if index >= 0 else np.zeros(0, np.int16)
            start = int(chance * (max(len(sound) - self.segment, 0) + 1))
            pieces.append(sound[start : start + self.segment].astype(np.float32) / 32767)
        found = AudioBatch(pad(pieces, self.segment), torch.tensor([len(piece) for piece in pieces]))
        return _pin(found, self.device)


class SyntheticLoader(Loader):
    """The same made-up batch again and again, already on the device."""

    def __init__(self, split: Synthetic, plan: Plan, device: torch.device, kind: str, segment: int) -> None:
        super().__init__(split, plan, device)
        generator = torch.Generator().manual_seed(plan.seed)
        rows = plan.batch_size
        if kind == "audio":
            sound = 0.1 * torch.randn(rows, segment, generator=generator)
            batch: TextMelBatch | AudioBatch = AudioBatch(sound.clamp(-1, 1), torch.full((rows,), segment))
        else:
            letters = (1, len(split.front_end.symbols))
            gate = torch.zeros(rows, split.mel_length)
            gate[:, -1] = 1
            batch = TextMelBatch(
                torch.randint(*letters, (rows, split.text_length), generator=generator),
                torch.full((rows,), split.text_length),
                torch.randn(rows, split.mel.num_mels, split.mel_length, generator=generator) - 5,
                torch.full((rows,), split.mel_length),
                gate,
            )
        self.batch = type(batch)(*(tensor.to(device) for tensor in batch))

    def __iter__(self) -> Iterator[TextMelBatch | AudioBatch]:
        for _ in range(self.start_batch, len(self)):
            yield self.batch


def _pin(batch: TextMelBatch | AudioBatch, device: torch.device) -> TextMelBatch | AudioBatch:
    return type(batch)(*(tensor.pin_memory() for tensor in batch)) if device.type == "cuda" else batch


def sound_of(split: Split, index: int) -> np.ndarray:
    """The whole utterance, float32 (S,) at the spectrogram's rate: for reports."""
    return audio.read(split.utterances[index].path, split.mel.sample_rate)[0]
