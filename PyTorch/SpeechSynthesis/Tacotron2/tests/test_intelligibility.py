"""The judge's verb option with a listener that is made up, and with Whisper on recordings and their copies."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from dlx import config as configs
from dlx.speech.frontend import FrontEnd
from dlx.speech.judge import NEEDS, Whisper
from dlx.speech.mel import MelConfig
from dlx.speech.vocoder import GriffinLim
from tacotron2 import evaluate, intelligibility, registry
from tacotron2.data import open_data
from tacotron2.model import Tacotron2, Tacotron2Config
from tacotron2.options import CONFIGS
from tacotron2.pretrained import Found
from tacotron2.recipe import TrainConfig

audio = pytest.importorskip("dlx.speech.audio", reason="needs soundfile")
TEXTS = ("one two three four", "five six seven", "eight nine")


@pytest.fixture
def split(tmp_path, monkeypatch):
    """Three tones with texts; caches of their own."""
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))
    for number in range(len(TEXTS)):
        time = np.arange(8000 + 2000 * number) / 22050
        audio.write_wav(tmp_path / f"{number}.wav", 0.3 * np.sin(2000 * time).astype(np.float32), 22050)
    lines = [f"{tmp_path}/{number}.wav|{text}" for number, text in enumerate(TEXTS)]
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    lists = {"train": tmp_path / "list.txt", "val": tmp_path / "list.txt"}
    return open_data(lists=lists, home=tmp_path / "home")["val"]


class Listener:
    """Hears the first two words of each recording, and the texts without their last word of what the voice says."""

    def __init__(self):
        self.heard = 0

    def transcribe(self, sound: np.ndarray, sample_rate: int) -> str:
        assert sound.ndim == 1 and sample_rate == 22050
        words = TEXTS[self.heard // 2].split()
        self.heard += 1
        return " ".join(words[:-1] if self.heard % 2 else words[:2])


@pytest.mark.filterwarnings("ignore:items")
def test_a_voice_is_judged_beside_the_recordings(split, tmp_path):
    torch.manual_seed(0)
    model = Tacotron2(Tacotron2Config(encoder=16, prenet=8, rnn=16, postnet=8, attention=8)).eval()
    model.decoder.gate.bias.data.fill_(-20)
    voice = Found(model, "tacotron2", MelConfig(), FrontEnd(), "fresh")
    vocoder = GriffinLim(iterations=2)
    options = (Listener(), 3, tmp_path / "said", torch.device("cpu"))
    measures, rows = intelligibility.judge_voice(voice, vocoder, split, *options)
    assert set(measures) == set(intelligibility.METRICS)
    assert measures["wer"] == pytest.approx(3 / 9) and measures["wer_recordings"] == pytest.approx(3 / 9)
    assert measures["wer_ratio"] == pytest.approx(1) and measures["unfinished"] == 3
    assert [row["errors"] for row in rows] == [1, 1, 1] and rows[0]["heard_recording"] == "one two"
    assert all((tmp_path / row["audio"]).is_file() for row in rows)


def test_what_cannot_be_judged_is_refused():
    config = evaluate.EvaluateConfig(checkpoint="x")
    vocoder = Found(registry.build("waveglow_compact"), "waveglow_compact", MelConfig(), None, "fresh")
    with pytest.raises(ValueError, match="a judge listens to a voice on real utterances"):
        evaluate._listen(config, vocoder, None, torch.device("cpu"))


def test_the_recipe_for_a_voice_of_flite():
    """It fits into 12 MB of half precision, and holds batches of few shapes."""
    config = configs.parse(TrainConfig, ["--config", "flite"], configs_dir=CONFIGS, prog="train")
    model = registry.build(config.arch)
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) < 12e6
    longest = int(config.max_seconds * 22050 / 256) + 1
    assert config.mel_buckets[-1] >= longest and len(config.text_buckets) * len(config.mel_buckets) <= 16


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason=f"needs the package {NEEDS}")
def test_copies_are_understood_as_well_as_recordings(tmp_path):
    """The way through spectrograms and Griffin-Lim costs a recogniser little: what a perfect voice would reach."""
    from dlx.speech import corpora, judge
    from dlx.speech.mel import MelSpectrogram

    folder = corpora.prepare("flite-speech", utterances=60, voices=("rms",))
    recogniser, mel, vocoder = Whisper.open(), MelSpectrogram(), GriffinLim()
    rates = []
    for copied in (False, True):
        texts, heard = [], []
        for utterance in corpora.read(folder)["train"][:6]:
            sound, rate = audio.read(utterance.path, 22050)
            if copied:
                sound = vocoder(mel(torch.from_numpy(sound)[None]))[0].numpy()
            texts.append(utterance.text)
            heard.append(recogniser.transcribe(sound, rate))
        rates.append(judge.word_error_rate(texts, heard))
    assert rates[0] < 0.25 and rates[1] < rates[0] + 0.15, json.dumps(rates)
