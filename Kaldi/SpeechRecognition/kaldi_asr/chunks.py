"""Pieces of utterances with their frames' pdfs, for training the network: an epoch shows every frame about once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlx import draws

STREAM = 54  # of the draws that move the pieces' borders


class Chunk(NamedTuple):
    """features (B, T + 2 context, D) float32, pdfs (B, T) int64, -1 where there is no frame."""

    features: Tensor
    pdfs: Tensor


class Chunks:
    """All utterances in memory, cut anew in each epoch at places that (seed, epoch) decide; an `EpochLoader` of dlx."""

    def __init__(
        self,
        items: Sequence[np.ndarray],
        pdfs: Sequence[np.ndarray],
        *,
        size: int,
        context: int,
        batch_size: int,
        seed: int,
        train: bool,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(items) != len(pdfs) or any(len(a) != len(b) for a, b in zip(items, pdfs, strict=True)):
            raise ValueError("every frame of training needs a pdf")
        if not items:
            raise ValueError("there is no utterance to train on")
        self.size, self.context, self.batch_size = size, context, batch_size
        self.seed, self.train, self.device = seed, train, torch.device(device)
        self.rank, self.world_size = rank, world_size
        # One array for all: utterances with their first and last frames repeated, so that no piece crosses a border.
        padded = [np.pad(item, ((context, context + size), (0, 0)), "edge") for item in items]
        self.features = torch.from_numpy(np.concatenate(padded).astype(np.float32))
        labels = [np.pad(p.astype(np.int64), (0, 2 * context + size), constant_values=-1) for p in pdfs]
        self.labels = torch.from_numpy(np.concatenate(labels))
        self.starts = np.concatenate([[0], np.cumsum([len(item) for item in padded])[:-1]])
        self.lengths = np.array([len(item) for item in items])
        self.num_samples = int(sum(-(-length // size) for length in self.lengths))
        self.skipped: list = []
        self.epoch, self.first = 0, 0

    def __len__(self) -> int:
        share = self.num_samples // self.world_size if self.train else self.num_samples
        return share // self.batch_size if self.train and share >= self.batch_size else -(-share // self.batch_size)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        self.epoch, self.first = epoch, start_batch

    def places(self) -> np.ndarray:
        """Where the pieces of this epoch begin in the one array, in their order."""
        shift = np.zeros(len(self.lengths))
        if self.train:
            shift = draws.draws(self.seed, self.epoch, np.arange(len(self.lengths)), 1, STREAM)[:, 0]
        found = []
        for start, length, move in zip(self.starts, self.lengths, shift, strict=True):
            count = -(-length // self.size)
            spare = max(length - self.size, 0)
            # Spread evenly, and moved together by less than their distance, so that borders differ from time to time.
            steps = np.arange(count) * self.size + int(move * self.size) - (self.size // 2 if self.train else 0)
            found.append(start + (np.clip(steps, 0, spare) if self.train else steps))
        places = np.concatenate(found)
        return places[draws.permutation(self.seed, self.epoch, len(places))] if self.train else places

    def __iter__(self) -> Iterator[Chunk]:
        places = self.places()
        if self.train:
            places = places[self.rank :: self.world_size]
        wide = torch.arange(self.size + 2 * self.context)
        for number in range(self.first, len(self)):
            rows = torch.from_numpy(places[number * self.batch_size : (number + 1) * self.batch_size])
            features = self.features[rows[:, None] + wide]
            # The label of a frame stands at the place of its context's first frame.
            labels = self.labels[rows[:, None] + wide[: self.size]]
            yield Chunk(features.to(self.device), labels.to(self.device))

    def close(self) -> None:
        """Nothing is held open."""
