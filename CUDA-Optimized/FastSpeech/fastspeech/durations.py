"""True durations of symbols, in frames: from exact times of phones, from attention, or along the best alignment.

T symbols, F frames, B batch. Durations of an utterance add up to its frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlx.loading import DataError
from dlx.speech.corpora import Utterance
from dlx.speech.mel import MelConfig

from .letters import Spelling

FLOOR = 1e-8  # of attention, before its logarithm
NEVER = -np.inf


def from_phones(
    texts: Sequence[Sequence[str]], utterances: Sequence[Utterance], frames: Sequence[int], mel: MelConfig
) -> list[np.ndarray]:
    """Frames of every symbol of `texts`, int64 (T,), by the phones' times of their utterances.

    `letters.Spelling` finds which symbol speaks which phones; one that speaks none lasts 0 frames. What a spectrogram
    has beyond the last phone belongs to the last symbol. DataError names an utterance without phones.
    """
    lacking = [utterance.path for utterance in utterances if not utterance.phones]
    if lacking:
        raise DataError(f"{lacking[0]}: the times of its phones are not known ({len(lacking)} such utterances)")
    phones = [[name for name, _ in utterance.phones] for utterance in utterances]
    try:
        spoken = Spelling(texts, phones).align(texts, phones)
    except ValueError as error:
        raise DataError(str(error)) from None
    found = []
    for counts, utterance, total in zip(spoken, utterances, frames, strict=True):
        ends = np.array([0.0, *(end for _, end in utterance.phones)]) * mel.sample_rate / mel.hop_length
        borders = np.minimum(np.floor(ends + 0.5).astype(np.int64)[np.cumsum(counts)], total)
        borders[-1] = total
        found.append(np.diff(borders, prepend=0))
    return found


def monotonic_durations(scores: np.ndarray) -> np.ndarray:
    """Frames of each symbol, int64 (T,), along the path through scores (F, T) with the largest sum.

    A path begins at the first symbol, ends at the last, and stays or takes one step with each frame, so that every
    symbol has a frame (Kim et al. 2020, "Glow-TTS", algorithm 1). ValueError with fewer frames than symbols.
    """
    frames, symbols = scores.shape
    if frames < symbols:
        raise ValueError(f"{frames} frames are too few for {symbols} symbols: each needs one")
    best = np.full(symbols, NEVER)
    best[0] = scores[0, 0]
    stepped = np.zeros((frames, symbols), bool)
    for frame in range(1, frames):
        before = np.concatenate([[NEVER], best[:-1]])
        stepped[frame] = before > best
        best = np.maximum(before, best) + scores[frame]
    durations = np.zeros(symbols, np.int64)
    symbol = symbols - 1
    for frame in reversed(range(frames)):
        durations[symbol] += 1
        symbol -= stepped[frame, symbol]
    return durations


def from_attention(attention: np.ndarray, text_lengths: Sequence[int], mel_lengths: Sequence[int]) -> list[np.ndarray]:
    """Durations by an attention model's weights (B, F, T), of each item: the monotonic path along the largest.

    ValueError for weights that are not finite or negative, and as in `monotonic_durations`.
    """
    if attention.ndim != 3:
        raise ValueError(f"expected attention (B, F, T), got the shape {attention.shape}")
    found = []
    for row, (symbols, frames) in enumerate(zip(text_lengths, mel_lengths, strict=True)):
        weights = np.asarray(attention[row, :frames, :symbols], np.float64)
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(f"the attention of item {row} holds values that are no weights")
        found.append(monotonic_durations(np.log(weights + FLOOR)))
    return found


def check(durations: np.ndarray, symbols: int, frames: int, name: str) -> np.ndarray:
    """The durations as int64 (T,); DataError where they do not fit the text or the spectrogram of `name`."""
    durations = np.asarray(durations)
    whole = durations.ndim == 1 and np.issubdtype(durations.dtype, np.integer) and (durations >= 0).all()
    if not whole:
        raise DataError(f"{name}: durations are whole numbers of frames, one for each symbol")
    if len(durations) != symbols:
        raise DataError(f"{name}: {len(durations)} durations of {symbols} symbols")
    if durations.sum() != frames:
        raise DataError(f"{name}: durations of {durations.sum()} frames, the spectrogram has {frames}")
    return durations.astype(np.int64)
