"""Copies of recordings that sound different: speed, noise and volume (Ko et al., "Audio augmentation", 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlx import draws
from dlx.speech import audio

STREAM = 51  # of the draws
SPEEDS = (0.9, 1.0, 1.1)


@dataclass(frozen=True)
class Change:
    """What a copy differs in. `speed` 1.1 is a tenth shorter and higher; `noise` is in dB below the speech."""

    speed: float = 1.0
    noise: float | None = None
    gain: float = 0.0  # dB
    colour: float = 0.0  # of the noise: its power falls with this power of the frequency


def change_speed(wave: np.ndarray, speed: float) -> np.ndarray:
    """Resample so that duration is divided and pitch multiplied by `speed` (0.5 to 2): (T,) -> (about T / speed,)."""
    if not 0.5 <= speed <= 2:
        raise ValueError(f"speed {speed} is not between 0.5 and 2")
    base = 8000
    return wave if speed == 1 else audio.resample(wave, round(base * speed), base)


def add_noise(wave: np.ndarray, below: float, rng: np.random.Generator, colour: float = 0.0) -> np.ndarray:
    """Add Gaussian noise `below` dB under the root mean square of the speech; `colour` 0 is white, 1 pink, 2 brown.

    Silence stays silence: there is no level to be below of.
    """
    white = rng.standard_normal(len(wave))
    if colour:
        spectrum = np.fft.rfft(white)
        spectrum[1:] *= np.arange(1, len(spectrum)) ** (-colour / 2)
        spectrum[0] = 0
        white = np.fft.irfft(spectrum, len(wave))
    level = np.sqrt(np.mean(np.square(wave, dtype=np.float64)))
    white *= level * 10 ** (-below / 20) / max(np.sqrt(np.mean(white**2)), 1e-20)
    return (wave + white).astype(np.float32)


def apply(wave: np.ndarray, change: Change, rng: np.random.Generator) -> np.ndarray:
    """The changed copy: speed, then noise, then volume, which never clips."""
    wave = change_speed(wave, change.speed)
    if change.noise is not None:
        wave = add_noise(wave, change.noise, rng, change.colour)
    gain = 10 ** (change.gain / 20)
    peak = float(np.abs(wave).max()) * gain
    return (wave * (gain if peak < 0.99 else gain * 0.99 / peak)).astype(np.float32)


def draw(seed: int, index: int, copy: int, speeds: tuple[float, ...] = SPEEDS) -> tuple[Change, np.random.Generator]:
    """The change of copy number `copy` of utterance `index`, and the generator of its noise; a function of the seed."""
    values = draws.draws(seed, copy, index, 5, STREAM)[0]
    speed = speeds[(copy + index) % len(speeds)]
    change = Change(speed, 15 + 25 * values[0], -9 + 12 * values[1], (0.0, 1.0, 2.0)[int(values[2] * 3)])
    return change, np.random.Generator(np.random.Philox(key=np.uint64(values[3] * 2**53)))
