"""Mixtures of Gaussians with diagonal covariances, one for each pdf: likelihoods, EM, splitting.

G components in all, those of a pdf next to each other; D dimensions; P pdfs; T frames.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

MIN_OCCUPANCY = 10.0  # frames that a component needs to be estimated, or it is removed
MIN_WEIGHT = 1e-5
VARIANCE_FLOOR = 0.01  # of the variance of all frames
PERTURBATION = 0.01  # of a standard deviation, by which the halves of a split component part
POWER = 0.2  # of a pdf's frames, to which its number of components is proportional


@dataclass
class Mixtures:
    """`offsets` (P + 1,): the components of pdf p are offsets[p]:offsets[p + 1]. All arrays float64."""

    offsets: np.ndarray
    weights: np.ndarray  # (G,)
    means: np.ndarray  # (G, D)
    variances: np.ndarray  # (G, D)

    def __post_init__(self) -> None:
        dim = self.means.shape[1]
        constant = np.log(np.maximum(self.weights, 1e-300)) - 0.5 * (
            dim * math.log(2 * math.pi) + np.log(self.variances).sum(1) + (self.means**2 / self.variances).sum(1)
        )
        # x -> constant + x . linear + x^2 . quadratic, one matrix product for all components
        self.constant = constant.astype(np.float32)
        self.matrix = np.concatenate([self.means / self.variances, -0.5 / self.variances], 1).astype(np.float32)

    @property
    def num_pdfs(self) -> int:
        return len(self.offsets) - 1

    @property
    def dim(self) -> int:
        return self.means.shape[1]

    @classmethod
    def single(cls, mean: np.ndarray, variance: np.ndarray, num_pdfs: int) -> Mixtures:
        """Each pdf one and the same Gaussian."""
        ones = np.ones((num_pdfs, 1))
        return cls(np.arange(num_pdfs + 1), np.ones(num_pdfs), ones * mean, ones * variance)

    def log_likelihoods(self, features: np.ndarray, pdfs: np.ndarray | None = None) -> np.ndarray:
        """(T, D) -> (T, P), or (T, len(pdfs)) for chosen pdfs; float32."""
        if pdfs is None:
            rows, counts = slice(None), np.diff(self.offsets)
        else:
            counts = self.offsets[pdfs + 1] - self.offsets[pdfs]
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
            rows = np.repeat(self.offsets[pdfs] - starts, counts) + np.arange(counts.sum())
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        scores = _both(features) @ self.matrix[rows].T + self.constant[rows]
        highest = np.maximum.reduceat(scores, starts, axis=1)
        scores -= np.repeat(highest, counts, axis=1)
        np.exp(scores, out=scores)
        return highest + np.log(np.add.reduceat(scores, starts, axis=1))

    def posteriors(self, features: np.ndarray, pdf: int) -> tuple[np.ndarray, float]:
        """(T, components) shares of each frame among the components of a pdf, and the frames' log likelihood."""
        rows = slice(self.offsets[pdf], self.offsets[pdf + 1])
        scores = _both(features) @ self.matrix[rows].T + self.constant[rows]
        highest = scores.max(1, keepdims=True)
        scores = np.exp(scores - highest)
        total = scores.sum(1, keepdims=True)
        return scores / total, float((highest + np.log(total)).sum(dtype=np.float64))

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ("offsets", "weights", "means", "variances")}


def _both(features: np.ndarray) -> np.ndarray:
    features = np.asarray(features, np.float32)
    return np.concatenate([features, features**2], 1)


@dataclass
class Accumulators:
    """Sums over frames for each component, of the frames' shares, values and squares; and the log likelihood."""

    occupancy: np.ndarray  # (G,)
    first: np.ndarray  # (G, D)
    second: np.ndarray  # (G, D)
    log_likelihood: float = 0.0
    frames: int = 0


def accumulate(mixtures: Mixtures, features: np.ndarray, pdfs: np.ndarray) -> Accumulators:
    """The E step for frames (N, D) whose pdfs (N,) are known."""
    found = Accumulators(np.zeros(len(mixtures.weights)), *(np.zeros(mixtures.means.shape) for _ in range(2)))
    order = np.argsort(pdfs, kind="stable")
    bounds = np.searchsorted(pdfs[order], np.arange(mixtures.num_pdfs + 1))
    for pdf in range(mixtures.num_pdfs):
        if bounds[pdf] == bounds[pdf + 1]:
            continue
        frames = features[order[bounds[pdf] : bounds[pdf + 1]]]
        shares, likelihood = mixtures.posteriors(frames, pdf)
        rows = slice(mixtures.offsets[pdf], mixtures.offsets[pdf + 1])
        wide, shares = frames.astype(np.float64), shares.astype(np.float64)
        found.occupancy[rows] += shares.sum(0)
        found.first[rows] += shares.T @ wide
        found.second[rows] += shares.T @ (wide * wide)
        found.log_likelihood += likelihood
        found.frames += len(frames)
    return found


def update(mixtures: Mixtures, sums: Accumulators, floor: np.ndarray) -> Mixtures:
    """The M step. Components with too few frames are removed, but never the last one of a pdf, which stays as it was.

    `floor` (D,): variances are at least that.
    """
    keep = sums.occupancy >= MIN_OCCUPANCY
    for pdf in range(mixtures.num_pdfs):
        rows = slice(mixtures.offsets[pdf], mixtures.offsets[pdf + 1])
        if not keep[rows].any():
            keep[mixtures.offsets[pdf] + int(sums.occupancy[rows].argmax())] = True
    count = np.maximum(sums.occupancy, 1e-10)[:, None]
    known = (sums.occupancy >= MIN_OCCUPANCY)[:, None]
    means = np.where(known, sums.first / count, mixtures.means)
    variances = np.where(known, np.maximum(sums.second / count - means**2, floor), mixtures.variances)
    pdf_of = np.repeat(np.arange(mixtures.num_pdfs), np.diff(mixtures.offsets))[keep]
    weights = np.maximum(sums.occupancy[keep], 1e-10)
    weights = np.maximum(weights / np.bincount(pdf_of, weights, mixtures.num_pdfs)[pdf_of], MIN_WEIGHT)
    weights /= np.bincount(pdf_of, weights, mixtures.num_pdfs)[pdf_of]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pdf_of, minlength=mixtures.num_pdfs))])
    return Mixtures(offsets, weights, means[keep], variances[keep])


def split(mixtures: Mixtures, occupancy: np.ndarray, total: int, rng: np.random.Generator) -> Mixtures:
    """Split components until there are about `total`; `occupancy` (P,) frames of each pdf.

    A pdf gets components in proportion to frames ** POWER, but no more than its frames allow; its heaviest is split
    each time, into two that lie a little apart.
    """
    counts = np.diff(mixtures.offsets).copy()
    most = np.maximum(occupancy / MIN_OCCUPANCY, 1).astype(int)
    heap = [(-(max(occupancy[p], 1e-3) ** POWER) / counts[p], p) for p in range(mixtures.num_pdfs)]
    heapq.heapify(heap)
    while counts.sum() < total and heap:
        _, pdf = heapq.heappop(heap)
        if counts[pdf] < most[pdf]:
            counts[pdf] += 1
            heapq.heappush(heap, (-(occupancy[pdf] ** POWER) / counts[pdf], pdf))
    weights, means, variances = [], [], []
    for pdf in range(mixtures.num_pdfs):
        rows = slice(mixtures.offsets[pdf], mixtures.offsets[pdf + 1])
        own = list(mixtures.weights[rows])
        centres, spreads = list(mixtures.means[rows]), list(mixtures.variances[rows])
        while len(own) < counts[pdf]:
            heaviest = int(np.argmax(own))
            own[heaviest] /= 2
            shift = PERTURBATION * np.sqrt(spreads[heaviest]) * rng.standard_normal(mixtures.dim)
            own.append(own[heaviest])
            centres.append(centres[heaviest] + shift)
            spreads.append(spreads[heaviest])
            centres[heaviest] = centres[heaviest] - shift
        weights += own
        means += centres
        variances += spreads
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Mixtures(offsets, np.array(weights), np.stack(means), np.stack(variances))
