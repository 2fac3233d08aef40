"""Sound files and waveforms: reading, writing, resampling, trimming, loudness. Waveforms are float32 (T,) in -1..1."""

from __future__ import annotations

import functools
import math
import os
import wave
from pathlib import Path

import numpy as np

from dlx.files import atomic_path

SUFFIXES = (".wav", ".flac", ".ogg")
MIN_RATE, MAX_RATE = 1000, 384000
ZERO_CROSSINGS = 32  # of the resampling kernel, on each side
ROLLOFF = 0.945  # where its pass band ends, as a share of the lower Nyquist frequency
KAISER_BETA = 12.0  # of its window: about -120 dB outside of the transition band
SILENCE = 1e-10


class AudioError(ValueError):
    """A sound file that cannot be used; the message begins with its path."""


# Files


def read(
    path: str | os.PathLike[str], sample_rate: int | None = None, *, strict: bool = False
) -> tuple[np.ndarray, int]:
    """Waveform and sample rate of a WAV (8 to 32 bits, float), FLAC or OGG file; several channels are averaged.

    Resampled to `sample_rate` if one is given and the file has another; with `strict` that is an AudioError instead,
    which names both. AudioError for what is no sound file, empty, or not finite.
    """
    import soundfile

    path = Path(path)
    if not path.is_file():
        raise AudioError(f"{path}: there is no such file")
    try:
        audio, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        reason = getattr(error, "error_string", None) or str(error)
        raise AudioError(f"{path}: not a readable sound file ({reason.rstrip('.')})") from None
    if not len(audio):
        raise AudioError(f"{path}: holds no sound")
    if not np.isfinite(audio).all():
        raise AudioError(f"{path}: holds samples that are not finite")
    mono = audio[:, 0] if audio.shape[1] == 1 else audio.mean(1, dtype=np.float64).astype(np.float32)
    if sample_rate in (None, rate):
        return np.ascontiguousarray(mono), rate
    if strict:
        raise AudioError(f"{path}: its sample rate is {rate} Hz, not {sample_rate} Hz")
    return resample(mono, rate, sample_rate), sample_rate


def duration(path: str | os.PathLike[str]) -> tuple[float, int]:
    """Seconds and sample rate out of a file's header; AudioError as for `read`."""
    import soundfile

    if not Path(path).is_file():
        raise AudioError(f"{path}: there is no such file")
    try:
        info = soundfile.info(str(path))
    except (soundfile.LibsndfileError, RuntimeError) as error:
        reason = getattr(error, "error_string", None) or str(error)
        raise AudioError(f"{path}: not a readable sound file ({reason.rstrip('.')})") from None
    if not info.frames:
        raise AudioError(f"{path}: holds no sound")
    return info.frames / info.samplerate, info.samplerate


def write_wav(path: str | os.PathLike[str], audio: np.ndarray, sample_rate: int) -> int:
    """Write a mono PCM WAV file of 16 bits, whole or not at all; returns how many samples were clipped to -1..1.

    ValueError for samples that are not finite, another shape than (T,), or no samples.
    """
    audio = np.asarray(audio)
    if audio.ndim != 1 or not len(audio):
        raise ValueError(f"{path}: expected samples of shape (T,), got {audio.shape}")
    if not np.isfinite(audio).all():
        raise ValueError(f"{path}: {int((~np.isfinite(audio)).sum())} of {len(audio)} samples are not finite")
    pcm = np.rint(np.clip(audio.astype(np.float64), -1, 1) * 32767).astype("<i2")
    with atomic_path(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(int(sample_rate))
        file.writeframes(pcm.tobytes())
    return int((np.abs(audio) > 1).sum())


# Resampling


def resample(audio: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Band-limited interpolation (windowed sinc, polyphase; Smith, "Digital Audio Resampling"): (T,) -> (ceil(T r),).

    What lies above the lower of the two Nyquist frequencies is removed, so that nothing aliases.
    """
    for value in (rate, new_rate):
        if not MIN_RATE <= value <= MAX_RATE or value != int(value):
            raise ValueError(f"sample rate {value} Hz is not between {MIN_RATE} and {MAX_RATE}")
    audio = np.asarray(audio, np.float32)
    if rate == new_rate or not len(audio):
        return audio
    factor = math.gcd(int(rate), int(new_rate))
    up, down = new_rate // factor, rate // factor
    kernels = _kernels(up, down)  # (up, taps), the taps of output phase (n * down) % up
    taps = kernels.shape[1]
    before = taps // 2 - 1
    count = -(-len(audio) * up // down)
    padded = np.pad(audio, (before, taps))
    result = np.empty(count, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    for start in range(0, count, 1 << 15):
        places = np.arange(start, min(start + (1 << 15), count), dtype=np.int64) * down
        result[start : start + len(places)] = np.einsum("nk,nk->n", windows[places // up], kernels[places % up])
    return result


@functools.lru_cache(8)
def _kernels(up: int, down: int) -> np.ndarray:
    """float32 (up, taps): for the output that lies `phase / up` input samples after an input sample."""
    cutoff = ROLLOFF * min(1.0, up / down)
    half = math.ceil(ZERO_CROSSINGS / cutoff)
    offsets = np.arange(1 - half, half + 1) - np.arange(up)[:, None] / up  # input sample minus output, in samples
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (offsets / half) ** 2, 0, 1))) / np.i0(KAISER_BETA)
    kernels = cutoff * np.sinc(cutoff * offsets) * window
    kernels /= kernels.sum(1, keepdims=True)  # a constant stays what it is
    return kernels.astype(np.float32)


# Silence and loudness


def frame_levels(audio: np.ndarray, frame: int = 1024, hop: int = 256) -> np.ndarray:
    """Root mean square of overlapping frames in dB of full scale; the last one may be shorter."""
    if not len(audio):
        raise ValueError("there are no samples to measure")
    squares = np.concatenate([[0.0], np.cumsum(np.square(audio, dtype=np.float64))])
    starts = np.arange(0, max(len(audio) - frame + hop, 1), hop)
    ends = np.minimum(starts + frame, len(audio))
    power = np.maximum(squares[ends] - squares[starts], 0) / (ends - starts)
    return 10 * np.log10(np.maximum(power, SILENCE))


def trim_silence(
    audio: np.ndarray, *, below_peak: float = 40.0, frame: int = 1024, hop: int = 256, keep: int = 0
) -> tuple[np.ndarray, int, int]:
    """The waveform from its first to its last frame that is at most `below_peak` dB under the loudest; start; end.

    `keep` samples of the silence stay on both sides. Digital silence comes back whole.
    """
    levels = frame_levels(audio, frame, hop)
    loud = np.flatnonzero(levels > max(levels.max() - below_peak, 10 * math.log10(SILENCE) + 1))
    if not len(loud):
        return audio, 0, len(audio)
    start = max(0, int(loud[0]) * hop - keep)
    end = min(len(audio), int(loud[-1]) * hop + frame + keep)
    return audio[start:end], start, end


def rms(audio: np.ndarray) -> float:
    """Root mean square in dB of full scale."""
    power = float(np.mean(np.square(audio, dtype=np.float64)))
    return 10 * math.log10(max(power, SILENCE))


def loudness(audio: np.ndarray, sample_rate: int) -> float:
    """Integrated loudness of a mono waveform in LUFS (ITU-R BS.1770-4, with both gates); -inf for silence.

    Sound shorter than a block of 0.4 s counts as one block.
    """
    weighted = _k_weighted(np.asarray(audio, np.float64), sample_rate)
    block, hop = round(0.4 * sample_rate), round(0.1 * sample_rate)
    squares = np.concatenate([[0.0], np.cumsum(weighted**2)])
    starts = np.arange(0, max(len(weighted) - block, 0) + 1, hop)
    ends = np.minimum(starts + block, len(weighted))
    power = (squares[ends] - squares[starts]) / (ends - starts)
    gate = 10 ** ((-70 + 0.691) / 10)
    loud = power[power > gate]
    if not len(loud):
        return -math.inf
    loud = loud[loud > loud.mean() / 10]
    return float(-0.691 + 10 * math.log10(loud.mean()))


def _k_weighted(audio: np.ndarray, sample_rate: int) -> np.ndarray:
    """The two filters of BS.1770, designed anew for the sample rate, applied in the frequency domain."""
    length = 1 << (len(audio) + sample_rate // 2 - 1).bit_length()  # their tails have died away by then
    frequencies = np.exp(-2j * np.pi * np.arange(length // 2 + 1) / length)
    response = np.ones(len(frequencies), complex)
    # High shelf (the head), then high pass; analogue prototypes whose bilinear transform at 48 kHz is the standard's.
    for kind, centre, quality, gain in (
        ("shelf", 1681.9744509555319, 0.7071752369554193, 3.99984385397),
        ("pass", 38.13547087613982, 0.5003270373253953, 0.0),
    ):
        k = math.tan(math.pi * centre / sample_rate)
        amplitude = 10 ** (gain / 20)
        bend = amplitude**0.499666774155
        scale = 1 + k / quality + k * k
        bottom = (1.0, 2 * (k * k - 1) / scale, (1 - k / quality + k * k) / scale)
        if kind == "shelf":
            top = (
                (amplitude + bend * k / quality + k * k) / scale,
                2 * (k * k - amplitude) / scale,
                (amplitude - bend * k / quality + k * k) / scale,
            )
        else:
            top = (1.0, -2.0, 1.0)
        z = frequencies
        response *= (top[0] + top[1] * z + top[2] * z * z) / (bottom[0] + bottom[1] * z + bottom[2] * z * z)
    return np.fft.irfft(np.fft.rfft(audio, length) * response, length)[: len(audio)]


def set_loudness(audio: np.ndarray, sample_rate: int, target: float = -23.0, peak: float = 0.99) -> np.ndarray:
    """The waveform at `target` LUFS, or as near to it as its highest sample, at `peak`, allows. Silence stays."""
    found = loudness(audio, sample_rate)
    if not math.isfinite(found):
        return audio
    gain = 10 ** ((target - found) / 20)
    gain = min(gain, peak / float(np.abs(audio).max()))
    return (audio * np.float32(gain)).astype(np.float32)
