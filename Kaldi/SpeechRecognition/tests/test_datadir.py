"""Data folders: what is written is read, every fault has its line, what can be repaired is."""

from __future__ import annotations

import numpy as np
import pytest

from dlx.speech import audio
from kaldi_asr import augment, corpora, datadir, prepare
from kaldi_asr.options import SourceOptions
from kaldi_asr.words import words_of

RATE = 16000


@pytest.fixture
def folder(tmp_path):
    utterances = []
    for number in range(3):
        path = tmp_path / "wavs" / f"u{number}.wav"
        audio.write_wav(path, np.sin(np.arange(RATE) * (0.05 + number / 100)) * 0.3, RATE)
        utterances.append(datadir.Utterance(f"s{number % 2}-u{number}", path, ("a", "b"), f"s{number % 2}"))
    datadir.write(tmp_path / "data", utterances)
    return tmp_path / "data"


def test_what_is_written_is_read(folder):
    found = datadir.read(folder)
    assert [u.id for u in found] == ["s0-u0", "s0-u2", "s1-u1"]
    assert found[0].words == ("a", "b") and found[2].speaker == "s1"
    assert (folder / "spk2utt").read_text() == "s0 s0-u0 s0-u2\ns1 s1-u1\n"
    assert (folder / "wav.scp").read_text().startswith("s0-u0 ../wavs/u0.wav\n")
    assert len(datadir.load(found[0], RATE)) == RATE and not datadir.check(folder)


def test_segments_cut_recordings(tmp_path):
    path = tmp_path / "long.wav"
    audio.write_wav(path, np.linspace(-0.5, 0.5, 2 * RATE), RATE)
    parts = [
        datadir.Utterance("s-a", path, ("one",), "s", "long", 0.25, 0.75),
        datadir.Utterance("s-b", path, ("two",), "s", "long", 1.5, None),
    ]
    datadir.write(tmp_path / "data", parts)
    found = datadir.read(tmp_path / "data")
    assert [len(datadir.load(u, RATE)) for u in found] == [RATE // 2, RATE // 2]
    assert datadir.load(found[1], RATE)[0] == pytest.approx(0.25, abs=1e-3)


def broken(folder, name, text):
    (folder / name).write_text(text)
    return [str(fault).removeprefix(f"{folder}/") for fault in datadir.check(folder)]


def test_each_fault_has_its_line(folder):
    text = (folder / "text").read_text()
    assert broken(folder, "text", text + "s9-x who is this\n") == [
        "text:4: 's9-x' is not in utt2spk", "text:4: 's9-x' is not in wav.scp",
    ]  # fmt: skip
    assert broken(folder, "text", "s0-u2 a\ns0-u0 a\ns1-u1 a\n") == ["text:2: 's0-u0' comes after 's0-u2': not sorted"]
    assert broken(folder, "text", "s0-u0 a\ns0-u0 b\n\ns0-u2 a\ns1-u1 a\n") == [
        "text:2: 's0-u0' is already on line 1", "text:3: is an empty line",
    ]  # fmt: skip
    (folder / "text").write_text(text)
    scp = (folder / "wav.scp").read_text()
    assert broken(folder, "wav.scp", scp.replace("u1.wav", "u7.wav")) == [
        "wav.scp:3: there is no file '../wavs/u7.wav'"
    ]
    [fault] = broken(folder, "wav.scp", scp.replace("../wavs/u1.wav", "sox u1.wav -t wav - |"))
    assert fault.startswith("wav.scp:3: ") and "never programs" in fault
    (folder / "wav.scp").write_text(scp)
    assert broken(folder, "spk2utt", "s0 s0-u0\ns1 s1-u1\n") == [
        "spk2utt:1: speaker 's0' has not the utterances that utt2spk gives"
    ]
    assert broken(folder, "segments", "s0-u0 s0-u0 0.5 7\ns0-u2 s0-u2 3\ns1-u1 nothing 0 1\n")[:3] == [
        "segments:1: ends at 7.0 s, the recording at 1.000 s",
        "segments:2: 's0-u2 3' is not RECORDING START END in seconds",
        "segments:3: recording 'nothing' is not in wav.scp",
    ]


def test_reading_refuses_what_is_wrong(folder):
    (folder / "utt2spk").write_text("s0-u0 s0\n")
    with pytest.raises(ValueError, match=r"text:2: 's0-u2' is not in utt2spk \(and 3 more"):
        datadir.read(folder)


def test_fix_leaves_a_valid_folder(folder):
    (folder.parent / "wavs" / "u2.wav").write_bytes(b"no sound")
    (folder / "text").write_text("s1-u1   b  a \ns0-u0 a b\ns0-u2 a\nz-none a\n")
    (folder / "utt2spk").write_text("s0-u0 s0\n")
    done = datadir.fix(folder)
    assert not datadir.check(folder)
    found = datadir.read(folder)
    assert [(u.id, u.speaker, u.words) for u in found] == [
        ("s0-u0", "s0", ("a", "b")), ("s1-u1", "s1-u1", ("b", "a")),
    ]  # fmt: skip
    assert any("u2.wav" in line and "dropped" in line for line in done) and any("z-none" in line for line in done)
    assert (folder / ".backup" / "text").read_text().startswith("s1-u1   b")
    (folder / "text").write_text("other a\n")
    with pytest.raises(ValueError, match="no utterance has both"):
        datadir.fix(folder)


def test_verbs_validate_and_fix(folder, capsys):
    assert prepare.main(["--action", "validate", "--data_dir", str(folder)]) == 0
    (folder / "utt2spk").write_text("s0-u0 s0\n")
    assert prepare.main(["--action", "validate", "--data_dir", str(folder)]) == 1
    assert "text:2: 's0-u2' is not in utt2spk" in capsys.readouterr().out
    assert prepare.main(["--action", "fix", "--data_dir", str(folder)]) == 0
    assert prepare.main(["--action", "validate", "--data_dir", str(folder)]) == 0


def test_own_recordings(tmp_path):
    lines = []
    for number in range(8):
        audio.write_wav(tmp_path / f"{number}.wav", np.ones(RATE) * 0.1, RATE)
        lines.append(f"{number}.wav|Number {number}, please.|Ann Lee")
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    options = SourceOptions(data="own", recordings=str(tmp_path / "list.txt"), data_dir=str(tmp_path / "made"))
    made = corpora.prepare(options)
    everything = [u for name in corpora.SPLITS for u in datadir.read(made / name)]
    assert len(everything) == 8 and {u.speaker for u in everything} == {"Ann-Lee"}
    assert {u.words[0] for u in everything} == {"number"} and all(len(u.words) == 3 for u in everything)
    (tmp_path / "list.txt").write_text("0.wav|fine\nnone.wav|text\n1.wav\n")
    options = SourceOptions(data="own", recordings=str(tmp_path / "list.txt"), data_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"(?s)2 faults.*list.txt:2: .*none.wav.*list.txt:3: '1.wav' is not PATH"):
        corpora.prepare(options)


def test_the_same_text_is_in_one_split():
    texts = [f"text {number % 40}" for number in range(200)]
    names = corpora.split_by_text(texts, SourceOptions(test_share=0.2, val_share=0.1))
    by_text = {text: {n for t, n in zip(texts, names, strict=True) if t == text} for text in texts}
    assert all(len(found) == 1 for found in by_text.values())
    assert [sum(found == {name} for found in by_text.values()) for name in corpora.SPLITS] == [28, 4, 8]


def test_words():
    assert words_of("Please dial 2, or: stay on the 'line'.") == "please dial two or stay on the line".split()
    assert words_of("Don’t e-mail") == ["don't", "e", "mail"]
    assert words_of("Où est-ce?", "fr") == ["où", "est", "ce"]


def test_augmentation_is_what_it_says():
    wave = (0.2 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
    fast = augment.change_speed(wave, 1.25)
    assert len(fast) == pytest.approx(RATE / 1.25, abs=2)
    peak = np.abs(np.fft.rfft(fast * np.hanning(len(fast)))).argmax() * RATE / len(fast)
    assert peak == pytest.approx(550, abs=3)
    for colour in (0.0, 1.0, 2.0):
        noise = augment.add_noise(wave, 20.0, np.random.default_rng(0), colour) - wave
        level = 10 * np.log10(np.mean(wave**2) / np.mean(noise**2))
        assert level == pytest.approx(20, abs=0.1)
    loud = augment.apply(wave, augment.Change(gain=40.0), np.random.default_rng(0))
    assert np.abs(loud).max() == pytest.approx(0.99, abs=1e-4)
    first, second = (augment.apply(wave, *augment.draw(1, 5, 2)) for _ in range(2))
    assert np.array_equal(first, second)
    with pytest.raises(ValueError, match="speed 3"):
        augment.change_speed(wave, 3)
