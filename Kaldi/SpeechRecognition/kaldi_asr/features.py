"""Features by kaldi-native-fbank, as Kaldi computes them: MFCC or log mel energies, normalised, with their context.

Frames of 25 ms every 10 ms; waveforms are scaled to 16-bit integers before, as Kaldi's are, so that models of either
can be used by the other. There is no dither: the same sound has the same features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import kaldi_native_fbank as knf
import numpy as np

from . import datadir

SCALE = 32768.0
FRAME_SHIFT = 0.01  # seconds


@dataclass(frozen=True)
class FeatureConfig:
    """`mfcc` with num_ceps coefficients of num_mels bands, or `fbank` with num_mels; frequencies in Hz."""

    kind: Literal["mfcc", "fbank"] = "mfcc"
    num_mels: int = 23
    num_ceps: int = 13
    low_freq: float = 20.0
    high_freq: float = 0.0  # 0 and below: relative to the Nyquist frequency
    sample_rate: int = 16000

    def __post_init__(self) -> None:
        if self.kind not in ("mfcc", "fbank"):
            raise ValueError(f"features of kind {self.kind!r}: expected mfcc or fbank")
        if self.kind == "mfcc" and not 1 <= self.num_ceps <= self.num_mels:
            raise ValueError(f"num_ceps {self.num_ceps} is not between 1 and num_mels, {self.num_mels}")
        top = self.high_freq if self.high_freq > 0 else self.sample_rate / 2 + self.high_freq
        if not 0 <= self.low_freq < top <= self.sample_rate / 2:
            raise ValueError(
                f"bands from {self.low_freq} to {top} Hz do not fit a sample rate of {self.sample_rate} Hz"
            )

    @property
    def dim(self) -> int:
        return self.num_ceps if self.kind == "mfcc" else self.num_mels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FeatureConfig:
        return cls(**values)


GMM_FEATURES = FeatureConfig()
TDNN_FEATURES = FeatureConfig(num_mels=40, num_ceps=40, high_freq=-400.0)


def computer(config: FeatureConfig) -> knf.OnlineMfcc | knf.OnlineFbank:
    """A streaming feature computer: accept_waveform(rate, samples * SCALE), get_frame(i), input_finished()."""
    options = knf.MfccOptions() if config.kind == "mfcc" else knf.FbankOptions()
    options.frame_opts.samp_freq = config.sample_rate
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = config.num_mels
    options.mel_opts.low_freq = config.low_freq
    options.mel_opts.high_freq = config.high_freq
    options.use_energy = False
    if config.kind == "mfcc":
        options.num_ceps = config.num_ceps
        return knf.OnlineMfcc(options)
    return knf.OnlineFbank(options)


def extract(wave: np.ndarray, config: FeatureConfig = GMM_FEATURES) -> np.ndarray:
    """(N,) samples in -1..1 at config.sample_rate -> (T, D) float32. ValueError for less than one frame."""
    found = computer(config)
    found.accept_waveform(config.sample_rate, np.asarray(wave, np.float32) * np.float32(SCALE))
    found.input_finished()
    count = found.num_frames_ready
    if not count:
        raise ValueError(f"{len(wave)} samples at {config.sample_rate} Hz are less than a frame of 25 ms")
    return np.stack([found.get_frame(index) for index in range(count)]).astype(np.float32)


def extract_all(utterances: Sequence[datadir.Utterance], config: FeatureConfig = GMM_FEATURES) -> list[np.ndarray]:
    """Features of each utterance; an error names the sound file."""
    found = []
    for utterance in utterances:
        try:
            found.append(extract(datadir.load(utterance, config.sample_rate), config))
        except ValueError as error:
            raise ValueError(f"{utterance.path} ({utterance.id}): {error}") from None
    return found


# Normalisation


@dataclass(frozen=True)
class Cmvn:
    """Sums over frames: count, (D,) values and (D,) squares; `apply` subtracts the mean (and divides by deviation)."""

    count: float
    total: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, features: Sequence[np.ndarray]) -> Cmvn:
        wide = [item.astype(np.float64) for item in features]
        return cls(sum(len(x) for x in wide), sum(x.sum(0) for x in wide), sum((x * x).sum(0) for x in wide))

    @property
    def mean(self) -> np.ndarray:
        return self.total / self.count

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(np.maximum(self.squares / self.count - self.mean**2, 1e-10))

    def apply(self, features: np.ndarray, variance: bool = False) -> np.ndarray:
        centred = features - self.mean.astype(np.float32)
        return (centred / self.std.astype(np.float32)) if variance else centred


def normalise_speakers(
    utterances: Sequence[datadir.Utterance], features: Sequence[np.ndarray], by: str = "speaker"
) -> list[np.ndarray]:
    """Subtract the mean of each speaker ("speaker"), utterance ("utterance"), or none ("none")."""
    if by == "none":
        return list(features)
    if by == "utterance":
        return [Cmvn.of([item]).apply(item) for item in features]
    if by != "speaker":
        raise ValueError(f"features are normalised by speaker, utterance or none, not {by!r}")
    groups: dict[str, list[int]] = {}
    for index, utterance in enumerate(utterances):
        groups.setdefault(utterance.speaker, []).append(index)
    found: list[np.ndarray] = [np.empty(0)] * len(features)
    for members in groups.values():
        stats = Cmvn.of([features[index] for index in members])
        for index in members:
            found[index] = stats.apply(features[index])
    return found


# Context


def splice(features: np.ndarray, left: int, right: int) -> np.ndarray:
    """Each frame with those around it: (T, D) -> (T, (left + 1 + right) D); the first and last frames repeat."""
    places = np.arange(len(features))[:, None] + np.arange(-left, right + 1)
    return features[np.clip(places, 0, len(features) - 1)].reshape(len(features), -1)


def add_deltas(features: np.ndarray) -> np.ndarray:
    """Append first and second differences over windows of two frames: (T, D) -> (T, 3 D)."""
    return np.asarray(knf.compute_deltas(knf.DeltaOptions(), np.ascontiguousarray(features, np.float32)), np.float32)
