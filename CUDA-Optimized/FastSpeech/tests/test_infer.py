"""Saying texts: marks, speed, pauses, long texts, files; a voice that is tiny and fresh."""

import json

import numpy as np
import pytest
import torch

from dlx.speech import audio
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.symbols import UnpronounceableText
from dlx.speech.vocoder import GriffinLim
from fastspeech import infer
from fastspeech.markup import pieces
from fastspeech.model import FastSpeech, FastSpeechConfig
from fastspeech.pretrained import Found, describe
from fastspeech.synthesis import Synthesizer

TINY = FastSpeechConfig(channels=16, head_channels=8, feed_forward=16, encoder_blocks=1, decoder_blocks=1, predictor=8)


def voice():
    torch.manual_seed(0)
    model = FastSpeech(TINY).eval()
    with torch.no_grad():
        model.durations.output.bias.fill_(1.5)
        model.durations.output.weight.mul_(0.2)
    return Found(model, "fastspeech", MelConfig(), FrontEnd(), "fresh")


@pytest.fixture
def speaker():
    return Synthesizer(voice(), GriffinLim(iterations=1), batch_size=3)


def read(front_end, piece):
    return front_end.symbols.decode(piece.symbols)


def test_marks():
    front_end = FrontEnd()
    (piece,) = pieces(front_end, "I *really:2* mean 2 *things*, [500ms] Bob.")
    text = read(front_end, piece)
    assert text == " i really mean two things, bob." and len(text) == len(piece.emphasis) == len(piece.pauses)
    start = text.index("really")
    assert piece.emphasis[start : start + 6] == [2.0] * 6 and piece.emphasis[text.index("things")] == 1.4
    assert sum(value != 1 for value in piece.emphasis) == 6 + 6  # and no space
    assert piece.pauses[text.index(",")] == 0.5 and sum(piece.pauses) == 0.5


def test_pauses_between_sentences():
    front_end = FrontEnd()
    first, second = pieces(front_end, "[1s] One. [1.5s] Two [250ms]")
    assert read(front_end, first) == " one." and read(front_end, second) == " two."
    assert first.pauses == [1.0, 0, 0, 0, 1.5] and second.pauses == [0, 0, 0, 0.25, 0]
    (plain,) = pieces(front_end, "One [and] 3 * 4")
    assert sum(plain.pauses) == 0 and set(plain.emphasis) == {1.0}
    unled = pieces(front_end, "One.", lead=False)[0]
    assert read(front_end, unled) == "one."


@pytest.mark.parametrize(
    ("text", "why"),
    [("[11s] a", "at most 10 s"), ("*a:9*", "between 0.2 and 5"), ("*!* [1s]", "nothing of"), ("*{AH0}* b", "braces")],
)
def test_marks_out_of_range(text, why):
    with pytest.raises(ValueError, match=why):
        pieces(FrontEnd(), text)
    with pytest.raises(UnpronounceableText):
        pieces(FrontEnd(), "?!")


def test_long_texts_are_parted_and_joined(speaker):
    text = " ".join(f"This is sentence number {number}, and it goes on." for number in range(9))
    (speech,) = speaker([text])
    assert len(speech.chunks) == 9 and all(chunk.text.endswith(".") for chunk in speech.chunks)
    frames = sum(chunk.frames for chunk in speech.chunks)
    assert speech.mel.shape == (80, frames) and speech.sample_rate == 22050
    assert len(speech.audio) == frames * 256 + 8 * round(0.15 * 22050)
    assert speaker.timing.sound == pytest.approx(frames * 256 / 22050) and speaker.timing.real_time_factor > 0


def test_a_text_sounds_alike_in_any_batch(speaker):
    texts = ["One two three.", "A much longer text than the others of its batch.", "Ho."]
    together, alone = speaker(texts), [speaker([text])[0] for text in texts]
    for one, two in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.mel, two.mel, atol=1e-4)
        assert one.chunks[0].durations.tolist() == two.chunks[0].durations.tolist()


def test_speed_emphasis_and_pauses(speaker):
    text = "Some words are said."
    plain, slow, fast = (speaker([text], speed=speed)[0] for speed in (1.0, 0.5, 2.0))
    assert slow.mel.shape[1] == pytest.approx(2 * plain.mel.shape[1], rel=0.15)
    assert fast.mel.shape[1] == pytest.approx(plain.mel.shape[1] / 2, rel=0.25)
    (loud,) = speaker(["Some *words:2* are said."])
    (late,) = speaker(["Some words [1s] are said."])
    before, after = plain.chunks[0].durations, loud.chunks[0].durations
    word = slice(6, 11)  # " some words"
    assert after[word].sum() >= 1.6 * before[word].sum() and (after[11:] == before[11:]).all()
    assert late.chunks[0].frames - plain.chunks[0].frames == round(22050 / 256)
    many = speaker([text, text], speed=[1.0, 0.5])
    assert [speech.mel.shape[1] for speech in many] == [plain.mel.shape[1], slow.mel.shape[1]]
    with pytest.raises(ValueError, match="between 0.25 and 4, got 9"):
        speaker([text], speed=9)


def test_what_cannot_be_said_is_told_at_once(speaker):
    with pytest.raises(ValueError, match=r"(?s)b:2: nothing of '!!'.*b:3: nothing"):
        speaker(["Fine.", "!!", "..."], ["b:1", "b:2", "b:3"])


def test_files(tmp_path, monkeypatch):
    found = voice()
    monkeypatch.setattr(infer.pretrained, "load", lambda *args, **options: found)
    (tmp_path / "texts.txt").write_text("First one.\n\nSecond *one*.\n")
    content = infer.main(
        ["--checkpoint", "x", "-i", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "said"), "--device", "cpu"]
        + ["--vocoder", "griffin-lim", "--speed", "1.5"]
    )
    assert json.loads((tmp_path / "said" / "infer.json").read_text()) == content and content["speed"] == 1.5
    assert content["form"] == "plain" and content["precision"] == "float32"
    assert [entry["text"] for entry in content["texts"]] == ["First one.", "Second *one*."]
    for entry in content["texts"]:
        sound, rate = audio.read(tmp_path / "said" / entry["audio"])
        assert rate == 22050 and len(sound) / rate == pytest.approx(entry["seconds"], abs=1e-3)
        assert (tmp_path / "said" / entry["picture"]).stat().st_size > 5000
    with pytest.raises((ValueError, SystemExit)):
        infer.main(["--checkpoint", "x", "--device", "cpu"])


def test_without_a_compiler_the_plain_form_speaks(monkeypatch):
    from fastspeech import synthesis

    real = synthesis.engines.build

    def build(model, form):
        if form != "plain":
            raise synthesis.BuildError("nvcc was not found")
        return real(model, form)

    monkeypatch.setattr(synthesis.engines, "build", build)
    with pytest.warns(UserWarning, match="plain form: nvcc was not found"):
        assert synthesis.engine_of(voice().model, "auto").form == "plain"
    with pytest.raises(ValueError, match="form graph: nvcc was not found"):
        synthesis.engine_of(voice().model, "graph")


def test_a_form_that_is_not_installed_is_said_in_a_line(monkeypatch):
    from fastspeech.tensorrt import layers

    def missing():
        raise ImportError("TensorRT is not installed")

    monkeypatch.setattr(layers, "load", missing)
    with pytest.raises(ValueError, match="form tensorrt: TensorRT is not installed"):
        Synthesizer(voice(), GriffinLim(iterations=1), form="tensorrt")


def test_a_voice_says_how_its_texts_begin():
    assert describe("fastspeech", MelConfig(), FrontEnd())["preprocessing"]["leads"] is True
    found = voice()
    found.leads = False
    (speech,) = Synthesizer(found, GriffinLim(iterations=1))(["One."])
    assert len(speech.chunks[0].durations) == 4
