"""Sound files and waveforms (cases O19, O23): every kind of file, resampling without aliases, silence, loudness."""

import math
import wave

import numpy as np
import pytest

from dlx.speech import audio

soundfile = pytest.importorskip("soundfile", reason="sound files need the package soundfile")

RATE = 22050


def tone(frequency=440.0, seconds=1.0, rate=RATE, amplitude=0.5):
    return (amplitude * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


KINDS = {
    "8 bits": ("WAV", "PCM_U8", 1e-2), "16 bits": ("WAV", "PCM_16", 1e-4), "24 bits": ("WAV", "PCM_24", 1e-6),
    "32 bits": ("WAV", "PCM_32", 1e-6), "float": ("WAV", "FLOAT", 0), "double": ("WAV", "DOUBLE", 1e-7),
    "flac": ("FLAC", "PCM_16", 1e-4), "ogg": ("OGG", "VORBIS", 5e-2),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_file_gives_the_same_sound(kind, tmp_path):
    container, subtype, tolerance = KINDS[kind]
    path = tmp_path / f"x.{container.lower()}"
    soundfile.write(path, tone(), RATE, subtype, format=container)
    found, rate = audio.read(path)
    assert rate == RATE and found.dtype == np.float32 and found.shape == (RATE,)
    np.testing.assert_allclose(found, tone(), atol=tolerance)
    assert audio.duration(path) == (1.0, RATE)


def test_stereo_is_mixed_down(tmp_path):
    path = tmp_path / "x.wav"
    soundfile.write(path, np.stack([tone(), 3 * tone() - 0.1], 1), RATE, "FLOAT")
    np.testing.assert_allclose(audio.read(path)[0], 2 * tone() - 0.05, atol=1e-6)


def test_sample_rates(tmp_path):
    path = tmp_path / "x.wav"
    soundfile.write(path, tone(rate=16000), 16000)
    with pytest.raises(ValueError, match="x.wav: its sample rate is 16000 Hz, not 22050 Hz"):
        audio.read(path, RATE, strict=True)
    found, rate = audio.read(path, RATE)
    assert rate == RATE and len(found) == RATE
    np.testing.assert_allclose(found[1000:-1000], tone()[1000:-1000], atol=1e-4)


def test_bad_files_are_named(tmp_path):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF and nothing else")
    with pytest.raises(audio.AudioError, match="bad.wav: not a readable sound file"):
        audio.read(bad)
    with pytest.raises(audio.AudioError, match="bad.wav: not a readable"):
        audio.duration(bad)
    with pytest.raises(audio.AudioError, match="none.wav: there is no such file"):
        audio.read(tmp_path / "none.wav")
    soundfile.write(bad, np.zeros(0), RATE)
    with pytest.raises(audio.AudioError, match="holds no sound"):
        audio.read(bad)
    soundfile.write(bad, np.array([0, np.nan]), RATE, "FLOAT")
    with pytest.raises(audio.AudioError, match="not finite"):
        audio.read(bad)


# O23


def test_what_is_written_can_be_played(tmp_path):
    loud = 1.7 / 0.5 * tone()
    path = tmp_path / "new" / "loud.wav"
    clipped = audio.write_wav(path, loud, RATE)
    assert clipped == (np.abs(loud) > 1).sum() > 1000
    with wave.open(str(path)) as file:
        assert file.getparams()[:4] == (1, 2, RATE, RATE)
        pcm = np.frombuffer(file.readframes(RATE), "<i2")
    np.testing.assert_allclose(pcm / 32767, np.clip(loud, -1, 1), atol=2e-5)  # no wrap-around
    assert audio.write_wav(path, tone(), RATE) == 0
    for bad, message in ((np.array([0, np.inf]), "1 of 2 samples are not finite"), (np.zeros((2, 3)), "shape")):
        with pytest.raises(ValueError, match=f"loud.wav.*{message}"):
            audio.write_wav(path, bad, RATE)
    np.testing.assert_allclose(audio.read(path)[0], tone(), atol=1e-4)  # the old file is still there


# Resampling


@pytest.mark.parametrize(
    ("rate", "new_rate"), [(16000, 22050), (8000, 22050), (44100, 22050), (22050, 16000), (48000, 22050)]
)
def test_resampling_keeps_tones(rate, new_rate):
    frequency = 0.35 * min(rate, new_rate)
    found = audio.resample(tone(frequency, rate=rate), rate, new_rate)
    expected = tone(frequency, rate=new_rate)
    assert abs(len(found) - new_rate) <= 1
    middle = slice(new_rate // 10, -new_rate // 10)
    np.testing.assert_allclose(found[middle], expected[: len(found)][middle], atol=2e-5)


@pytest.mark.parametrize(
    ("rate", "new_rate", "frequency"), [(44100, 22050, 15000), (22050, 16000, 9000), (48000, 8000, 5000)]
)
def test_what_would_alias_is_removed(rate, new_rate, frequency):
    found = audio.resample(tone(frequency, rate=rate), rate, new_rate)
    assert np.abs(found[new_rate // 10 : -new_rate // 10]).max() < 0.5 * 10 ** (-90 / 20)


def test_images_are_removed_when_the_rate_rises():
    """Of white noise at 16 kHz nothing is left over 8 kHz at 22.05 kHz."""
    noise = np.random.default_rng(0).normal(0, 0.1, 32000)
    found = audio.resample(noise, 16000, RATE)[4096:-4096]
    power = np.abs(np.fft.rfft(found * np.hanning(len(found)))) ** 2
    frequencies = np.fft.rfftfreq(len(found), 1 / RATE)
    assert power[frequencies > 8500].mean() < 1e-9 * power[frequencies < 7000].mean()


def test_resampling_agrees_with_the_fourier_series():
    """An independent way: of a periodic signal, other samples of its trigonometric polynomial."""
    generator = np.random.default_rng(1)
    bins = np.zeros(801, complex)
    bins[1:500] = generator.normal(size=499) + 1j * generator.normal(size=499)
    period = np.fft.irfft(bins, 1600)
    wanted = np.fft.irfft(np.pad(bins, (0, 1103 - 801)), 2205) * 2205 / 1600
    found = audio.resample(np.tile(period, 5), 16000, RATE)[2 * 2205 : 3 * 2205]
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_constants_and_odd_rates():
    np.testing.assert_allclose(audio.resample(np.ones(5000), 44101, 22050)[200:-200], 1, atol=1e-6)
    assert audio.resample(np.zeros(0), 16000, 22050).shape == (0,)
    with pytest.raises(ValueError, match="sample rate 10"):
        audio.resample(np.zeros(5), 10, 22050)


# Silence and loudness


def test_silence_is_trimmed():
    sound = np.concatenate([np.zeros(8000), tone(), 1e-4 * tone(), np.zeros(5000)]).astype(np.float32)
    found, start, end = audio.trim_silence(sound)
    assert abs(start - 8000) <= 1024 and abs(end - 8000 - RATE) <= 1024
    np.testing.assert_array_equal(found, sound[start:end])
    assert audio.trim_silence(sound, keep=300)[1] == start - 300
    silence = np.zeros(3000, np.float32)
    assert audio.trim_silence(silence)[1:] == (0, 3000)


def test_levels():
    assert audio.rms(tone(amplitude=1.0)) == pytest.approx(-10 * math.log10(2), abs=1e-3)
    brute = [
        20 * math.log10(np.sqrt(np.mean(np.square(tone()[i : i + 1024], dtype=np.float64)))) for i in (0, 256, 5120)
    ]
    np.testing.assert_allclose(audio.frame_levels(tone())[[0, 1, 20]], brute, atol=1e-6)


def test_loudness_of_the_standards_signals():
    """BS.1770: a full-scale sine of 997 Hz in one channel is -3.01 LKFS; EBU Tech 3341's gates (its cases 3 and 5)."""
    assert audio.loudness(tone(997, 20, 48000, 1.0), 48000) == pytest.approx(-3.01, abs=0.01)
    assert audio.loudness(tone(1000, 20, RATE, 1.0), RATE) == pytest.approx(-3.01, abs=0.05)
    # Mono, so 3.01 dB under the levels of the stereo signals of Tech 3341.
    pieces = [tone(1000, s, 48000, 10 ** (d / 20)) for d, s in ((-36, 10), (-23, 60), (-36, 10))]
    assert audio.loudness(np.concatenate(pieces), 48000) == pytest.approx(-26.01, abs=0.1)
    pieces = [tone(1000, s, 48000, 10 ** (d / 20)) for d, s in ((-26, 20), (-20, 20.1), (-26, 20))]
    assert audio.loudness(np.concatenate(pieces), 48000) == pytest.approx(-26.01, abs=0.1)
    assert audio.loudness(np.zeros(48000), 48000) == -math.inf


def test_setting_the_loudness():
    quiet = tone(700, 3, RATE, 0.01)
    assert audio.loudness(audio.set_loudness(quiet, RATE, -20), RATE) == pytest.approx(-20, abs=0.01)
    assert np.abs(audio.set_loudness(quiet, RATE, 0)).max() == pytest.approx(0.99, abs=1e-4)
    silence = np.zeros(1000, np.float32)
    assert audio.set_loudness(silence, RATE) is silence
