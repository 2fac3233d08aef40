"""Data for training: batches are what the files hold, in an order that resumes; lists and corpora; the prepare verb."""

import json
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlx.loading import DataError
from dlx.speech import audio, corpora
from dlx.speech.mel import MelConfig, MelSpectrogram
from tacotron2 import options, prepare
from tacotron2.data import AudioBatch, TextMelBatch, build_loader, open_data

COUNT = 23


def vowel(seconds, pitch):
    time = np.arange(round(seconds * 16000)) / 16000
    return sum(np.sin(2 * np.pi * pitch * h * time) / h for h in range(1, 20)) * 0.2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of vowels of 16 kHz in the shared layout."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = ["\t".join(corpora.COLUMNS)]
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        split = "val" if number % 5 == 4 else "train"
        seconds = round(float(generator.uniform(0.4, 1.2)), 3)
        audio.write_wav(folder / "wavs" / f"{number}.wav", vowel(seconds, 80 + 5 * number), 16000)
        text = "Say " + "ah " * int(generator.integers(1, 9)) + "now"
        rows.append("\t".join([str(number), split, f"wavs/{number}.wav", "anna", str(seconds), text, ""]))
    (folder / "metadata.tsv").write_text("\n".join(rows) + "\n")
    (folder / "corpus.json").write_text('{"key": "test"}')
    return folder


@pytest.fixture(scope="module")
def splits(corpus, tmp_path_factory):
    return open_data(corpus, home=tmp_path_factory.mktemp("home"), mel_dtype="float32")


def loader(splits, split="train", **settings):
    return build_loader(split, data=splits, **{"batch_size": 4, "train": split == "train", "seed": 3} | settings)


def test_a_batch_is_what_the_files_hold(splits):
    split = splits["train"]
    assert len(split) == 19 and len(splits["val"]) == 4
    spectrogram = MelSpectrogram()
    indices = np.array([3, 0, 11])
    batch = loader(splits).read(indices)
    assert isinstance(batch, TextMelBatch) and batch.text.dtype == batch.mel_lengths.dtype == torch.int64
    for row, index in enumerate(indices):
        utterance = split.utterances[index]
        sound, _ = audio.read(utterance.path, 22050)
        expected = spectrogram(torch.from_numpy(sound)[None])[0]
        length = int(batch.mel_lengths[row])
        assert length == expected.shape[1] == MelConfig().frames(len(sound))
        torch.testing.assert_close(batch.mel[row, :, :length], expected, atol=1e-5, rtol=0)
        assert (batch.mel[row, :, length:] == 0).all()
        assert batch.gate[row].tolist() == [0.0] * (length - 1) + [1.0] * (batch.gate.shape[1] - length + 1)
        symbols = batch.text[row, : batch.text_lengths[row]]
        assert split.front_end.symbols.decode(symbols.tolist()) == utterance.text.lower() + "."
        assert (batch.text[row, batch.text_lengths[row] :] == 0).all()
    assert batch.mel.shape == (3, 80, int(batch.mel_lengths.max())) and batch.text.shape[1] == int(
        batch.text_lengths.max()
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["text-mel", "audio"])
def test_an_epoch_resumes_exactly(splits, kind, workers):
    whole = loader(splits, kind=kind, workers=workers)
    whole.set_epoch(2)
    batches = list(whole)
    assert len(batches) == len(whole) == 4
    rest = loader(splits, kind=kind, workers=0, epoch=2, start_batch=1)
    for mine, theirs in zip(rest, batches[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    whole.set_epoch(3)
    assert not torch.equal(next(iter(whole))[0], batches[0][0])


def test_ranks_share_an_epoch(splits):
    parts = [list(loader(splits, batch_size=2, world_rank=rank, world_size=2)) for rank in range(2)]
    whole = list(loader(splits, batch_size=4))
    for number, batch in enumerate(whole):
        lengths = sorted(torch.cat([part[number].mel_lengths for part in parts]).tolist())
        assert lengths == sorted(batch.mel_lengths.tolist())


def test_evaluation_takes_everything_once(splits):
    lengths = []
    for rank in range(3):
        for batch in loader(splits, "val", batch_size=1, world_rank=rank, world_size=3):
            lengths += batch.mel_lengths.tolist()
            if not int(batch.mel_lengths):
                assert batch.text.tolist() == [[0]] and batch.mel.shape == (1, 80, 1) and int(batch.gate) == 1
    assert sorted(lengths) == [0, 0, *sorted(splits["val"].frames.tolist())]


def test_fixed_buckets_give_few_shapes(splits):
    found = loader(splits, text_buckets=(40,), mel_buckets=(70, 110))
    assert {batch.mel.shape[2] for batch in found} <= {70, 110}
    assert {batch.text.shape[1] for batch in found} == {40}
    free, fixed = next(iter(loader(splits))), next(iter(found))
    width = free.mel.shape[2]
    assert torch.equal(free.mel, fixed.mel[:, :, :width]) and (fixed.gate[:, width:] == 1).all()
    with pytest.raises(DataError, match=r"wav: \d+ frames, more than the largest bucket of 60"):
        loader(splits, mel_buckets=(60,))
    with pytest.raises(DataError, match="symbols, more than"):
        loader(splits, text_buckets=(10,))


def test_pieces_of_sound(splits):
    found = loader(splits, kind="audio", segment=6000, workers=0)
    batch = next(iter(found))
    assert isinstance(batch, AudioBatch) and batch.audio.shape == (4, 6000) and batch.audio.dtype == torch.float32
    whole, _ = audio.read(splits["train"].utterances[5].path, 22050)
    starts = set()
    for epoch in range(6):
        piece = found.read((epoch, np.array([5]))).audio[0].numpy()
        error = [np.abs(whole[start : start + 6000] - piece).max() for start in range(len(whole) - 5999)]
        assert min(error) < 1e-4
        starts.add(int(np.argmin(error)))
    assert len(starts) > 3
    long = loader(splits, kind="audio", segment=40000, workers=0).read((0, np.array([5, -1])))
    assert long.lengths.tolist() == [len(whole), 0] and (long.audio[0, len(whole) :] == 0).all()
    val = loader(splits, "val", kind="audio", workers=0)
    first = list(val)
    val.set_epoch(7)
    assert all(torch.equal(a.audio, b.audio) for a, b in zip(first, val, strict=True))


def test_a_file_that_changes_is_noticed(corpus, tmp_path):
    audio.write_wav(tmp_path / "a.wav", vowel(1, 100), 16000)
    (tmp_path / "x.txt").write_text("a.wav|Ah\n")
    splits = open_data(lists={"train": tmp_path / "x.txt"}, home=tmp_path)
    audio.write_wav(tmp_path / "a.wav", vowel(2, 100), 16000)
    with pytest.raises(DataError, match="a.wav: the file has changed"):
        loader(splits, batch_size=1).read(np.array([0]))


def test_lists_are_checked_before_anything_is_made(corpus, tmp_path):
    (tmp_path / "train.txt").write_text(f"{corpus}/wavs/0.wav|Ah.\n{corpus}/wavs/none.wav|Oh.\n")
    (tmp_path / "val.txt").write_text(f"{corpus}/wavs/1.wav|Ah, 日.\n")
    lists = {"train": tmp_path / "train.txt", "val": tmp_path / "val.txt"}
    with pytest.raises(ValueError) as error:
        open_data(lists=lists, home=tmp_path, resample=False)
    for place in ("train.txt:1: ", "train.txt:2: ", "val.txt:1: "):
        assert place in str(error.value)
    assert "16000 Hz, not 22050 Hz" in str(error.value) and not (tmp_path / "speech").exists()
    (tmp_path / "val.txt").write_text(f"{corpus}/wavs/1.wav|Ah.\n")
    splits = open_data(lists=lists, home=tmp_path, tolerant=True)
    assert len(splits["train"]) == 1 and "none.wav" in splits["train"].skipped[0][1]


def test_limits_of_length(corpus, tmp_path):
    splits = open_data(corpus, home=tmp_path, min_seconds=0.6, max_seconds=1.0)
    kept = splits["train"].utterances + splits["val"].utterances
    assert all(0.6 <= utterance.seconds <= 1 for utterance in kept)
    assert len(splits["train"].skipped) == COUNT - len(kept) > 0
    with pytest.raises(DataError, match="not one of 19 utterances of train lasts 5 to 6 s"):
        open_data(corpus, home=tmp_path, min_seconds=5, max_seconds=6)
    with pytest.raises(DataError, match="neither a folder nor one of flite-speech"):
        open_data("flite-speach")
    with pytest.raises(DataError, match="no split 'test', only train, val"):
        loader(splits, "test")
    with pytest.raises(ValueError, match="loader kind 'mel'"):
        loader(splits, kind="mel")


def test_synthetic_batches():
    splits = open_data("synthetic", synthetic={"size": 10, "text_length": 12, "mel_length": 30})
    batches = list(loader(splits))
    assert len(batches) == 2 and batches[0].text.shape == (4, 12) and batches[0].mel.shape == (4, 80, 30)
    assert int(batches[0].text.min()) >= 1 and batches[0].gate.sum() == 4
    assert next(iter(loader(splits, kind="audio", segment=99))).audio.shape == (4, 99)


# Options and the verb


def test_options(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    config = options.DataOptions(data=str(corpus), batch_size=3, hop_length=200, num_mels=40)
    assert config.mel() == MelConfig(hop_length=200, num_mels=40)
    splits = config.open()
    world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    batch = next(iter(config.loader("train", splits, True, world)))
    assert batch.mel.shape[:2] == (3, 40)
    assert config.identity(splits) == {str(corpus): corpora.identity(corpus)}
    with pytest.raises(ValueError, match="train_list and val_list go together"):
        options.DataOptions(train_list="x")
    with pytest.raises(ValueError, match="alphabet of your own goes with cleaner basic"):
        options.DataOptions(alphabet="абв")
    table = options.DataOptions(alphabet="абв", cleaner="basic").front_end().symbols
    assert table.decode(table.encode("баба")) == "баба"


def test_prepare(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))
    lists = {}
    for split, numbers in (("train", range(6)), ("val", range(6, 8))):
        lists[split] = tmp_path / f"{split}.txt"
        lists[split].write_text("".join(f"{corpus}/wavs/{n}.wav|Say ah.\n" for n in numbers))
    output = tmp_path / "report"
    arguments = ["--train_list", str(lists["train"]), "--val_list", str(lists["val"]), "--output_dir", str(output)]
    report = prepare.main(arguments)
    assert "train: 6 utterances" in capsys.readouterr().out
    assert report["splits"]["train"]["utterances"] == 6 and report["frames"]["val"] > 0
    assert json.loads((output / "data.json").read_text()) == report
    assert (output / "data.png").read_bytes().startswith(b"\x89PNG") and "sound (8 files" in (
        output / "data.txt"
    ).read_text()
    texts = (output / "sounds" / "texts.txt").read_text().splitlines()
    assert len(texts) == 4 + 2
    with wave.open(str(output / "sounds" / texts[0].split("|")[0])) as file:
        assert file.getframerate() == 16000
    lists["val"].write_text("nothing.wav|Ah\n")
    with pytest.raises(ValueError, match="val.txt:1"):
        prepare.main(arguments)
