"""The whole way on sounds of our own making: train, evaluate, transcribe, stream, export, resume."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dlx.record import load
from dlx.speech import audio
from kaldi_asr import evaluate, export, infer, train
from kaldi_asr.recipe import TrainConfig
from kaldi_asr.recogniser import Recogniser
from kaldi_asr.streaming import StreamingRecogniser

RATE = 16000
TONES = {"A": 400, "B": 800, "C": 1400, "D": 2200, "E": 3200}  # each phone is a tone
LEXICON = "ab A B\ncd C D\neb E B\n"


def say(words, rng):
    """A waveform: a tone of 60 to 90 ms for each phone, silence of 150 ms around, a little noise."""
    parts = [np.zeros(2400)]
    for word in words:
        for phone in word.upper():
            count = int(RATE * rng.uniform(0.06, 0.09))
            parts.append(0.3 * np.sin(2 * np.pi * TONES[phone] * np.arange(count) / RATE))
    wave = np.concatenate([*parts, np.zeros(2400)])
    return wave + 0.003 * rng.standard_normal(len(wave))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    rng = np.random.default_rng(0)
    lines = []
    for number in range(60):
        words = [("ab", "cd", "eb")[k] for k in rng.integers(0, 3, rng.integers(2, 6))]
        audio.write_wav(folder / f"{number}.wav", say(words, rng), RATE)
        lines.append(f"{number}.wav|{' '.join(words)}|s{number % 2}")
    (folder / "list.txt").write_text("\n".join(lines))
    (folder / "lexicon.txt").write_text(LEXICON)
    return folder


def options(work, name, *more):
    return [
        "--data", "own", "--recordings", str(work / "list.txt"), "--data_dir", str(work / "data"), "--device", "cpu",
        "--lexicon", str(work / "lexicon.txt"), "--language", "own", "--order", "2", "--output_dir", str(work / name),
        "--mono_components", "30", "--leaves", "30", "--components", "40", "--lda", "20", "--hidden", "24",
        "--bottleneck", "12", "--epochs", "3", "--dilations", "[1, 3]", "--chunk", "40", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(work):
    return train.main(options(work, "run")), work / "run"


def test_training_learns_the_words(trained):
    fields, folder = trained
    values = {name: metric["value"] for name, metric in fields["metrics"].items()}
    assert fields["status"] == "finished" and values["test.gmm.wer"] < 5 and values["test.tdnn.wer"] < 5
    assert values["test.gmm.words"] > 15
    for name in ("record.json", "report.html", "recogniser.json", "graph/HCLG.fst", "lang/lm.arpa", "test-tdnn.txt"):
        assert (folder / name).is_file()


def test_training_again_makes_nothing_again(trained, work, capsys):
    fields, folder = trained
    before = (folder / "gmm" / "model.safetensors").stat().st_mtime_ns
    again = train.main(options(work, "run"))
    assert (folder / "gmm" / "model.safetensors").stat().st_mtime_ns == before
    assert again["metrics"]["val.loss"] == fields["metrics"]["val.loss"]


def test_stopped_and_resumed_is_uninterrupted(trained, work):
    fields, folder = trained
    steps = fields["metrics"]["steps"]["value"]
    train.main(options(work, "parts", "--max_steps", str(steps // 2), "--lr_schedule", "constant"))
    parts = train.main(options(work, "parts", "--lr_schedule", "constant"))
    whole = train.main(options(work, "whole", "--lr_schedule", "constant"))
    assert parts["metrics"]["steps"]["value"] == steps
    assert parts["metrics"]["val.loss"]["value"] == whole["metrics"]["val.loss"]["value"]


def test_evaluate_finds_the_test_set(trained, work):
    fields, folder = trained
    found = evaluate.main(["--checkpoint", str(folder), "--output_dir", str(work / "evaluate")])
    assert found["metrics"]["wer"]["value"] == fields["metrics"]["test.tdnn.wer"]["value"]
    assert load(work / "evaluate").value("words") == fields["metrics"]["test.tdnn.words"]["value"]
    gmm = ["--checkpoint", str(folder), "--acoustic", "gmm", "--output_dir", str(work / "evaluate-gmm")]
    assert evaluate.main(gmm)["metrics"]["wer"]["value"] == fields["metrics"]["test.gmm.wer"]["value"]
    with pytest.raises(ValueError, match="no recogniser.json"):
        evaluate.main(["--checkpoint", str(work)])


def test_transcribing_with_times_and_confidences(trained, work):
    _, folder = trained
    wave = say(["ab", "cd", "eb"], np.random.default_rng(5))
    path = work / "new.wav"
    audio.write_wav(path, wave, RATE)
    [found] = infer.main(
        ["--checkpoint", str(folder), "--audio", str(path), "--nbest", "3", "--output_dir", str(work / "infer")]
    )
    assert found["text"] == "ab cd eb"
    assert found["nbest"][0]["text"] == "ab cd eb" and all(0.5 < value <= 1 for value in found["confidences"])
    starts = [start for start, _ in found["times"]]
    assert starts[0] == pytest.approx(0.15, abs=0.05)  # after the silence
    assert sum(length for _, length in found["times"]) == pytest.approx(len(wave) / RATE - 0.3, abs=0.1)
    lines = (work / "infer" / "transcripts.ctm").read_text().splitlines()
    assert [line.split()[4] for line in lines] == ["ab", "cd", "eb"] and lines[0].startswith("new 1 0.1")


@pytest.mark.parametrize("size", [37, 160, 8160])
def test_a_stream_is_the_whole(trained, size):
    recogniser = Recogniser.load(trained[1])
    wave = say(["eb", "cd", "ab", "cd"], np.random.default_rng(6)).astype(np.float32)
    whole = recogniser.decoder.decode(recogniser.scores(wave))
    stream = StreamingRecogniser(recogniser)
    for start in range(0, len(wave), size):
        stream.accept(wave[start : start + size])
    found = stream.finish()
    assert found.words == whole.words == ["eb", "cd", "ab", "cd"]
    assert found.cost == pytest.approx(whole.cost, rel=1e-4)
    with pytest.raises(ValueError, match="finished"):
        stream.accept(wave)


def test_streams_of_nothing_end(trained):
    recogniser = Recogniser.load(trained[1])
    assert StreamingRecogniser(recogniser).finish().words == []
    assert recogniser.transcribe(np.zeros(100, np.float32)).words == []
    with pytest.raises(ValueError, match="GMMs only"):
        StreamingRecogniser(Recogniser.load(trained[1], "gmm"))


def test_export_has_what_a_decoder_needs(trained, work):
    values = export.main(["--checkpoint", str(trained[1]), "--output_dir", str(work / "export")])
    assert values["difference"] < 2e-3
    assert {p.name for p in (work / "export").iterdir()} == {
        "network.onnx", "HCLG.fst", "words.txt", "phones.txt", "transitions.txt", "export.json",
    }  # fmt: skip
    described = json.loads((work / "export" / "export.json").read_text())
    assert described["context"] == 6 and described["features"]["num_ceps"] == 40
    rows = [line.split() for line in (work / "export" / "transitions.txt").read_text().splitlines()]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert {int(row[3]) for row in rows} == set(range(described["num_pdfs"]))


def test_options_are_checked():
    with pytest.raises(ValueError, match="unknown data 'tedlium'"):
        train.run(TrainConfig(data="tedlium"))
