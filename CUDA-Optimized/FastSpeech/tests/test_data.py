"""Batches are what the files hold with true durations; order resumes; durations from a folder and from learning."""

import numpy as np
import pytest
import torch

from dlx.loading import DataError
from dlx.speech import audio, corpora
from dlx.speech.datasets import Synthetic, open_data
from fastspeech import prepare
from fastspeech.data import Batch, TimedSplit, add_durations, build_loader

COUNT = 23
PHONES = {"say": "s ey", "ah": "aa", "now": "n aw"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Tones of 16 kHz with made-up phones in the shared layout."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = ["\t".join(corpora.COLUMNS)]
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        words = ["say", *["ah"] * int(generator.integers(1, 9)), "now"]
        phones = ["pau", *(phone for word in words for phone in PHONES[word].split()), "pau"]
        ends = np.cumsum(generator.uniform(0.04, 0.12, len(phones))).round(3)
        time = np.arange(round(ends[-1] * 16000)) / 16000
        audio.write_wav(folder / "wavs" / f"{number}.wav", 0.2 * np.sin(700 * time * (1 + number)), 16000)
        timed = " ".join(f"{phone}:{end:.3f}" for phone, end in zip(phones, ends, strict=True))
        split = "val" if number % 5 == 4 else "train"
        text = " ".join(words).capitalize()
        rows.append("\t".join([f"u{number}", split, f"wavs/{number}.wav", "anna", str(ends[-1]), text, timed]))
    (folder / "metadata.tsv").write_text("\n".join(rows) + "\n")
    (folder / "corpus.json").write_text('{"key": "test"}')
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def plain(corpus, home):
    return open_data(corpus, home=home, mel_dtype="float32")


@pytest.fixture(scope="module")
def splits(plain):
    return add_durations(plain)


def loader(splits, split="train", **settings):
    return build_loader(split, data=splits, **{"batch_size": 4, "train": split == "train", "seed": 3} | settings)


def test_a_batch_holds_text_durations_and_frames(splits):
    split = splits["train"]
    assert isinstance(split, TimedSplit) and len(split) == 19 and len(splits["val"]) == 4
    batch = loader(splits).read(np.array([3, 0, -1]))
    assert isinstance(batch, Batch)
    for row, index in enumerate((3, 0)):
        symbols, frames = int(batch.text_lengths[row]), int(batch.mel_lengths[row])
        text = split.front_end.symbols.decode(batch.text[row, :symbols].tolist())
        assert text == " " + split.utterances[index].text.lower() + "."
        assert int(batch.durations[row].sum()) == frames == int(split.frames[index])
        expected = split.mels.get(split.utterances[index].path)
        assert np.array_equal(batch.mel[row, :, :frames].numpy(), expected) and (batch.mel[row, :, frames:] == 0).all()
        assert (batch.text[row, symbols:] == 0).all() and (batch.durations[row, symbols:] == 0).all()
        # "say": s, then ey of a or y; the pause before them is the leading space's.
        ends = [round(end * 22050 / 256) for _, end in split.utterances[index].phones]
        assert batch.durations[row, 0] == ends[0] and batch.durations[row, 1] == ends[1] - ends[0]
        assert batch.durations[row, 2:4].sum() == ends[2] - ends[1]
    assert int(batch.text_lengths[2]) == 1 and int(batch.mel_lengths[2]) == int(batch.durations[2].sum()) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumes_exactly(splits, workers):
    whole = loader(splits, workers=workers)
    whole.set_epoch(2)
    batches = list(whole)
    assert len(batches) == len(whole) == 4
    rest = loader(splits, workers=0)
    rest.set_epoch(2, 1)
    for mine, theirs in zip(rest, batches[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_resident_spectrograms_are_the_same_and_read_once(splits, monkeypatch):
    once, kept = list(loader(splits)), loader(splits, resident=True, workers=0)
    first = list(kept)
    monkeypatch.setattr(splits["train"].mels, "get", None)
    for batches in (first, list(kept)):
        for mine, theirs in zip(batches, once, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_buckets_give_few_shapes(splits):
    found = list(loader(splits, text_buckets=(40,), mel_buckets=(70, 250)))
    assert {batch.mel.shape[2] for batch in found} <= {70, 250}
    assert {batch.text.shape[1] for batch in found} == {batch.durations.shape[1] for batch in found} == {40}
    with pytest.raises(DataError, match="more than the largest bucket of 5"):
        loader(splits, mel_buckets=(5,))


def test_synthetic_batches_are_whole():
    data = add_durations({"train": Synthetic("train", 8, text_length=7, mel_length=30)})
    batch = next(iter(build_loader("train", data=data, batch_size=4, train=True)))
    assert batch.mel.shape == (4, 80, 30) and batch.durations.sum(1).tolist() == [30] * 4
    assert (batch.text > 0).all() and batch.text_lengths.tolist() == [7] * 4


def test_durations_of_a_folder(plain, splits, tmp_path):
    for split in splits.values():
        for index, utterance in enumerate(split.utterances):
            symbols, frames = len(split.text[index]), int(split.frames[index])
            led = index % 3 != 0
            true = np.diff(np.linspace(0, frames, symbols + led).round().astype(int))
            weights = np.eye(len(true))[np.repeat(np.arange(len(true)), true)]
            np.save(tmp_path / f"{utterance.id}.npy", weights if index % 2 else true)
    found = add_durations(plain, str(tmp_path))
    for name, split in found.items():
        for index in range(len(split)):
            stored = np.load(tmp_path / f"{split.utterances[index].id}.npy")
            expected = (stored.sum(0) if stored.ndim == 2 else stored).tolist()
            assert split.durations[index].tolist() == ([] if index % 3 else [0]) + expected, name
    np.save(tmp_path / "u0.npy", np.array([3, 4]))
    with pytest.raises(DataError, match=r"0\.wav: 2 durations of \d+ symbols"):
        add_durations(plain, str(tmp_path))
    (tmp_path / "u0.npy").unlink()
    with pytest.raises(DataError, match=r"u0\.npy"):
        add_durations(plain, str(tmp_path))
    with pytest.raises(DataError, match="neither a folder nor one of auto"):
        add_durations(plain, "phonems")


def test_learnt_durations_are_kept(plain, home, monkeypatch):
    first = add_durations(plain, "learned", steps=2, home=home)
    assert all((row > 0).all() for row in first["train"].durations)
    monkeypatch.setattr("fastspeech.aligner.learn", None)  # what is there is not learnt again
    again = add_durations(plain, "learned", steps=2, home=home)
    for name in first:
        for one, two in zip(first[name].durations, again[name].durations, strict=True):
            assert np.array_equal(one, two)


def test_prepare_reports(corpus, home, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DLX_HOME", str(home))
    report = prepare.main(["--data", str(corpus), "--device", "cpu", "--output_dir", str(tmp_path)])
    assert report["durations"]["train"]["silent"] > 0 and "frames per symbol" in capsys.readouterr().out
