"""Log-mel spectrograms against an independent implementation of librosa's published definition, and the way back."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from dlx.speech import mel  # noqa: E402
from dlx.speech.mel import MelConfig, MelSpectrogram, griffin_lim, mel_lengths  # noqa: E402

CONFIG = MelConfig()
CONFIGS = {
    "published": CONFIG,
    "44.1 kHz": MelConfig(44100, 2048, 512, 2048, 80, 0, 16000),
    "short window": MelConfig(16000, 512, 160, 400, 64, 50, 7600, 1e-3),
    "same": MelConfig(padding="same"),
}


def voice(samples, seed=0, rate=22050):
    """Something like a vowel: harmonics that fall off, and noise."""
    generator = np.random.default_rng(seed)
    time = np.arange(samples) / rate
    pitch = 120 + 20 * np.sin(2 * np.pi * 3 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    sound = sum(np.sin(h * phase + h) / h**1.2 for h in range(1, 40)) * 0.1
    return (sound + 0.003 * generator.normal(size=samples)).astype(np.float32)


def slaney_mel(hertz):
    """From the description of Slaney's toolbox: 3 mels for 200 Hz, above 1 kHz 27 for a factor of 6.4."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def slaney_hertz(value):
    low, high = 0.0, 1e6
    for _ in range(200):  # bisection: nothing in common with the code under test
        middle = (low + high) / 2
        low, high = (middle, high) if slaney_mel(middle) < value else (low, middle)
    return low


def reference(audio, config):
    """float64, one frame and one filter at a time."""
    around = config.n_fft if config.padding == "centre" else config.n_fft - config.hop_length
    left = around // 2
    padded = np.pad(audio.astype(np.float64), (left, around - left), mode="reflect")
    window = np.zeros(config.n_fft)
    start = (config.n_fft - config.win_length) // 2
    places = np.arange(config.win_length)
    window[start : start + config.win_length] = 0.5 - 0.5 * np.cos(2 * np.pi * places / config.win_length)
    points = np.linspace(slaney_mel(config.fmin), slaney_mel(config.fmax), config.num_mels + 2)
    edges = [slaney_hertz(point) for point in points]
    frames = []
    for first in range(0, len(padded) - config.n_fft + 1, config.hop_length):
        magnitude = np.abs(np.fft.fft(padded[first : first + config.n_fft] * window))[: config.n_fft // 2 + 1]
        bands = []
        for low, centre, high in zip(edges, edges[1:], edges[2:], strict=False):
            total = 0.0
            for number, value in enumerate(magnitude):
                hertz = number * config.sample_rate / config.n_fft
                if low < hertz <= centre:
                    total += value * (hertz - low) / (centre - low)
                elif centre < hertz < high:
                    total += value * (high - hertz) / (high - centre)
            bands.append(math.log(max(2 / (high - low) * total, config.floor)))
        frames.append(bands)
    return np.array(frames).T


@pytest.mark.parametrize("name", list(CONFIGS))
def test_against_the_published_definition(name):
    config = CONFIGS[name]
    audio = voice(5 * config.n_fft + 77, rate=config.sample_rate)
    found = MelSpectrogram(config)(torch.from_numpy(audio)[None])[0]
    expected = reference(audio, config)
    assert found.shape == expected.shape == (config.num_mels, config.frames(len(audio)))
    assert found.dtype == torch.float32
    # The spectrum is rounded relative to the loudest bin, so quiet bands are compared by their energy.
    loud = expected > np.log(np.exp(expected).max()) - 9
    assert loud.mean() > 0.5
    np.testing.assert_allclose(found.numpy()[loud], expected[loud], atol=1e-4)
    np.testing.assert_allclose(np.exp(found.numpy()), np.exp(expected), atol=1e-5)


def test_filters_against_the_published_definition():
    points = np.linspace(0, slaney_mel(8000), 82)
    edges = [slaney_hertz(point) for point in points]
    assert mel.mel_to_hertz(mel.hertz_to_mel(np.array([0, 440, 1000, 3000.0]))) == pytest.approx([0, 440, 1000, 3000])
    filters = mel.mel_filters(CONFIG)
    for band in (0, 1, 20, 40, 79):
        low, centre, high = edges[band : band + 3]
        for number in range(513):
            hertz = number * 22050 / 1024
            height = max(0.0, min((hertz - low) / (centre - low), (high - hertz) / (high - centre))) * 2 / (high - low)
            assert filters[band, number] == pytest.approx(height, abs=1e-9)


def test_frames_of_a_second():
    """Case O19: a second at 22.05 kHz has 87 frames."""
    assert MelSpectrogram()(torch.zeros(1, 22050)).shape == (1, 80, 87)
    assert CONFIG.frames(22050) == 87 and MelConfig(padding="same").frames(22050) == 86
    assert mel_lengths(torch.tensor([1, 256, 22050]), CONFIG).tolist() == [1, 2, 87]


def test_silence_is_finite():
    audio = torch.zeros(1, 4000, requires_grad=True)
    found = MelSpectrogram()(audio)
    assert (found == torch.tensor(math.log(1e-5))).all()
    assert CONFIG.silence == pytest.approx(math.log(1e-5))
    found.sum().backward()
    assert torch.isfinite(audio.grad).all()


@pytest.mark.parametrize("padding", ["centre", "same"])
def test_a_padded_batch_is_its_items(padding):
    spectrogram = MelSpectrogram(MelConfig(padding=padding))
    lengths = torch.tensor([6000, 5121, 300, 2560])
    audio = torch.from_numpy(np.random.default_rng(2).normal(0, 0.1, (4, 6000)).astype(np.float32))
    found = spectrogram(audio, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = spectrogram(audio[row : row + 1, :length])[0]
        frames = spectrogram.config.frames(length)
        assert alone.shape[1] == frames
        torch.testing.assert_close(found[row, :, :frames], alone, atol=1e-5, rtol=0)
        assert (found[row, :, frames:] == 0).all()
    torch.testing.assert_close(spectrogram(audio), spectrogram(audio, torch.full((4,), 6000)), atol=1e-5, rtol=0)


def test_short_waveforms_are_reflected_like_numpy():
    audio = np.array([0.1, 0.5, -0.3], np.float32)
    longer = np.pad(audio, (512, 512), mode="reflect")
    found = MelSpectrogram()(torch.from_numpy(audio)[None])[0, :, 0]
    magnitude = np.abs(np.fft.rfft(longer[:1024] * np.hanning(1025)[:1024]))
    np.testing.assert_allclose(found, np.log(np.maximum(mel.mel_filters(CONFIG) @ magnitude, 1e-5)), atol=1e-4)
    for bad in (torch.zeros(1, 0), torch.zeros(5)):
        with pytest.raises(ValueError, match="expected waveforms"):
            MelSpectrogram()(bad)
    with pytest.raises(ValueError, match=r"lengths must be within 1 and 5"):
        MelSpectrogram()(torch.zeros(2, 5), torch.tensor([0, 5]))


def test_gradients():
    config = MelConfig(8000, 64, 16, 64, 8, 0, 4000)
    spectrogram = MelSpectrogram(config)
    audio = torch.from_numpy(np.random.default_rng(0).normal(0, 0.3, (1, 100)).astype(np.float32)).requires_grad_()
    spectrogram(audio).square().sum().backward()
    for place in (0, 31, 57, 99):
        shift = torch.zeros_like(audio)
        shift[0, place] = 1e-2
        with torch.no_grad():
            up, down = spectrogram(audio + shift).square().sum(), spectrogram(audio - shift).square().sum()
        assert audio.grad[0, place] == pytest.approx(float(up - down) / 2e-2, rel=0.03, abs=0.5)


def test_autocast_leaves_it_alone():
    audio = torch.from_numpy(voice(5000))[None]
    with torch.autocast("cpu", torch.bfloat16):
        found = MelSpectrogram()(audio)
    torch.testing.assert_close(found, MelSpectrogram()(audio), atol=0, rtol=0)


@pytest.mark.gpu
def test_the_gpu_agrees():
    audio = torch.from_numpy(voice(50000))[None].repeat(3, 1)
    lengths = torch.tensor([50000, 40001, 700])
    expected = MelSpectrogram()(audio, lengths).exp()
    found = MelSpectrogram().cuda()(audio.cuda(), lengths.cuda()).cpu().exp()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


# O21


def test_contracts_are_compared():
    other = MelConfig(sample_rate=16000, hop_length=200, fmax=7600)
    with pytest.raises(ValueError) as error:
        CONFIG.require_same(other)
    assert str(error.value).endswith("sample_rate: 22050 and 16000; hop_length: 256 and 200; fmax: 8000.0 and 7600")
    CONFIG.require_same(MelConfig.from_dict(CONFIG.to_dict()))
    CONFIG.require_same(MelConfig(padding="same"))
    with pytest.raises(ValueError, match="has no hop_size"):
        MelConfig.from_dict({"hop_size": 3})


@pytest.mark.parametrize(
    "bad", [{"hop_length": 0}, {"win_length": 2048}, {"fmax": 12000}, {"fmin": 9000}, {"floor": 0}, {"padding": "none"}]
)
def test_meaningless_contracts(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MelConfig(**bad)


def test_too_many_bands():
    with pytest.raises(ValueError, match="hold no frequency"):
        MelSpectrogram(MelConfig(n_fft=256, hop_length=64, win_length=256, num_mels=128))


# Griffin-Lim


@pytest.mark.parametrize("padding", ["centre", "same"])
def test_griffin_lim_comes_back(padding):
    config = MelConfig(padding=padding)
    spectrogram = MelSpectrogram(config)
    wanted = spectrogram(torch.from_numpy(voice(11025))[None])
    audio = griffin_lim(wanted, config, iterations=30)
    assert audio.shape == (1, wanted.shape[2] * 256)
    found = spectrogram(audio)[:, :, : wanted.shape[2]]
    inner = slice(2, -3)
    assert (found - wanted)[:, :, inner].abs().mean() < 0.2
    torch.testing.assert_close(griffin_lim(wanted, config, iterations=30), audio, atol=0, rtol=0)


def test_momentum_is_faster():
    spectrogram = MelSpectrogram()
    wanted = spectrogram(torch.from_numpy(voice(8000))[None])

    def error(momentum):
        found = spectrogram(griffin_lim(wanted, iterations=30, momentum=momentum))[:, :, : wanted.shape[2]]
        return float((found.exp() - wanted.exp())[:, :, 2:-3].norm())

    assert error(0.99) < 0.9 * error(0.0)
    with pytest.raises(ValueError, match="momentum"):
        error(1.5)
    with pytest.raises(ValueError, match=r"\(B, 80, F\)"):
        griffin_lim(wanted[0])
