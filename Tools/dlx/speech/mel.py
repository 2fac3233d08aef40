"""Log-mel spectrograms as the field's vocoders and acoustic models read them, and the way back (Griffin-Lim).

Shapes: B batch, T samples, F frames, M mels. Magnitudes of a Hann-windowed short-time Fourier transform, summed in
triangles that are equally wide on Slaney's mel scale and of equal area (librosa's default, also torchaudio's "slaney"),
then the natural logarithm of at least `floor`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Slaney's Auditory Toolbox: linear below 1 kHz, 200/3 Hz a mel, then 27 steps for a factor of 6.4.
_LINEAR = 200.0 / 3
_BREAK = 1000.0
_LOG_STEP = np.log(6.4) / 27.0


@dataclass(frozen=True)
class MelConfig:
    """What a mel spectrogram means; travels with every acoustic model and vocoder. In Hz and samples.

    `padding`: "centre": frame f is centred on sample f * hop_length, F = 1 + T // hop_length (Tacotron 2); "same":
    half a hop later, F = T // hop_length (HiFi-GAN). The same vocoder serves both.
    """

    sample_rate: int = 22050
    n_fft: int = 1024
    hop_length: int = 256
    win_length: int = 1024
    num_mels: int = 80
    fmin: float = 0.0
    fmax: float = 8000.0
    floor: float = 1e-5
    padding: str = "centre"

    def __post_init__(self) -> None:
        if not 0 < self.hop_length <= self.win_length <= self.n_fft:
            found = f"{self.hop_length}, {self.win_length}, {self.n_fft}"
            raise ValueError(f"expected 0 < hop_length <= win_length <= n_fft, got {found}")
        if not 0 <= self.fmin < self.fmax <= self.sample_rate / 2:
            raise ValueError(
                f"expected 0 <= fmin < fmax <= sample_rate / 2, got {self.fmin}, {self.fmax}, {self.sample_rate / 2}"
            )
        if self.num_mels < 1 or self.floor <= 0:
            raise ValueError(f"num_mels and floor must be positive, got {self.num_mels}, {self.floor}")
        if self.padding not in ("centre", "same"):
            raise ValueError(f"padding {self.padding!r} is neither 'centre' nor 'same'")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MelConfig:
        """ValueError names keys that are unknown."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"a mel configuration has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)

    def differences(self, other: MelConfig) -> list[str]:
        """ "hop_length: 256 and 200" for each value but `padding` that differs."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{key}: {mine[key]} and {theirs[key]}" for key in mine if key != "padding" and mine[key] != theirs[key]
        ]

    def require_same(self, other: MelConfig, mine: str = "the acoustic model", theirs: str = "the vocoder") -> None:
        """ValueError lists each difference."""
        if found := self.differences(other):
            raise ValueError(f"{mine} and {theirs} mean different mel spectrograms: " + "; ".join(found))

    def frames(self, samples: int) -> int:
        """Frames of a waveform of so many samples."""
        return samples // self.hop_length + (self.padding == "centre")

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.hop_length

    @property
    def silence(self) -> float:
        """The value of digital silence."""
        return float(np.log(self.floor))


def mel_lengths(sample_lengths: Tensor, config: MelConfig) -> Tensor:
    """Frames of waveforms of these lengths, int64 like them."""
    return sample_lengths // config.hop_length + (config.padding == "centre")


def hertz_to_mel(hertz: np.ndarray | float) -> np.ndarray:
    hertz = np.asarray(hertz, np.float64)
    above = _BREAK / _LINEAR + np.log(np.maximum(hertz, _BREAK) / _BREAK) / _LOG_STEP
    return np.where(hertz < _BREAK, hertz / _LINEAR, above)


def mel_to_hertz(mels: np.ndarray | float) -> np.ndarray:
    mels = np.asarray(mels, np.float64)
    first = _BREAK / _LINEAR
    return np.where(mels < first, mels * _LINEAR, _BREAK * np.exp(_LOG_STEP * (np.maximum(mels, first) - first)))


@functools.lru_cache(16)
def mel_filters(config: MelConfig) -> np.ndarray:
    """float64 (M, n_fft // 2 + 1): triangles over the bins' frequencies, each of area 1 over Hz."""
    bins = np.linspace(0, config.sample_rate / 2, config.n_fft // 2 + 1)
    edges = np.linspace(hertz_to_mel(config.fmin), hertz_to_mel(config.fmax), config.num_mels + 2)
    edges = mel_to_hertz(edges)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
    filters = np.maximum(triangles, 0) * (2 / (high - low))
    if not filters.any(1).all():
        empty = np.flatnonzero(~filters.any(1)).tolist()
        raise ValueError(
            f"mel bands {empty} hold no frequency of the transform: lower num_mels or raise n_fft: {config}"
        )
    return filters


class MelSpectrogram(nn.Module):
    """Waveforms (B, T) float in -1..1 -> log-mel spectrograms (B, M, F) float32. Differentiable; has no parameters.

    With `lengths` (B,) each waveform ends there, and its spectrogram is what it would be alone: its end is reflected,
    and frames after its own are 0. ValueError where a waveform has no samples.
    """

    def __init__(self, config: MelConfig | None = None) -> None:
        super().__init__()
        self.config = config or MelConfig()
        filters = torch.from_numpy(mel_filters(self.config)).float()
        self.register_buffer("filters", filters, persistent=False)
        window = torch.hann_window(self.config.win_length, dtype=torch.float64).float()
        self.register_buffer("window", window, persistent=False)

    def forward(self, audio: Tensor, lengths: Tensor | None = None) -> Tensor:
        config = self.config
        if audio.dim() != 2 or not audio.shape[1] or not config.frames(audio.shape[1]):
            raise ValueError(f"expected waveforms (B, T) of a frame or more, got shape {tuple(audio.shape)}")
        with torch.autocast(audio.device.type, enabled=False):
            padded = self._pad(audio.float(), lengths)
            spectrum = torch.stft(
                padded,
                config.n_fft,
                config.hop_length,
                config.win_length,
                self.window,
                center=False,
                return_complex=True,
            )
            mel = torch.log(torch.clamp(self.filters @ spectrum.abs(), min=config.floor))
        if lengths is None:
            return mel
        frames = mel_lengths(lengths.to(mel.device), config)
        mel = mel[:, :, : config.frames(audio.shape[1])]
        return mel.masked_fill(torch.arange(mel.shape[2], device=mel.device) >= frames[:, None, None], 0.0)

    def _pad(self, audio: Tensor, lengths: Tensor | None) -> Tensor:
        config = self.config
        around = config.n_fft if config.padding == "centre" else config.n_fft - config.hop_length
        left = around // 2
        right = around - left
        length = audio.shape[1]
        if lengths is None and length > max(left, right):
            return F.pad(audio[:, None], (left, right), mode="reflect")[:, 0]
        # Reflected as often as need be, which is what a waveform shorter than half a window takes.
        ends = torch.full((len(audio),), length, device=audio.device) if lengths is None else lengths.to(audio.device)
        if int(ends.min()) < 1 or int(ends.max()) > length:
            raise ValueError(f"lengths must be within 1 and {length}, got {ends.tolist()}")
        places = torch.arange(-left, length + right, device=audio.device)[None]
        period = (2 * (ends - 1)).clamp(min=1)[:, None]
        inside = places.remainder(period)
        source = torch.minimum(inside, period - inside).clamp(max=length - 1) * (ends > 1)[:, None]
        return audio.gather(1, source)


# Griffin-Lim


@functools.lru_cache(8)
def _inverse_filters(config: MelConfig) -> Tensor:
    """(n_fft // 2 + 1, M): the pseudo-inverse of the filters."""
    return torch.from_numpy(np.linalg.pinv(mel_filters(config))).float()


def magnitudes(mel: Tensor, config: MelConfig, iterations: int = 50) -> Tensor:
    """Non-negative linear magnitudes (B, n_fft // 2 + 1, F) whose mel spectrogram is nearest to `mel` (B, M, F).

    Starts from the pseudo-inverse and goes on with multiplicative updates (Lee and Seung, 2001).
    """
    energy = torch.exp(mel.float())
    filters = torch.from_numpy(mel_filters(config)).float().to(mel.device)
    found = (_inverse_filters(config).to(mel.device) @ energy).clamp(min=1e-6)
    wanted = filters.T @ energy
    for _ in range(iterations):
        found = found * (wanted / (filters.T @ (filters @ found)).clamp(min=1e-8))
    return found


def griffin_lim(
    mel: Tensor, config: MelConfig | None = None, *, iterations: int = 60, momentum: float = 0.99, seed: int = 0
) -> Tensor:
    """Waveforms (B, F * hop_length) whose log-mel spectrograms are near `mel` (B, M, F).

    The fast Griffin-Lim algorithm (Perraudin, Balazs, Soendergaard, 2013): momentum 0 is the original of 1984. The
    starting phases are a function of `seed`.
    """
    config = config or MelConfig()
    if mel.dim() != 3 or mel.shape[1] != config.num_mels:
        raise ValueError(f"expected mel spectrograms (B, {config.num_mels}, F), got shape {tuple(mel.shape)}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be within 0 and 1, got {momentum}")
    with torch.autocast(mel.device.type, enabled=False):
        return _griffin_lim(magnitudes(mel, config), config, iterations, momentum, seed)


def _griffin_lim(size: Tensor, config: MelConfig, iterations: int, momentum: float, seed: int) -> Tensor:
    window = torch.hann_window(config.win_length, device=size.device)
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(size.shape, generator=generator).to(size.device) * (2 * torch.pi)
    length = size.shape[2] * config.hop_length
    # The transform below takes frame f to be centred on f * hop_length; "same" frames belong half a hop later.
    shift = 0 if config.padding == "centre" else config.hop_length // 2
    settings = (config.n_fft, config.hop_length, config.win_length, window)

    def sound(spectrum: Tensor) -> Tensor:
        return torch.istft(spectrum, *settings, length=length)

    estimate = torch.polar(size, angles)
    previous = torch.zeros_like(estimate)
    for _ in range(iterations):
        projected = torch.stft(sound(estimate), *settings, pad_mode="constant", return_complex=True)
        projected = projected[:, :, : size.shape[2]]
        ahead = projected + momentum * (projected - previous)
        previous = projected
        estimate = size * ahead / ahead.abs().clamp(min=1e-8)
    return F.pad(sound(estimate), (shift, 0))[:, :length]
