"""Pillow's back end: decodes, cuts, scales, changes colours and flips, in worker processes.

Legend: N samples, M boxes a sample, S side of the input.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from dlx.draws import draws
from dlx.inputs import IMAGENET_MEAN
from dlx.loading import DataError

from . import geometry, photometric
from .splits import Split

GEOMETRY, PHOTOMETRIC = 0, 1  # independent streams of draws of one sample
FILL = tuple(round(255 * value) for value in IMAGENET_MEAN)  # around a picture that was zoomed out


class Batch(NamedTuple):
    """Of training: uint8 N 3 S S (channels_last); float32 N M 4, shares of the input; int64 N M, 0: no object."""

    images: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor


class EvalBatch(NamedTuple):
    """Of evaluation: uint8 N 3 S S (channels_last); int64 N, the picture's row in the split, -1: filled up."""

    images: torch.Tensor
    index: torch.Tensor


class Samples(NamedTuple):
    """What is done to N pictures and where their objects come to lie; M is the split's most."""

    cuts: geometry.Cuts
    changes: np.ndarray | None  # (N, 4): see photometric.factors
    boxes: np.ndarray
    labels: np.ndarray


def training_samples(split: Split, epoch: int, rows: np.ndarray, seed: int, size: int, augmentation: str) -> Samples:
    """The samples `rows` of an epoch: a function of (seed, epoch, row) alone, for both back ends."""
    boxes, labels = split.objects(rows)
    values = draws(seed, epoch, rows, geometry.DRAWS, GEOMETRY)
    present = labels > 0
    cuts = geometry.cuts(split.annotations.sizes[rows], boxes, present, values, size, augmentation)
    moved, kept = geometry.move_boxes(boxes, present, cuts)
    order = np.argsort(~kept, axis=1, kind="stable")  # objects first, unused places last
    padding = split.most - boxes.shape[1]
    moved = np.pad(np.take_along_axis(moved, order[..., None], 1), ((0, 0), (0, padding), (0, 0)))
    labels = np.pad(np.take_along_axis(labels * kept, order, 1), ((0, 0), (0, padding)))
    changes = None
    if augmentation in ("crop", "ssd"):
        changes = photometric.factors(draws(seed, epoch, rows, photometric.DRAWS, PHOTOMETRIC))
    return Samples(cuts, changes, moved, labels)


def render(image: Image.Image, cuts: geometry.Cuts, row: int, change: np.ndarray | None = None) -> np.ndarray:
    """uint8 (S, S, 3) of an RGB picture, by row `row` of `cuts`."""
    left, top, width, height = cuts.sources[row].tolist()
    across, down, columns, lines = cuts.targets[row].tolist()
    # Cropped first: Pillow's filter would look at pixels around the box, which DALI does not decode.
    part = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(part.resize((columns, lines), Image.Resampling.BILINEAR))
    if change is not None:
        pixels = photometric.distort(pixels, change)
    if (columns, lines) != (cuts.size, cuts.size):
        filled = np.empty((cuts.size, cuts.size, 3), np.uint8)
        filled[:] = FILL
        filled[down : down + lines, across : across + columns] = pixels
        pixels = filled
    return pixels[:, ::-1] if cuts.flips[row] else pixels


class PictureDataset(torch.utils.data.Dataset):
    """Gives ((images N S S 3, ...), [(path, reason), ...]) for lists of (epoch, row); see `loading.WorkerLoader`.

    A file that cannot be read is an error unless `tolerant`: then a training sample is replaced by the next readable
    one, and an evaluation sample has index -1.
    """

    def __init__(self, split: Split, *, train: bool, size: int, augmentation: str, seed: int, tolerant: bool) -> None:
        self.split, self.train, self.size = split, train, size
        self.augmentation, self.seed, self.tolerant = augmentation, seed, tolerant

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, batch: list[tuple[int, int]]) -> tuple[Batch | EvalBatch, list[tuple[str, str]]] | DataError:
        rows = np.array([row for _, row in batch], np.int64)
        try:
            return self.training(batch[0][0], rows) if self.train else self.evaluation(rows)
        except DataError as error:
            return error

    def training(self, epoch: int, rows: np.ndarray) -> tuple[Batch, list[tuple[str, str]]]:
        """Raises DataError."""
        samples = self._samples(epoch, rows)
        boxes, labels = samples.boxes, samples.labels
        images = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        faults: list[tuple[str, str]] = []
        for place, row in enumerate(rows.tolist()):
            made = self._rendered(samples, place, row, faults)
            following = row
            while made is None:
                following = (following + 1) % len(self.split)
                if following == row:
                    raise DataError(f"not one of the {len(self.split)} pictures can be read; {faults[0][1]}")
                other = self._samples(epoch, np.array([following]))
                boxes[place], labels[place] = other.boxes[0], other.labels[0]
                made = self._rendered(other, 0, following, faults)
            images[place] = made
        return Batch(*map(torch.from_numpy, (images, boxes, labels))), faults

    def _samples(self, epoch: int, rows: np.ndarray) -> Samples:
        return training_samples(self.split, epoch, rows, self.seed, self.size, self.augmentation)

    def _rendered(self, samples: Samples, place: int, row: int, faults: list[tuple[str, str]]) -> np.ndarray | None:
        image = self._decoded(row, faults)
        change = None if samples.changes is None else samples.changes[place]
        return None if image is None else render(image, samples.cuts, place, change)

    def _decoded(self, row: int, faults: list[tuple[str, str]]) -> Image.Image | None:
        """None, with an entry in `faults`, for an unreadable file in tolerant mode."""
        try:
            return self.split.annotations.decode(row)
        except ValueError as error:
            if not self.tolerant:
                raise DataError(str(error)) from None
            faults.append((self.split.annotations.picture_path(row), str(error)))
            return None

    def evaluation(self, rows: np.ndarray) -> tuple[EvalBatch, list[tuple[str, str]]]:
        """Raises DataError."""
        images = np.zeros((len(rows), self.size, self.size, 3), np.uint8)
        index = rows.copy()
        faults: list[tuple[str, str]] = []
        cuts = geometry.whole(self.split.annotations.sizes[np.maximum(rows, 0)], self.size)
        for place, row in enumerate(rows.tolist()):
            image = self._decoded(row, faults) if row >= 0 else None
            if image is None:
                index[place] = -1
            else:
                images[place] = render(image, cuts, place)
        return EvalBatch(torch.from_numpy(images), torch.from_numpy(index)), faults
