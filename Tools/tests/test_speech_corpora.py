"""Corpora: sentences, a builder that resumes, G.722, the layout on disk; with downloads (slow) the real ones."""

import gzip
import json
import os
import stat
import sys
import wave

import numpy as np
import pytest

from dlx import data
from dlx.speech import audio, corpora, flite, g722, sentences
from dlx.speech.text import normalize

pytest.importorskip("soundfile", reason="sound files need the package soundfile")

GLOSSES = """  1 This software and database is being provided to you
00001740 29 v 01 breathe 0 005 | air; "I can breathe better when the air is clean"; "The patient is respiring"
00001741 29 v 01 cut 0 | "he cut the cake with a knife"; "2 cuts of meat were on the table"; "The FBI cut the wire"
00001742 29 v 01 cut 0 | again; "He cut the cake with a knife"; "she said 'no' to him twice"; "a fragment of five words"
00001743 29 v 01 ask 0 | query; "where did you put it, then?"; "they saw the so-called experts, didn't they?"
"""


def test_examples_are_cleaned(tmp_path):
    (tmp_path / "data.verb").write_text(GLOSSES)
    assert sentences.examples([tmp_path / "data.verb"]) == [
        "I can breathe better when the air is clean.", "He cut the cake with a knife.", "Where did you put it, then?",
        "They saw the so-called experts, didn't they?",
    ]  # fmt: skip


def numbered(count):
    words = "one two three four five six seven eight nine ten".split()
    return [f"The {' '.join(words[int(digit)] for digit in str(number))} men went home." for number in range(count)]


def test_texts_share_no_sentence():
    texts = sentences.choose(numbered(900), 300, seed=3)
    assert [sum(text.split == split for text in texts) for split in ("train", "val", "test")] == [270, 15, 15]
    parts = [part for text in texts for part in text.text.rstrip(".").split(". ")]
    assert len(parts) == len(set(parts))
    assert {text.text.count(".") for text in texts} == {1, 2, 3}
    assert all(len(text.text) <= sentences.LONGEST for text in texts)
    assert sentences.choose(numbered(900), 300, seed=3) == texts != sentences.choose(numbered(900), 300, seed=4)
    # A smaller corpus is a part of the larger.
    smaller = sentences.choose(numbered(900), 100, seed=3, held_out=15)
    assert smaller == [*texts[:70], *texts[270:]]
    with pytest.raises(ValueError, match="sentences make .* texts for train"):
        sentences.choose(numbered(60), 100)
    with pytest.raises(ValueError, match="nothing to train on"):
        sentences.choose(numbered(60), 2)


FAKE = """#!{python}
import json, sys, wave
options = dict(zip(sys.argv[1:], sys.argv[2:]))
text = options["-t"]
with open({log!r}, "a") as log:
    log.write(text + "\\n")
if "forbidden" in text:
    sys.exit("cannot say that")
with wave.open(options["-o"], "wb") as file:
    file.setparams((1, 2, 16000, 0, "NONE", ""))
    file.writeframes(b"\\x10\\x20" * (1600 * len(text.split())))
print("pau:0.1 " + " ".join(f"ah:{{0.1 * n:.3f}}" for n in range(2, 2 + len(text.split()))))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A synthesiser and a dictionary that need no download; returns the list of what was read aloud."""
    log = tmp_path / "spoken.txt"
    program = tmp_path / "flite"
    program.write_text(FAKE.format(python=sys.executable, log=str(log)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(flite, "open_flite", lambda home=None: flite.Flite(program))
    monkeypatch.setattr(sentences, "read_wordnet", lambda home=None: numbered(200))
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_a_corpus_is_made_once(fake, tmp_path):
    seen = []
    options = {"home": tmp_path, "utterances": 20, "voices": ("rms", "slt")}
    folder = corpora.prepare("flite-speech", **options, progress=lambda done, total: seen.append((done, total)))
    assert len(fake()) == 20 and seen[-1] == (20, 20)
    assert corpora.prepare("flite-speech", **options) == folder and len(fake()) == 20
    splits = corpora.read(folder)
    assert {name: len(found) for name, found in splits.items()} == {"train": 18, "val": 1, "test": 1}
    first, second = splits["train"][:2]
    assert (first.speaker, second.speaker) == ("rms", "slt") and first.id == "rms-00000"
    assert audio.duration(first.path)[0] == pytest.approx(first.seconds) == pytest.approx(0.1 * len(first.text.split()))
    assert first.phones[0] == ("pau", 0.1) and len(first.phones) == 1 + len(first.text.split())
    assert json.loads((folder / "corpus.json").read_text())["utterances"] == 20
    assert not list(folder.parent.glob("*.partial")) and corpora.identity(folder) == corpora.identity(folder)
    assert corpora.prepare("flite-speech", **{**options, "seed": 2}) != folder


def test_an_interrupted_corpus_goes_on(fake, tmp_path):
    def stop(done, total):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpora.prepare("flite-speech", home=tmp_path, utterances=30, processes=1, progress=stop)
    assert not [path for path in (tmp_path / "speech").iterdir() if (path / "metadata.tsv").exists()]
    partial = next((tmp_path / "speech").glob("*.partial"))
    finished = sorted(partial.glob("labels/*.json"))
    assert 7 <= len(finished) < 30
    damaged = partial / "wavs" / "rms" / f"{finished[0].stem}.wav"
    damaged.write_bytes(damaged.read_bytes()[:50])
    before = len(fake())
    folder = corpora.prepare("flite-speech", home=tmp_path, utterances=30)
    assert len(fake()) - before == 30 - len(finished) + 1
    found = [utterance for split in corpora.read(folder).values() for utterance in split]
    assert len(found) == 30 and all(audio.duration(u.path)[0] == pytest.approx(u.seconds) for u in found)


def test_what_cannot_be_made_is_said(fake, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown speech corpus 'x'.*flite-speech"):
        corpora.prepare("x")
    with pytest.raises(ValueError, match="unexpected keyword argument 'hours'"):
        corpora.prepare("flite-speech", hours=3)
    with pytest.raises(ValueError, match="'anna'"):
        corpora.prepare("flite-speech", voices=("anna",))
    with pytest.raises(ValueError, match="exists and is no speech corpus"):
        (tmp_path / "mine").mkdir()
        corpora.prepare("flite-speech", utterances=20, folder=tmp_path / "mine")
    monkeypatch.setattr(sentences, "read_wordnet", lambda home=None: ["This is a forbidden word."] * 40)
    with pytest.raises(ValueError, match="did not read 'This is a forbidden.*status 1.*cannot say that"):
        corpora.prepare("flite-speech", home=tmp_path, utterances=10)


def test_damaged_metadata_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no metadata.tsv"):
        corpora.read(tmp_path)
    (tmp_path / "metadata.tsv").write_text("\t".join(corpora.COLUMNS) + "\na\tb\n")
    with pytest.raises(ValueError, match=r"metadata.tsv:2: 2 columns, expected 7"):
        corpora.read(tmp_path)
    (tmp_path / "metadata.tsv").write_text("id\ttext\n")
    with pytest.raises(ValueError, match="metadata.tsv:1: its columns"):
        corpora.read(tmp_path)


def test_prompts(tmp_path):
    text = "; a comment\n\nadded: Added.\nbeep: [a beep]\nvm-x:  please  wait \nadded: Again.\nnothing:\n"
    text += "silence/1: (1 second of silence)\nhelp: press * or #\n"
    (tmp_path / "x.gz").write_bytes(gzip.compress(text.encode()))
    assert corpora.read_prompts(tmp_path / "x.gz") == {
        "added": "Added.", "vm-x": "please wait", "help": "press star or pound",
    }  # fmt: skip


# G.722


def encode(sound):
    """A plain encoder: the recommendation's transmit filter, then for every step the nearest level of each band."""
    padded = np.concatenate([np.zeros(24), np.rint(sound * 32767), np.zeros(48)])
    low_levels = np.array(g722._LEVELS_6)
    codes = bytearray()
    predictor = g722._Predictor(1)
    scale, log_scale = [32, 8], [0, 0]
    for first in range(0, len(padded) - 24, 2):
        window = padded[first : first + 24]
        even, odd = (window[0::2] * g722._QMF).sum(), (window[1::2] * g722._QMF[::-1]).sum()
        low, high = (odd + even) / 2**14, (odd - even) / 2**14
        estimates = predictor.estimate[:, 0]
        inner = int(np.argmin(np.abs(estimates[0] + scale[0] * low_levels / 2**15 - low)[4:])) + 4
        upper = int(np.argmin(np.abs(estimates[1] + scale[1] * np.array(g722._LEVELS_2) / 2**15 - high)))
        codes.append(upper << 6 | inner)
        levels = (g722._LEVELS_4[inner >> 2], g722._LEVELS_2[upper])
        difference = [s * level >> 15 for s, level in zip(scale, levels, strict=True)]
        changes = (g722._STEPS_LOW[inner >> 2], g722._STEPS_HIGH[upper])
        for band, (highest, shift) in enumerate(((18432, 8), (22528, 10))):
            log_scale[band] = min(max((log_scale[band] * 127 >> 7) + changes[band], 0), highest)
            whole, part = divmod(log_scale[band] >> 6, 32)
            scale[band] = int(round(2048 * 2 ** (part / 32)) * 2.0 ** (whole - shift)) << 2
        predictor.update(np.array(difference)[:, None])
    return bytes(codes)


def test_g722_carries_both_bands():
    time = np.arange(8000) / 16000
    sound = 0.25 * np.sin(2 * np.pi * 700 * time) + 0.1 * np.sin(2 * np.pi * 5500 * time)
    found, alone = g722.decode([encode(sound), encode(sound)[:2000]])
    assert found.dtype == np.float32 and len(alone) == 4000
    np.testing.assert_array_equal(found[:4000], alone)
    best = max(
        (
            10
            * np.log10(np.mean(sound[1000:7000] ** 2) / np.mean((found[1000 + d : 7000 + d] - sound[1000:7000]) ** 2)),
            d,
        )
        for d in range(40)
    )
    assert best[0] > 20 and 18 <= best[1] <= 28, best


def test_g722_scale_factors():
    """The published table of powers, which the code computes: first, some in between, last."""
    assert [g722._POWERS[n] for n in (0, 1, 2, 3, 8, 16, 24, 31)] == [2048, 2093, 2139, 2186, 2435, 2896, 3444, 4008]
    assert g722.decode([]) == [] and len(g722.decode([b""])[0]) == 0


# The real ones


@pytest.mark.slow
def test_flite_speech_is_what_it_says(tmp_path):
    """Downloads 20 MB."""
    folder = corpora.prepare("flite-speech", home=os.environ.get("DLX_HOME"), folder=tmp_path / "corpus", utterances=30,
                             voices=flite.VOICES)  # fmt: skip
    for utterance in [u for split in corpora.read(folder).values() for u in split]:
        with wave.open(str(utterance.path)) as file:
            assert file.getparams()[:3] == (1, 2, 16000)
        if utterance.speaker == "kal16":
            assert not utterance.phones
            continue
        ends = [end for _, end in utterance.phones]
        assert ends == sorted(ends) and ends[-1] == pytest.approx(utterance.seconds, abs=0.03)
        sound, rate = audio.read(utterance.path)
        # The phone times are true: pauses are quiet, vowels are not.
        starts = [0.0, *ends[:-1]]
        spans = {"pau": [], "vowel": []}
        for (name, end), start in zip(utterance.phones, starts, strict=True):
            kind = "pau" if name == "pau" else "vowel" if name in ("aa", "ae", "ay", "ey", "iy", "ow") else None
            if kind:
                spans[kind].append(sound[int(start * rate) : int(end * rate)])
        assert audio.rms(np.concatenate(spans["pau"])) < audio.rms(np.concatenate(spans["vowel"])) - 15
        assert normalize(utterance.text) == utterance.text.lower()


@pytest.mark.slow
def test_g722_prompts_are_the_8_khz_prompts(tmp_path):
    """An independent decoder's word for it: the package of 8 kHz WAV files (18 MB), between 1.5 and 3 kHz."""
    folder = corpora.prepare("asterisk-en", max_seconds=4)
    found = {u.id: u for split in corpora.read(folder).values() for u in split}
    assert len(found) > 400
    package = data.Package(
        "apt", "asterisk-core-sounds-en-wav", "1.6.1-1", "asterisk-core-sounds-en-wav_*.deb",
        "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d", 18272864,
    )  # fmt: skip
    names = ["vm-deleted", "agent-pass", "cannot-complete-as-dialed"]
    where = "usr/share/asterisk/sounds/en_US_f_Allison"
    from dlx import archive

    archive.extract(data.fetch(package), {f"{where}/{name}.wav": tmp_path / f"{name}.wav" for name in names})
    for name in names:
        ours = spectrum(audio.read(found[name].path)[0])
        theirs = spectrum(audio.read(tmp_path / f"{name}.wav", 16000)[0], len(ours) * 2 - 2)
        product = ours * np.conj(theirs)
        delay = np.arange(-240, 241)[:, None] / 8
        shifted = np.exp(2j * np.pi * delay * np.arange(len(ours)) / (2 * len(ours) - 2))
        agreement = np.abs((product * shifted).real.sum(1)).max()
        assert agreement > 0.99 * np.linalg.norm(ours) * np.linalg.norm(theirs), name


def spectrum(sound, length=None):
    length = length or 2 * len(sound)
    found = np.fft.rfft(sound, length)
    frequencies = np.fft.rfftfreq(length, 1 / 16000)
    return np.where((frequencies > 1500) & (frequencies < 3000), found, 0)
