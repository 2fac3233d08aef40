"""The user's own lists (case O20), the cache of spectrograms, the report on a corpus, batches by length."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
soundfile = pytest.importorskip("soundfile", reason="sound files need the package soundfile")

from dlx.loading import DataError, Plan  # noqa: E402
from dlx.speech import audio, overview  # noqa: E402
from dlx.speech.batching import BucketPlan, ahead, bucket, pad  # noqa: E402
from dlx.speech.corpora import Utterance  # noqa: E402
from dlx.speech.feature_cache import FeatureCache, mel_cache, sound_cache  # noqa: E402
from dlx.speech.filelists import ListError, read_lists, summary  # noqa: E402
from dlx.speech.frontend import FrontEnd  # noqa: E402
from dlx.speech.mel import MelConfig, MelSpectrogram  # noqa: E402
from dlx.speech.symbols import SymbolTable  # noqa: E402


def tone(seconds=0.5, rate=22050, amplitude=0.3, frequency=220):
    return amplitude * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "wavs").mkdir()
    for name in "abcdef":
        soundfile.write(tmp_path / "wavs" / f"{name}.wav", tone(0.4 + 0.1 * ord(name) % 0.5), 22050)
    return tmp_path


# O20


def test_a_list_of_a_windows_editor(folder):
    content = "\ufeffwavs/a.wav|Hello there.\r\nwavs/b.wav| Two words \r\n\r\n"
    (folder / "train.txt").write_bytes(content.encode())
    found = read_lists({"train": folder / "train.txt"}, front_end=FrontEnd(), sample_rate=22050)
    assert [(u.id, u.path, u.text) for u in found.splits["train"]] == [
        ("train-00000", folder / "wavs/a.wav", "Hello there."), ("train-00001", folder / "wavs/b.wav", "Two words"),
    ]  # fmt: skip
    assert found.splits["train"][0].seconds == pytest.approx(audio.duration(folder / "wavs/a.wav")[0])
    (folder / "named.txt").write_text("wavs/a.wav|Hello.|anna\n")
    (anna,) = read_lists({"train": folder / "named.txt"}, speakers=True).splits["train"]
    assert anna.speaker == "anna"


def test_every_fault_in_one_report(folder):
    soundfile.write(folder / "wavs/rate.wav", tone(rate=16000), 16000)
    soundfile.write(folder / "wavs/short.wav", tone(0.01), 22050)
    soundfile.write(folder / "wavs/long.wav", tone(31, 22050), 22050)
    (folder / "wavs/bad.wav").write_bytes(b"no sound")
    lines = [
        "wavs/a.wav|Good.", "wavs/none.wav|Missing.", "wavs/b.wav|one|two|three", "wavs/c.wav|", "just a line",
        "wavs/rate.wav|Rate.", "wavs/short.wav|Short.", "wavs/long.wav|Long.", "wavs/bad.wav|Bad.",
        "wavs/a.wav|Again.", "wavs/d.wav|日本", "wavs/e.wav|?!",
    ]  # fmt: skip
    (folder / "train.txt").write_bytes("\n".join(lines).encode() + b"\nwavs/f.wav|caf\xe9\n")
    (folder / "val.txt").write_text("wavs/a.wav|Seen in training.\nwavs/f.wav|Fine.\n")
    options = {"front_end": FrontEnd(), "sample_rate": 22050}
    lists = {"train": folder / "train.txt", "val": folder / "val.txt"}
    with pytest.raises(ListError) as error:
        read_lists(lists, **options)
    expected = [
        (2, "none.wav: there is no such file"), (3, "3 times '|', expected file|text"), (4, "the text is empty"),
        (5, "0 times '|'"), (6, "sample rate is 16000 Hz, not 22050 Hz"), (7, "lasts 0.01 s, not between 0.1 and 30"),
        (8, "lasts 31.00 s"), (9, "bad.wav: not a readable sound file"), (10, "listed before, in "), (11, "日"),
        (12, "nothing to say"), (13, "not UTF-8"),
    ]  # fmt: skip
    faults = error.value.faults
    assert len(faults) == 13 and isinstance(error.value, ValueError)
    for fault, (number, words) in zip(faults, expected, strict=False):
        assert fault.startswith(f"{folder / 'train.txt'}:{number}: ") and words in fault
        assert fault in str(error.value)
    assert faults[12].startswith(f"{folder / 'val.txt'}:1: ") and "train.txt:1" in faults[12]
    found = read_lists(lists, **options, tolerant=True)
    assert [u.text for u in found.splits["train"]] == ["Good."] and [u.text for u in found.splits["val"]] == ["Fine."]
    assert len(found.faults) == 13 and "x" in summary(found.faults)


def test_lists_without_a_good_line(folder):
    (folder / "train.txt").write_text("wavs/none.wav|Missing.\n")
    with pytest.raises(ListError, match=r"train.txt: no usable line"):
        read_lists({"train": folder / "train.txt"}, tolerant=True)
    with pytest.raises(ListError, match="there is no such list"):
        read_lists({"train": folder / "absent.txt"})
    (folder / "long.txt").write_text("x\n" * 150)
    with pytest.raises(ListError, match="151 faults(.|\n)*and 51 more"):
        read_lists({"train": folder / "long.txt"})


def test_symbols_outside_the_table(folder):
    (folder / "train.txt").write_text("wavs/a.wav|да, x\nwavs/b.wav|да\n")
    front_end = FrontEnd(SymbolTable.of_letters("адн"), "basic")
    with pytest.raises(ListError, match=r"train.txt:1: the symbol table lacks \['x'\]") as error:
        read_lists({"train": folder / "train.txt"}, front_end=front_end)
    assert len(error.value.faults) == 1


# Front end


def test_front_end():
    front_end = FrontEnd()
    assert front_end.symbols.decode(front_end.encode("Dr. Lee has 2 dogs")) == "doctor lee has two dogs."
    again = FrontEnd.from_dict(json.loads(json.dumps(front_end.to_dict())))
    assert again == front_end
    again.require_same(front_end)
    with pytest.raises(ValueError, match="different cleaners: english and basic"):
        front_end.require_same(FrontEnd(cleaner="basic"))
    with pytest.raises(ValueError, match="different symbol tables"):
        front_end.require_same(FrontEnd(SymbolTable.of_letters("abc")))
    with pytest.raises(ValueError, match="cleaner 'german'"):
        FrontEnd(cleaner="german")


def test_long_text_is_cleaned_in_pieces():
    text = "Dr. Lee paid $1,250.75 in 1984. \n\n?!\n\n" + "He has 12,345 sheep, 67 goats and 1 dog; " * 8
    pieces = FrontEnd().chunks(text, 80)
    assert pieces[0] == "doctor lee paid one thousand two hundred fifty dollars and seventy-five cents,"
    assert all(len(piece) <= 80 for piece in pieces) and all(piece[-1] in ".;,:-" for piece in pieces)

    def words(said):
        return said.translate(str.maketrans("", "", ".,;?!")).split()

    assert words(" ".join(pieces)) == words(FrontEnd(punctuation=False).clean(text))
    assert FrontEnd().chunks("Hi", 80) == ["hi."]
    with pytest.raises(ValueError, match="nothing of"):
        FrontEnd().chunks("?!", 80)
    with pytest.raises(ValueError, match="at least 2"):
        FrontEnd().chunks("Hi", 1)


# Cache


def test_spectrograms_are_kept(folder, tmp_path):
    path = folder / "wavs/a.wav"
    cache = mel_cache(MelConfig(), folder=tmp_path / "cache", dtype="float32")
    found = cache.get(path)
    expected = MelSpectrogram()(torch.from_numpy(audio.read(path)[0])[None])[0]
    np.testing.assert_array_equal(found, expected)
    cache.make = None  # from here on it must be the file's
    np.testing.assert_array_equal(cache.get(path), found)
    half = mel_cache(MelConfig(), folder=tmp_path / "cache")
    assert half.get(path).dtype == np.float32 and half.entry(path) != cache.entry(path)
    np.testing.assert_allclose(half.get(path), found, atol=0.005)
    assert half.shape(path) == found.shape == (80, MelConfig().frames(len(audio.read(path)[0])))


def test_the_cache_follows_content_and_recipe(folder, tmp_path):
    calls = []

    def make(path):
        calls.append(path)
        return np.array([len(calls)], np.float32)

    def cache(**recipe):
        return FeatureCache(recipe, make, folder=tmp_path / "cache")

    first = cache(a=1)
    a, b = folder / "wavs/a.wav", folder / "wavs/b.wav"
    assert [first.get(path)[0] for path in (a, b, a)] == [1, 2, 1]
    assert cache(a=1).get(a) == [1] and cache(a=2).get(a) == [3]
    a.write_bytes(b.read_bytes())  # the same path with what b holds
    assert first.get(a) == [2]
    entry = first.entry(b)
    for damage in (b"", b"garbage", entry.read_bytes()[:-2]):
        entry.write_bytes(damage)
        before = len(calls)
        assert first.get(b) == [before + 1]
    np.save(entry, np.array([{"code": 1}], object), allow_pickle=True)
    assert first.get(b) == [len(calls)]
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    with pytest.raises(audio.AudioError, match="none.wav"):
        first.get(folder / "none.wav")
    with pytest.raises(ValueError, match="float64"):
        FeatureCache({}, make, dtype="float64")


def test_filling(folder, tmp_path):
    paths = sorted((folder / "wavs").glob("*.wav"))
    seen = []
    cache = sound_cache(16000, folder=tmp_path / "cache")
    shapes = cache.fill(paths, threads=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 6) for n in range(1, 7)]
    assert shapes == [cache.get(path).shape for path in paths]
    np.testing.assert_allclose(cache.get(paths[0]) / 32767, audio.read(paths[0], 16000)[0], atol=2e-5)


# Report


def test_report(tmp_path):
    utterances = []
    for number, (seconds, amplitude) in enumerate([(1.0, 0.3), (2.0, 3.0), (3.0, 0.0)]):
        path = tmp_path / f"{number}.wav"
        sound = np.concatenate([tone(seconds / 2, amplitude=amplitude), np.zeros(round(seconds / 2 * 22050))])
        soundfile.write(path, sound, 22050)  # which clips the second
        utterances.append(Utterance(str(number), path, f"Text {number}ñ", "anna" if number else "bob", seconds))
    splits = {"train": utterances[:2], "val": utterances[2:]}
    report = overview.measure(splits, FrontEnd(cleaner="basic"))
    assert json.loads(json.dumps(report)) == report
    train = report["splits"]["train"]
    assert train["utterances"] == 2 and train["hours"] == pytest.approx(3 / 3600, abs=1e-4)
    assert train["seconds"] == {"min": 1.0, "median": 1.5, "mean": 1.5, "max": 2.0}
    assert sum(train["histogram"]) == 2 and sum(report["splits"]["val"]["histogram"]) == 1
    assert train["speakers"].keys() == {"anna", "bob"} and train["characters_per_second"] == pytest.approx(
        14 / 3, abs=0.01
    )
    sound = report["sound"]
    assert (sound["measured"], sound["clipped_files"], sound["silent_files"]) == (3, 1, 1)
    assert sound["clipped_examples"] == [str(utterances[1].path)]
    assert sound["silence_share"] == pytest.approx(4.5 / 6, abs=0.03)
    assert report["text"]["unknown"] == {"0": 1, "ñ": 3, "1": 1, "2": 1}
    assert report["text"]["alphabet"]["t"] == 6 and report["text"]["different_texts"] == 3
    text = overview.describe(report)
    assert "train: 2 utterances" in text and "1 of them clipped, e.g." in text and "'ñ' 3 x" in text
    path = overview.draw(report, tmp_path / "report.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    with pytest.raises(ValueError, match="no utterances"):
        overview.measure({"train": []})
    assert overview.measure(splits, sample=1)["sound"]["measured"] == 1


# Batches

LENGTHS = np.random.default_rng(0).integers(20, 900, 103)


def plan(**options):
    return BucketPlan(**{"count": 103, "batch_size": 4, "train": True, "seed": 5, "lengths": LENGTHS} | options)


def test_an_epoch_takes_every_utterance_once():
    batches = list(plan().batches(2))
    taken = np.concatenate(batches)
    assert len(batches) == len(plan()) == 25 and len(set(taken.tolist())) == 100
    assert not np.array_equal(taken, np.concatenate(list(plan().batches(3))))
    assert not np.array_equal(taken, np.concatenate(list(plan(seed=6).batches(2))))


def test_resuming_gives_the_same_batches():
    whole = list(plan().batches(4))
    for start in (0, 7, 24, 25):
        rest = list(plan().batches(4, start))
        assert len(rest) == 25 - start
        for mine, theirs in zip(rest, whole[start:], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_ranks_share_the_global_batch():
    whole = list(plan(batch_size=8).batches(1))
    parts = [list(plan(batch_size=2, rank=rank, world_size=4).batches(1)) for rank in range(4)]
    for number, batch in enumerate(whole):
        assert sorted(batch.tolist()) == sorted(np.concatenate([part[number] for part in parts]).tolist())


def test_buckets_save_padding():
    def padding(window):
        return sum(LENGTHS[b].max() * len(b) for b in plan(window=window).batches(0)) / LENGTHS.sum()

    assert padding(32) < 1.1 < 1.3 < padding(1)
    np.testing.assert_array_equal(
        np.concatenate(list(plan(window=1).batches(0))), np.concatenate(list(Plan(103, 4, True, 5).batches(0)))
    )


def test_evaluation_takes_all_from_the_longest():
    batches = list(plan(train=False, batch_size=5, world_size=3, rank=1).batches(0))
    everything = [b for rank in range(3) for b in plan(train=False, batch_size=5, world_size=3, rank=rank).batches(0)]
    assert sorted(np.concatenate(everything).tolist()) == [-1] * 2 + list(range(103))
    assert LENGTHS[batches[0]].min() >= LENGTHS[batches[1]].max()


def test_plans_that_make_no_sense():
    with pytest.raises(ValueError, match="3 lengths of 103"):
        plan(lengths=[1, 2, 3])
    with pytest.raises(ValueError, match="window"):
        plan(window=0)
    with pytest.raises(DataError, match="do not fill"):
        plan(batch_size=200)


def test_padding():
    rows = [np.ones((2, 3), np.float32), np.full((2, 1), 5, np.float32)]
    assert pad(rows, 4, -1).tolist() == [[[1, 1, 1, -1]] * 2, [[5, -1, -1, -1]] * 2]
    assert pad([np.array([7, 8])], 2).dtype == torch.int64
    assert [bucket(n, (64, 128)) for n in (1, 64, 65)] == [64, 64, 128] and bucket(77, ()) == 77
    with pytest.raises(DataError, match="129 is over the largest bucket, 128"):
        bucket(129, (64, 128))


@pytest.mark.parametrize("threads", [0, 3])
def test_work_is_done_ahead_in_order(threads):
    started = []

    def work(job):
        started.append(job)
        if job == 30:
            raise ValueError("job 30")
        return job * 2

    found = ahead(iter(range(100)), work, threads)
    assert [next(found) for _ in range(30)] == list(range(0, 60, 2))
    with pytest.raises(ValueError, match="job 30"):
        next(found)
    assert max(started) <= 30 + (0 if threads == 0 else 6)
    assert math.isfinite(len(started))


def test_threads_that_fill_the_cache_do_not_start_others(tmp_path):
    """Each computes on one thread; the caller's number is as before."""
    torch = pytest.importorskip("torch")
    paths = [tmp_path / f"{number}.bin" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    seen = []

    def make(path):
        seen.append(torch.get_num_threads())
        return np.zeros(3, np.float32)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert FeatureCache({}, make, folder=tmp_path / "cache").fill(paths, threads=3) == [(3,)] * 6
        assert seen == [1] * 6 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
