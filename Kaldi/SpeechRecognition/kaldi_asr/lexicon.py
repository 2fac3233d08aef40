"""Words and their pronunciations, phones, and the numbers that both have in graphs: Kaldi's `dict` and `lang` folders.

    lexicon, report = build(words, dictionary)
    lexicon.save("lang"); lexicon = Lexicon.load("lang")

Phones are independent of their place in a word; SIL is silence, SPN stands for what is no word (`<unk>`). Numbers count
from 1, 0 is epsilon; in phones.txt disambiguation symbols #0, #1, ... come last.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlx.files import atomic_write

from .dictionary import Pronunciations
from .g2p import Guesser

SILENCE, NOISE = "SIL", "SPN"
UNKNOWN = "<unk>"
EPSILON, BOS, EOS = "<eps>", "<s>", "</s>"


@dataclass
class OovReport:
    """Words that the dictionary lacks: how each was pronounced, and how often the texts have them."""

    guesses: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    running: int = 0

    @property
    def rate(self) -> float:
        """The share of running words that were not in the dictionary."""
        return sum(self.counts.values()) / self.running if self.running else 0.0

    def lines(self) -> list[str]:
        """`word count way PHONES`, the most frequent first."""
        order = sorted(self.guesses, key=lambda word: (-self.counts.get(word, 0), word))
        return [f"{w} {self.counts.get(w, 0)} {self.guesses[w][1]} {' '.join(self.guesses[w][0])}" for w in order]


@dataclass
class Lexicon:
    """`entries`: word -> pronunciations (tuples of phones). `<unk>` is always there, as SPN.

    `phones` are those that the entries have, unless given: a model's, for a lexicon of other words.
    """

    entries: Pronunciations
    phones: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries.setdefault(UNKNOWN, [(NOISE,)])
        for word, variants in self.entries.items():
            if word in (EPSILON, BOS, EOS) or word.startswith("#") or not word or any(c.isspace() for c in word):
                raise ValueError(f"{word!r} cannot be a word of a lexicon")
            if not variants or not all(variants):
                raise ValueError(f"word {word!r} has a pronunciation without phones")
        spoken = sorted({phone for variants in self.entries.values() for v in variants for phone in v})
        self.phones = self.phones or [SILENCE, NOISE, *(phone for phone in spoken if phone not in (SILENCE, NOISE))]
        unknown = sorted(set(spoken) - set(self.phones))
        if unknown or self.phones[:2] != [SILENCE, NOISE]:
            raise ValueError(f"phones {', '.join(unknown) or self.phones[:2]} are not among those of the model")
        self.phone_ids = {phone: number for number, phone in enumerate(self.phones, 1)}
        self.words = sorted(self.entries, key=str.encode)
        self.word_ids = {word: number for number, word in enumerate(self.words, 1)}

    @property
    def silence_ids(self) -> tuple[int, ...]:
        """Phones that have no context: SIL and SPN."""
        return (1, 2)

    @property
    def backoff_id(self) -> int:
        """The word number of #0, which marks the grammar's back-off arcs."""
        return len(self.words) + 1

    def pronunciations(self, word: str) -> list[tuple[int, ...]]:
        """Phone numbers of a word's pronunciations; a word that is not there is `<unk>`."""
        return [tuple(self.phone_ids[p] for p in v) for v in self.entries.get(word, self.entries[UNKNOWN])]

    def disambiguated(self) -> tuple[list[tuple[str, tuple[str, ...], int]], int]:
        """(word, phones, number of its disambiguation symbol or 0 for none), and the highest such number.

        A pronunciation needs one if another has the same phones or begins with them (Mohri et al., 2002; Kaldi's
        add_lex_disambig); the n-th homophone gets #n.
        """
        rows = [(word, variant) for word in self.words for variant in self.entries[word]]
        times = Counter(variant for _, variant in rows)
        prefixes = {variant[:size] for variant in times for size in range(1, len(variant))}
        used: Counter[tuple[str, ...]] = Counter()
        result = []
        for word, variant in rows:
            number = 0
            if times[variant] > 1 or variant in prefixes:
                used[variant] += 1
                number = used[variant]
            result.append((word, variant, number))
        return result, max(used.values(), default=0)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write lexicon.txt, phones.txt, words.txt and the lists of silence phones."""
        folder = Path(folder)
        lines = [f"{word} {' '.join(variant)}" for word in self.words for variant in self.entries[word]]
        atomic_write(folder / "lexicon.txt", "\n".join(lines) + "\n")
        _, highest = self.disambiguated()
        symbols = [EPSILON, *self.phones, *(f"#{number}" for number in range(highest + 2))]
        atomic_write(folder / "phones.txt", "".join(f"{s} {n}\n" for n, s in enumerate(symbols)))
        symbols = [EPSILON, *self.words, "#0", BOS, EOS]
        atomic_write(folder / "words.txt", "".join(f"{s} {n}\n" for n, s in enumerate(symbols)))
        atomic_write(folder / "silence_phones.txt", f"{SILENCE}\n{NOISE}\n")
        atomic_write(folder / "nonsilence_phones.txt", "".join(f"{phone}\n" for phone in self.phones[2:]))
        atomic_write(folder / "optional_silence.txt", f"{SILENCE}\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Lexicon:
        """Read lexicon.txt and the lists of phones of a folder; they decide all numbers. ValueError: file, line."""
        folder = Path(folder)
        entries = read_lexicon(folder / "lexicon.txt")
        return cls(entries, [SILENCE, NOISE, *(folder / "nonsilence_phones.txt").read_text().split()])


def read_lexicon(path: Path) -> Pronunciations:
    """Lines `word PHONE ...` in Kaldi's form: variants are lines of their own."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such lexicon")
    found: Pronunciations = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        word, *phones = line.split() or [""]
        if not word or not phones:
            raise ValueError(f"{path}:{number}: {line!r} is not WORD PHONE ...")
        if tuple(phones) in found.setdefault(word, []):
            raise ValueError(f"{path}:{number}: {word!r} has this pronunciation before")
        found[word].append(tuple(phones))
    return found


def build(
    words: Iterable[str],
    dictionary: Pronunciations,
    variants: int = 3,
    counts: Counter[str] | None = None,
    phones: Sequence[str] = (),
) -> tuple[Lexicon, OovReport]:
    """The lexicon of a vocabulary, at most `variants` pronunciations a word; what the dictionary lacks is guessed.

    `counts` are of the running texts, for the report; `phones` those of a model, where there is one.
    """
    counts = counts or Counter()
    guesser = Guesser(dictionary)
    report = OovReport(running=sum(counts.values()))
    entries: Pronunciations = {}
    for word in sorted(set(words)):
        if word == UNKNOWN:
            continue
        if word in dictionary:
            entries[word] = list(dictionary[word][:variants])
            continue
        report.guesses[word] = guesser.guess(word)
        report.counts[word] = counts[word]
        entries[word] = [report.guesses[word][0]]
    return Lexicon(entries, list(phones)), report


def graphemic(words: Iterable[str]) -> Lexicon:
    """Letters as phones, for languages without a dictionary (Killer, Stueker and Schultz, 2003)."""
    return Lexicon({word: [tuple(c for c in word.lower() if c.isalpha())] for word in set(words) if word != UNKNOWN})


def unknown_words(texts: Iterable[Sequence[str]], lexicon: Lexicon) -> Counter[str]:
    """The running words of texts that a lexicon lacks."""
    return Counter(word for words in texts for word in words if word not in lexicon.entries)
