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

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlx import draws
from dlx.loading import Loader, Plan, to_device
from dlx.speech.batching import BucketPlan, ahead, bucket, pad
from dlx.speech.datasets import AnySplit, Split, Synthetic, UtteranceLoader, open_data, pin, read_mels, split_of

SEGMENTS = 45  # stream of the draws that place pieces of sound
KINDS = ("text-mel", "audio")
__all__ = ["AnySplit", "AudioBatch", "Split", "Synthetic", "TextMelBatch", "build_loader", "open_data", "split_of"]


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


class TextMelLoader(UtteranceLoader):
    """Batches of text and cached spectrograms."""

    def read(self, indices: np.ndarray) -> TextMelBatch:
        """The batch of these utterances on the CPU; index -1 gives a row of one symbol 0 and no frames."""
        split: Split = self.split
        text = [split.text[index] if index >= 0 else np.zeros(1, np.int64) for index in indices]
        mels = read_mels(split, indices)
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
        return pin(found, self.device)


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
        return pin(found, self.device)


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
