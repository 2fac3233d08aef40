"""Batches of text, true durations and spectrograms.

    splits = add_durations(open_data("flite-speech", utterances=3000))
    loader = build_loader("train", data=splits, batch_size=32, train=True, seed=1)
    for batch in loader: ...                           # Batch on the loader's device

Every text begins with a space, which takes up the silence before the first word. Which utterances come together depends
on (seed, epoch) and the global batch size alone. B batch, T symbols, M mels, F frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlx import files, paths
from dlx.loading import DataError, Loader, Plan
from dlx.speech.batching import BucketPlan, bucket, pad
from dlx.speech.datasets import AnySplit, Split, Synthetic, UtteranceLoader, pin, read_mels, split_of
from dlx.speech.frontend import FrontEnd

from . import aligner, durations

LEAD = " "
ALIGNER_STEPS = 1000
METHODS = ("auto", "phones", "learned")


class Batch(NamedTuple):
    """Padded with 0; `durations` are frames of each symbol and add up to `mel_lengths`."""

    text: Tensor  # (B, T) int64
    text_lengths: Tensor  # (B,) int64
    durations: Tensor  # (B, T) int64
    mel: Tensor  # (B, M, F) float32
    mel_lengths: Tensor  # (B,) int64


@dataclass
class TimedSplit(Split):
    """A split of which the durations of all symbols are known."""

    durations: list[np.ndarray] = field(default_factory=list)


def lead_of(front_end: FrontEnd) -> list[int]:
    """The symbols that every text begins with; none in a table without a space."""
    symbols = front_end.symbols.symbols
    return [symbols.index(LEAD)] if LEAD in symbols else []


def add_durations(
    splits: Mapping[str, AnySplit],
    method: str = "auto",
    *,
    steps: int = ALIGNER_STEPS,
    device: str | torch.device = "cpu",
    home: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, TimedSplit | Synthetic]:
    """The splits with their texts led in and durations of every symbol.

    `method`: "phones" (times of phones that the corpus knows), "learned" (by `aligner`, in `steps`, kept below
    $DLX_HOME), "auto" (phones where all are known, else learned), or a folder with an array `<id>.npy` for each
    utterance: durations (T,), or the weights of an attention model (F, T), over the same symbols with or without lead.
    """
    real = {name: split for name, split in splits.items() if isinstance(split, Split)}
    if not real:
        return dict(splits)
    led = {name: _lead(split) for name, split in real.items()}
    if method == "auto":
        known = all(utterance.phones for split in led.values() for utterance in split.utterances)
        method = "phones" if known else "learned"
    if method == "phones":
        found = _by_phones(led)
    elif method == "learned":
        found = _learned(led, steps, device, home, progress)
    elif Path(method).is_dir():
        found = {name: [_from_file(split, index, Path(method)) for index in range(len(split))] for name, split in
                 led.items()}  # fmt: skip
    else:
        raise DataError(f"durations {method!r} is neither a folder nor one of {', '.join(METHODS)}")
    for name, split in led.items():
        for index, row in enumerate(found[name]):
            path = str(split.utterances[index].path)
            split.durations.append(durations.check(row, len(split.text[index]), int(split.frames[index]), path))
    return {**splits, **led}


def _lead(split: Split) -> TimedSplit:
    values = {item.name: getattr(split, item.name) for item in fields(Split)}
    lead = np.array(lead_of(split.front_end), np.int64)
    return TimedSplit(**values | {"text": [np.concatenate([lead, text]) for text in split.text]})


def _by_phones(splits: Mapping[str, TimedSplit]) -> dict[str, list[np.ndarray]]:
    """All splits together: how letters are spoken is no secret of a test."""
    first = next(iter(splits.values()))
    table = first.front_end.symbols.symbols
    texts = [[table[number] for number in text] for split in splits.values() for text in split.text]
    utterances = [utterance for split in splits.values() for utterance in split.utterances]
    frames = [int(count) for split in splits.values() for count in split.frames]
    rows = iter(durations.from_phones(texts, utterances, frames, first.mel))
    return {name: [next(rows) for _ in range(len(split))] for name, split in splits.items()}


def _learned(
    splits: Mapping[str, TimedSplit],
    steps: int,
    device: str | torch.device,
    home: str | Path | None,
    progress: Callable[[int, int], None] | None,
) -> dict[str, list[np.ndarray]]:
    """What the aligner says that learnt from the training split; kept by the content of all sound and text."""
    digest = hashlib.sha256(f"aligner 1 {steps}".encode())
    for name, split in splits.items():
        digest.update(name.encode() + split.mels.recipe.encode())
        for utterance, text in zip(split.utterances, split.text, strict=True):
            digest.update(split.mels.entry(utterance.path).name.encode() + text.tobytes())
    root = Path(home).absolute() if home is not None else paths.home()
    kept = root / "speech" / "durations" / f"{digest.hexdigest()[:32]}.npz"
    if not kept.is_file():
        learnt = aligner.learn(splits["train"], steps=steps, device=device, progress=progress)
        rows = {name: aligner.durations_of(learnt, split, device=device) for name, split in splits.items()}
        with files.atomic_path(kept) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, **{name: np.concatenate(found) for name, found in rows.items()})
    with np.load(kept, allow_pickle=False) as stored:
        return {
            name: np.split(stored[name], np.cumsum([len(text) for text in split.text])[:-1])
            for name, split in splits.items()
        }


def _from_file(split: TimedSplit, index: int, folder: Path) -> np.ndarray:
    path = folder / f"{split.utterances[index].id}.npy"
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from None
    symbols, frames = len(split.text[index]), int(split.frames[index])
    lead = len(lead_of(split.front_end))
    unled = found.shape[-1:] == (symbols - lead,)  # the lead then has no frame, the first symbol what comes before it
    symbols -= lead * unled
    if found.ndim == 2:
        if found.shape != (frames, symbols):
            raise DataError(f"{path}: attention of {found.shape}, expected ({frames}, {symbols}): frames and symbols")
        found = durations.from_attention(found[None], [symbols], [frames])[0]
    return np.pad(found, (lead, 0)) if unled and found.ndim == 1 else found


# Loaders


def build_loader(
    split: str,
    *,
    data: Mapping[str, TimedSplit | Synthetic],
    batch_size: int,
    train: bool,
    seed: int = 0,
    window: int = 32,
    text_buckets: Sequence[int] = (),
    mel_buckets: Sequence[int] = (),
    workers: int = 2,
    resident: bool = False,
    world_rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
) -> Loader:
    """The loader of a split on one rank; batches arrive on `device`.

    `window`: see `BucketPlan`. With buckets a batch is padded to the smallest sizes that hold it, so that few shapes
    occur; without, to its longest. `workers`: threads that read ahead. `resident`: spectrograms stay in memory.
    """
    chosen, device = split_of(data, split), torch.device(device)
    if isinstance(chosen, Synthetic):
        return SyntheticLoader(chosen, Plan(len(chosen), batch_size, train, seed, world_rank, world_size), device)
    plan = BucketPlan(len(chosen), batch_size, train, seed, world_rank, world_size, chosen.frames, window)
    return TimedLoader(chosen, plan, device, text_buckets, mel_buckets, workers, resident=resident)


class TimedLoader(UtteranceLoader):
    """Batches of text, durations and cached spectrograms."""

    def __init__(self, *args: Any, resident: bool = False) -> None:
        super().__init__(*args)
        self.resident = resident
        self.kept: dict[int, np.ndarray] = {}

    def _mels(self, indices: np.ndarray) -> list[np.ndarray]:
        if not self.resident:
            return read_mels(self.split, indices)
        missing = np.array([index for index in indices if index not in self.kept], np.int64)
        self.kept |= zip(missing.tolist(), read_mels(self.split, missing), strict=True)
        return [self.kept[index] for index in indices.tolist()]

    def read(self, indices: np.ndarray) -> Batch:
        split: TimedSplit = self.split
        nothing = np.zeros(1, np.int64)
        text = [split.text[index] if index >= 0 else nothing for index in indices]
        frames = [split.durations[index] if index >= 0 else nothing for index in indices]
        mels = self._mels(indices)
        lengths = torch.tensor([mel.shape[1] for mel in mels])
        width = bucket(max(map(len, text)), self.text_buckets)
        batch = Batch(
            pad(text, width),
            torch.tensor([len(row) for row in text]),
            pad(frames, width),
            pad(mels, bucket(max(int(lengths.max()), 1), self.mel_buckets)),
            lengths,
        )
        return pin(batch, self.device)


class SyntheticLoader(Loader):
    """The same made-up batch again and again, already on the device."""

    def __init__(self, split: Synthetic, plan: Plan, device: torch.device) -> None:
        super().__init__(split, plan, device)
        rows, symbols, frames = plan.batch_size, split.text_length, split.mel_length
        generator = torch.Generator().manual_seed(plan.seed)
        borders = torch.linspace(0, frames, symbols + 1).round().long()
        batch = Batch(
            torch.randint(1, len(split.front_end.symbols), (rows, symbols), generator=generator),
            torch.full((rows,), symbols),
            borders.diff().expand(rows, symbols).contiguous(),
            torch.randn(rows, split.mel.num_mels, frames, generator=generator) - 5,
            torch.full((rows,), frames),
        )
        self.batch = Batch(*(tensor.to(device) for tensor in batch))

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.start_batch, len(self)):
            yield self.batch
