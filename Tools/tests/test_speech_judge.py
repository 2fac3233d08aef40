"""Word errors against a search over all edits, the recogniser's spectrogram against NumPy, and what it hears."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
from dlx.speech import corpora, judge  # noqa: E402
from dlx.speech.mel import MelConfig, mel_filters  # noqa: E402


def test_words_are_those_that_are_read():
    assert judge.words("It cost $3.50, don't you think?") == judge.words(
        "it cost three dollars and fifty cents don't YOU think"
    )
    assert judge.words("A naïve 'quote' -- vis-a-vis.") == ["a", "naive", "quote", "vis", "a", "vis"]


def test_distance_is_the_fewest_edits():
    @functools.cache
    def brute(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(brute(a[1:], b) + 1, brute(a, b[1:]) + 1, brute(a[1:], b[1:]) + (a[0] != b[0]))

    chance = random.Random(0)
    for _ in range(50):
        a, b = ("".join(chance.choices("abc", k=chance.randrange(8))) for _ in range(2))
        assert judge.distance(a, b) == brute(a, b)


def test_errors_are_counted_over_all_texts():
    assert judge.word_error_rate(["one two three", "four"], ["one to three", "four five"]) == 0.5
    assert judge.word_error_rate(["one two"], [""]) == 1
    with pytest.raises(ValueError, match="no words"):
        judge.word_error_rate(["..."], ["one"])


def test_the_spectrogram_is_whispers():
    """Section 2.2 of the paper and its appendix, in NumPy: power, 80 bands, log10, 8 below the largest, scaled."""
    sound = np.random.default_rng(0).standard_normal(16000).astype(np.float32) * 0.1
    found = judge.features(sound)
    assert found.shape == (80, 3000) and found.dtype == np.float32
    padded = np.pad(np.concatenate([sound, np.zeros(480000 - 16000)]), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = np.stack([np.abs(np.fft.rfft(padded[160 * f : 160 * f + 400] * window)) ** 2 for f in range(3000)], 1)
    mel = np.log10(np.maximum(mel_filters(MelConfig(16000, 400, 160, 400, 80, 0, 8000)) @ power, 1e-10))
    np.testing.assert_allclose(found, (np.maximum(mel, mel.max() - 8) + 4) / 4, atol=2e-4)


def test_without_the_package_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ValueError, match=r"pip install ctranslate2==4\.8\.5"):
        judge.Whisper(tmp_path)
    monkeypatch.setattr(judge.data, "prepare", lambda *args, **options: pytest.fail("71 MB fetched for nothing"))
    with pytest.raises(ValueError, match=r"pip install ctranslate2==4\.8\.5"):
        judge.Whisper.open()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason=f"needs the package {judge.NEEDS}")
def test_flite_is_understood():
    """Nine in ten words, as measured with another front end of the same recogniser; silence is not heard as speech."""
    folder = corpora.prepare("flite-speech", utterances=60, voices=("rms",))
    from dlx.speech import audio

    recogniser, utterances = judge.Whisper.open(), corpora.read(folder)["train"][:8]
    heard = [recogniser.transcribe(*audio.read(utterance.path)) for utterance in utterances]
    assert judge.word_error_rate([utterance.text for utterance in utterances], heard) < 0.25
    noise = np.random.default_rng(0).standard_normal(22050).astype(np.float32) * 0.1
    assert len(judge.words(recogniser.transcribe(noise, 22050))) < 6
