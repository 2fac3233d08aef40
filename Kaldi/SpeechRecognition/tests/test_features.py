"""Features against a float64 computation from Kaldi's definitions, and their context against loops."""

from __future__ import annotations

import numpy as np
import pytest

from kaldi_asr import features
from kaldi_asr.datadir import Utterance


def reference_fbank(wave, config):
    """Log mel energies in float64: 25 ms frames, no mean, pre-emphasis 0.97, Povey's window, triangles in mel."""
    samples = wave.astype(np.float64) * 32768
    length, shift, size = 400, 160, 512
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85
    mel = lambda f: 1127 * np.log(1 + f / 700)  # noqa: E731
    high = config.high_freq if config.high_freq > 0 else 8000 + config.high_freq
    edges = np.linspace(mel(config.low_freq), mel(high), config.num_mels + 2)
    bins = mel(np.arange(size // 2) * 16000 / size)
    rows = []
    for start in range(0, len(samples) - length + 1, shift):
        frame = samples[start : start + length]
        frame = frame - frame.mean()
        frame = np.concatenate([[frame[0] * 0.03], frame[1:] - 0.97 * frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, size))[: size // 2] ** 2
        row = []
        for left, centre, right in zip(edges, edges[1:], edges[2:], strict=False):
            up, down = (bins - left) / (centre - left), (right - bins) / (right - centre)
            row.append(np.log(max((power * np.clip(np.minimum(up, down), 0, None)).sum(), 1.2e-7)))
        rows.append(row)
    return np.array(rows)


def reference_mfcc(wave, config):
    bands = reference_fbank(wave, config)
    places = np.arange(config.num_mels) + 0.5
    cosines = np.array([np.cos(np.pi / config.num_mels * k * places) for k in range(config.num_ceps)])
    cosines *= np.sqrt(2 / config.num_mels)
    cosines[0] /= np.sqrt(2)
    lifter = 1 + 11 * np.sin(np.pi * np.arange(config.num_ceps) / 22)
    return bands @ cosines.T * lifter


@pytest.fixture(scope="module")
def wave():
    rng = np.random.default_rng(0)
    return (0.1 * np.sin(np.arange(9000) * 0.3) + 0.02 * rng.standard_normal(9000)).astype(np.float32)


@pytest.mark.parametrize("config", [features.GMM_FEATURES, features.TDNN_FEATURES])
def test_mfcc_is_the_definition(wave, config):
    found = features.extract(wave, config)
    expected = reference_mfcc(wave, config)
    assert found.shape == expected.shape == (1 + (9000 - 400) // 160, config.dim)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).std()


def test_fbank_is_the_definition(wave):
    config = features.FeatureConfig(kind="fbank", num_mels=40)
    assert np.abs(features.extract(wave, config) - reference_fbank(wave, config)).max() < 2e-3


def test_features_do_not_change_from_call_to_call(wave):
    assert np.array_equal(features.extract(wave), features.extract(wave))


def test_wrong_requests(wave):
    with pytest.raises(ValueError, match="399 samples"):
        features.extract(wave[:399])
    with pytest.raises(ValueError, match="num_ceps 30"):
        features.FeatureConfig(num_ceps=30)
    with pytest.raises(ValueError, match="9000.* Hz do not fit"):
        features.FeatureConfig(high_freq=9000)
    with pytest.raises(ValueError, match="'lpc'"):
        features.FeatureConfig(kind="lpc")


def test_normalisation_by_speaker(wave):
    rng = np.random.default_rng(1)
    items = [rng.normal(size=(n, 3)).astype(np.float32) + n for n in (5, 7, 9)]
    people = [Utterance(str(i), "x", (), s) for i, s in enumerate(("a", "b", "a"))]
    found = features.normalise_speakers(people, items)
    together = np.concatenate([items[0], items[2]]).astype(np.float64).mean(0)
    assert np.allclose(found[0], items[0] - together, atol=1e-5) and np.allclose(found[1].mean(0), 0, atol=1e-5)
    assert np.allclose(features.normalise_speakers(people, items, "utterance")[0].mean(0), 0, atol=1e-5)
    assert features.normalise_speakers(people, items, "none")[0] is items[0]
    stats = features.Cmvn.of(items)
    whole = np.concatenate([stats.apply(item, variance=True) for item in items])
    assert np.allclose(whole.mean(0), 0, atol=1e-5) and np.allclose(whole.std(0), 1, atol=1e-5)


def test_context_is_a_loop():
    item = np.random.default_rng(2).normal(size=(6, 2)).astype(np.float32)
    found = features.splice(item, 2, 1)
    for t in range(6):
        expected = np.concatenate([item[min(max(t + o, 0), 5)] for o in (-2, -1, 0, 1)])
        assert np.array_equal(found[t], expected)
    deltas = features.add_deltas(item)
    padded = np.pad(item, ((4, 4), (0, 0)), "edge").astype(np.float64)
    first = np.array([sum(j * padded[t + j] for j in range(-2, 3)) / 10 for t in range(2, 12)])
    second = np.array([sum(j * first[t + j] for j in range(-2, 3)) / 10 for t in range(2, 8)])
    assert np.allclose(deltas, np.concatenate([item, first[2:8], second], 1), atol=1e-5)
