"""Pronunciations: the dictionary's format, guesses for what it lacks, disambiguation, Kaldi's files."""

from __future__ import annotations

import pytest

from kaldi_asr import dictionary, g2p, lexicon

TEXT = """\
voice V OY1 S
mail M EY1 L
mail(2) M EY2 L
read R EH1 D # past
read(2) R IY1 D
box B AA1 K S
want W AA1 N T
muted M Y UW1 T IH0 D
m EH1 M
p P IY1
"""


@pytest.fixture
def words(tmp_path):
    (tmp_path / "d").write_text(TEXT)
    return dictionary.parse(tmp_path / "d")


def test_dictionary_format(words, tmp_path):
    assert words["read"] == [("R", "EH", "D"), ("R", "IY", "D")]
    assert words["mail"] == [("M", "EY", "L")]  # without stress both are one
    (tmp_path / "bad").write_text("a AH0\nempty\n")
    with pytest.raises(ValueError, match="bad:2: 'empty' has no phones"):
        dictionary.parse(tmp_path / "bad")


def test_guesses(words):
    guesser = g2p.Guesser(words)
    assert guesser.guess("voicemail") == (("V", "OY", "S", "M", "EY", "L"), "compound")
    assert guesser.guess("boxs")[0][-2:] == ("AH", "Z")
    assert guesser.guess("mail's") == (("M", "EY", "L", "Z"), "ending")
    assert guesser.guess("wanted")[0] == ("W", "AA", "N", "T", "AH", "D")
    assert guesser.guess("unmuted") == (("AH", "N", "M", "Y", "UW", "T", "IH", "D"), "compound")
    assert guesser.guess("mp") == (("EH", "M", "P", "IY"), "spelling")


def test_letters_are_learnt():
    sounds = {"a": "AA", "b": "B", "e": "EH", "k": "K", "m": "M", "o": "OW", "s": "S", "t": "T"}
    letters = "abekmost"
    known = {a + b + c: [(sounds[a], sounds[b], sounds[c])] for a in letters for b in letters for c in letters}
    known = {w: p for w, p in known.items() if "sh" not in w}
    known |= {a + "sh": [(sounds[a], "SH")] for a in letters} | {a + "she": [(sounds[a], "SH", "EH")] for a in letters}
    rules = g2p.LetterToSound(known)
    assert rules.predict("bosket") == ("B", "OW", "S", "K", "EH", "T")
    assert rules.predict("moshe") == ("M", "OW", "SH", "EH")


def test_oov_report(words):
    from collections import Counter

    found, report = lexicon.build(["mail", "voicemail", "mp"], words, counts=Counter(mail=6, voicemail=3, mp=1))
    assert report.rate == pytest.approx(0.4)
    assert report.lines() == ["voicemail 3 compound V OY S M EY L", "mp 1 spelling EH M P IY"]
    assert found.entries["mail"] == [("M", "EY", "L")]
    assert lexicon.unknown_words([["mail", "who", "who"]], found) == {"who": 2}


def test_disambiguation_symbols():
    entries = {"a": [("X",)], "b": [("X",)], "c": [("X", "Y")], "d": [("Z",)], "e": [("X", "Y")]}
    rows, highest = lexicon.Lexicon(entries).disambiguated()
    found = {(word, phones): number for word, phones, number in rows}
    assert found[("a", ("X",))] == 1 and found[("b", ("X",))] == 2  # homophones, and the beginning of c
    assert {found[("c", ("X", "Y"))], found[("e", ("X", "Y"))]} == {1, 2} and found[("d", ("Z",))] == 0
    assert highest == 2


def test_folder_in_kaldis_form(words, tmp_path):
    found, _ = lexicon.build(["read", "box"], words)
    found.save(tmp_path)
    assert (tmp_path / "words.txt").read_text() == "<eps> 0\n<unk> 1\nbox 2\nread 3\n#0 4\n<s> 5\n</s> 6\n"
    phones = dict(line.split() for line in (tmp_path / "phones.txt").read_text().splitlines())
    assert phones["SIL"] == "1" and phones["SPN"] == "2" and phones["#0"] == str(len(found.phones) + 1)
    again = lexicon.Lexicon.load(tmp_path)
    assert again.entries == found.entries and again.phones == found.phones and again.word_ids == found.word_ids
    with pytest.raises(ValueError, match="QQ"):
        lexicon.Lexicon({"new": [("QQ",)]}, found.phones)
    (tmp_path / "lexicon.txt").write_text("box B AA\nbox\n")
    with pytest.raises(ValueError, match="lexicon.txt:2"):
        lexicon.Lexicon.load(tmp_path)


def test_letters_as_phones():
    found = lexicon.graphemic(["où", "l'eau"])
    assert found.entries["où"] == [("o", "ù")] and found.entries["l'eau"] == [("l", "e", "a", "u")]
