"""Decoder of ITU-T G.722, 64 kbit/s: what telephones call wideband, 16 kHz from 8,000 bytes a second.

The codec parts the sound into two bands of 8 kHz, each coded by adaptive differential PCM: six bits of every byte for
the lower band, two for the upper. A sample depends on the one before, so `decode` takes many recordings and decodes
them side by side, as columns of arrays. Section numbers are of the recommendation (09/2012).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Table 14/15: inverse quantisers' levels, with 6 bits, 4 bits (for the lower predictor) and 2 bits (upper band).
_LEVELS_6 = (
    -136, -136, -136, -136, -24808, -21904, -19008, -16704, -14984, -13512, -12280, -11192, -10232, -9360, -8576, -7856,
    -7192, -6576, -6000, -5456, -4944, -4464, -4008, -3576, -3168, -2776, -2400, -2032, -1688, -1360, -1040, -728,
    24808, 21904, 19008, 16704, 14984, 13512, 12280, 11192, 10232, 9360, 8576, 7856, 7192, 6576, 6000, 5456, 4944, 4464,
    4008, 3576, 3168, 2776, 2400, 2032, 1688, 1360, 1040, 728, 432, 136, -432, -136,
)  # fmt: skip
_LEVELS_4 = (
    0, -20456, -12896, -8968, -6288, -4240, -2584, -1200, 20456, 12896, 8968, 6288, 4240, 2584, 1200, 0,
)  # fmt: skip
_LEVELS_2 = (-7408, -1616, 7408, 1616)
# Logarithmic scale factors: steps by code, and the table of 2 ** (n / 32).
_STEPS_LOW = (-60, 3042, 1198, 538, 334, 172, 58, -30, 3042, 1198, 538, 334, 172, 58, -30, -60)
_STEPS_HIGH = (798, -214, 798, -214)
_POWERS = tuple(round(2048 * 2 ** (n / 32)) for n in range(32))
# Every second of the 24 taps of the quadrature mirror filter; those between are the same from the end.
_QMF = (3, -11, 12, 32, -210, 951, 3876, -805, 362, -156, 53, -11)


class _Predictor:
    """The adaptive predictors of both bands (section 6.2) for N recordings; every array ends in (2 bands, N)."""

    def __init__(self, count: int) -> None:
        self.zeros = np.zeros((6, 2, count), np.int64)  # b1..b6
        self.differences = np.zeros((7, 2, count), np.int64)  # d0..d6
        self.poles = np.zeros((2, 2, count), np.int64)  # a1, a2
        self.signals = np.zeros((2, 2, count), np.int64)  # r1, r2
        self.partial = np.zeros((3, 2, count), np.int64)  # p0..p2
        self.zero_part = np.zeros((2, count), np.int64)
        self.estimate = np.zeros((2, count), np.int64)

    def update(self, difference: np.ndarray) -> None:
        """Take in the quantised differences (2, N) of a step; `estimate` is then of the next."""
        self.signals[1] = self.signals[0]
        self.signals[0] = _saturate(self.estimate + difference)
        self.partial[1:] = self.partial[:2].copy()
        self.partial[0] = _saturate(self.zero_part + difference)
        self.differences[0] = difference
        sign = self.partial < 0
        flat, steep = sign[0] == sign[1], sign[0] == sign[2]
        # The poles: blocks UPPOL2 and UPPOL1.
        lead = _saturate(self.poles[0] << 2)
        lead = np.minimum(np.where(flat, -lead, lead), 32767)
        second = (lead >> 7) + np.where(steep, 128, -128) + (self.poles[1] * 32512 >> 15)
        second = np.minimum(np.maximum(second, -12288), 12288)
        limit = 15360 - second
        first = np.where(flat, 192, -192) + (self.poles[0] * 32640 >> 15)
        first = np.minimum(np.maximum(first, -limit), limit)
        self.poles[0], self.poles[1] = first, second
        # The zeros: block UPZERO.
        gain = np.where(difference == 0, 0, 128)
        same = (difference < 0) == (self.differences[1:] < 0)
        self.zeros = _saturate(np.where(same, gain, -gain) + (self.zeros * 32640 >> 15))
        self.differences[1:] = self.differences[:-1].copy()
        pole_part = (self.poles * _saturate(2 * self.signals) >> 15).sum(0)
        self.zero_part = _saturate((self.zeros * _saturate(2 * self.differences[1:]) >> 15).sum(0))
        self.estimate = _saturate(_saturate(pole_part) + self.zero_part)


def _saturate(values: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(values, -32768), 32767)


def decode(recordings: Sequence[bytes]) -> list[np.ndarray]:
    """Each recording as float32 (2 samples a byte,) in -1..1 at 16 kHz. Those of like length together are fastest."""
    count, lengths = len(recordings), [len(recording) for recording in recordings]
    codes = np.zeros((max(lengths, default=0), count), np.int64)
    for column, recording in enumerate(recordings):
        codes[: lengths[column], column] = np.frombuffer(recording, np.uint8)
    fine_levels, low_levels, high_levels = (
        np.array(table, np.int64) for table in (_LEVELS_6, _LEVELS_4, _LEVELS_2)
    )  # fmt: skip
    inner, upper = codes & 63, codes >> 6
    fine = fine_levels[inner]
    levels = np.stack([low_levels[inner >> 2], high_levels[upper]], 1)  # (steps, 2, N)
    changes = np.stack([np.array(_STEPS_LOW)[inner >> 2], np.array(_STEPS_HIGH)[upper]], 1)
    highest, shift = np.array([[18432], [22528]]), np.array([[8], [10]])
    powers = np.array(_POWERS)
    predictor = _Predictor(count)
    log_scale = np.zeros((2, count), np.int64)
    scale = np.repeat([[32], [8]], count, 1)
    bands = np.zeros((len(codes), 2, count), np.int16)
    for step in range(len(codes)):
        differences = scale * levels[step] >> 15
        output = predictor.estimate + differences
        output[0] = predictor.estimate[0] + (scale[0] * fine[step] >> 15)  # all six bits are heard, four are predicted
        bands[step] = np.minimum(np.maximum(output, -16384), 16383)
        log_scale = np.minimum(np.maximum((log_scale * 127 >> 7) + changes[step], 0), highest)
        exponent = shift - (log_scale >> 11)  # -1 or more
        scale = powers[log_scale >> 6 & 31] << 1 >> exponent + 1 << 2
        predictor.update(differences)
    return [_join(*bands[: lengths[column], :, column].T.astype(np.float64)) for column in range(count)]


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The receive filter (section 4.4): two bands at 8 kHz into a waveform at 16 kHz."""
    if not len(low):
        return np.zeros(0, np.float32)
    taps = np.array(_QMF, np.float64)
    even = np.convolve(low - high, taps)[: len(low)]
    odd = np.convolve(low + high, taps[::-1])[: len(low)]
    samples = np.stack([even, odd], 1).reshape(-1) / 2**11
    return (np.clip(samples, -32768, 32767) / 32768).astype(np.float32)
