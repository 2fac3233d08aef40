"""Random numbers that are a function of what they are for: (seed, epoch, sample index, stream).

So neither the number of workers or devices nor a resumed run changes what a sample looks like, and two back ends that
draw for the same sample draw the same. Counter-based, after SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import numpy as np

ORDER = 3  # the stream of an epoch's order; others are a task's own


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al., 2014): a bijection of 64-bit words that looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draws(seed: int, epoch: int, indices: np.ndarray | int, count: int, stream: int = 0) -> np.ndarray:
    """(N, count) float64 in [0, 1): what the samples `indices` draw in this epoch, whoever asks and in what order."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = np.zeros(1, np.uint64)
    for word in (seed, epoch, stream):
        key = _mix(key + golden + np.array([word & 0xFFFFFFFFFFFFFFFF], np.uint64))
    samples = np.atleast_1d(np.asarray(indices)).astype(np.int64).view(np.uint64)
    per_sample = _mix(_mix(samples + key) + golden)
    words = _mix(per_sample[:, None] + np.arange(1, count + 1, dtype=np.uint64)[None, :] * golden)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, count: int, stream: int = ORDER) -> np.ndarray:
    """The order of an epoch: int64, a permutation of 0..count-1."""
    first, second = (draws(seed, epoch, 0, 2, stream)[0] * 2**32).astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([first, second]))).permutation(count)
