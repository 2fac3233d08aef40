"""Pronunciations of words that the dictionary lacks: by its ending, by its parts, spelled out, else by its letters.

Letters are aligned with phones by EM (each letter makes none, one or two phones), then every letter says what it most
often said in the longest context of letters that was seen (after Black, Lenzo and Pagel, "Issues in building general
letter to sound rules", 1998; they grow a decision tree where this looks contexts up).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from .dictionary import Pronunciations

TRAINED_ON = 8000  # words
PASSES = 4
CONTEXT = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3))  # letters on each side, from short to long
SIBILANTS = ("S", "Z", "SH", "ZH", "CH", "JH")
VOICELESS = ("P", "T", "K", "F", "TH")
VOWELS = "aeiouy"
PREFIXES = {"un": ("AH", "N"), "re": ("R", "IY"), "in": ("IH", "N"), "de": ("D", "IY")}
SHORTEST = 3  # letters of a part of a compound
SEEN = 2  # times that a context must have been seen
Chunk = tuple[str, ...]


class LetterToSound:
    """Rules learnt from a dictionary; `predict` gives the phones of any word of its letters."""

    def __init__(self, dictionary: Pronunciations, words: int = TRAINED_ON, seed: int = 0) -> None:
        usable = sorted(word for word in dictionary if word.isalpha() and len(word) > 1)
        order = np.random.Generator(np.random.Philox(seed)).permutation(len(usable))[:words]
        pairs = [(usable[index], dictionary[usable[index]][0]) for index in order]
        pairs = [(word, phones) for word, phones in pairs if len(phones) <= 2 * len(word)]
        if not pairs:
            raise ValueError("the dictionary holds no word to learn letters from")
        self.rules: list[dict[str, Chunk]] = []
        self._learn([(word, _align(word, phones, scores)) for scores in [_scores(pairs)] for word, phones in pairs])

    def _learn(self, aligned: Sequence[tuple[str, list[Chunk]]]) -> None:
        for left, right in CONTEXT:
            counts: dict[str, Counter[Chunk]] = defaultdict(Counter)
            for word, chunks in aligned:
                for place, chunk in enumerate(chunks):
                    counts[_window(word, place, left, right)][chunk] += 1
            least = SEEN if left + right else 1
            self.rules.append(
                {key: found.most_common(1)[0][0] for key, found in counts.items() if sum(found.values()) >= least}
            )

    def predict(self, word: str) -> tuple[str, ...]:
        """The phones of a word; letters that were never seen are silent."""
        phones: list[str] = []
        for place in range(len(word)):
            for (left, right), rules in zip(reversed(CONTEXT), reversed(self.rules), strict=True):
                chunk = rules.get(_window(word, place, left, right))
                if chunk is not None:
                    phones += chunk
                    break
        return tuple(phones)


def _window(word: str, place: int, left: int, right: int) -> str:
    padded = "#" * left + word + "#" * right
    return padded[place : place + left + 1 + right]


def _scores(pairs: Sequence[tuple[str, Chunk]]) -> dict[tuple[str, Chunk], float]:
    """Log probability of a chunk of phones given its letter, by Viterbi EM from a start where all are alike."""
    scores: dict[tuple[str, Chunk], float] = {}
    for _ in range(PASSES):
        counts: Counter[tuple[str, Chunk]] = Counter()
        letters: Counter[str] = Counter()
        for word, phones in pairs:
            for letter, chunk in zip(word, _align(word, phones, scores), strict=True):
                counts[letter, chunk] += 1
                letters[letter] += 1
        scores = {key: math.log(count / letters[key[0]]) for key, count in counts.items()}
    return scores


def _align(word: str, phones: Sequence[str], scores: dict[tuple[str, Chunk], float]) -> list[Chunk]:
    """The best parting of the phones among the letters, each 0 to 2 of them."""
    unseen = {0: -6.0, 1: -5.0, 2: -7.0} if not scores else {0: -12.0, 1: -11.0, 2: -13.0}
    best = [[-math.inf] * (len(phones) + 1) for _ in range(len(word) + 1)]
    back = [[0] * (len(phones) + 1) for _ in range(len(word) + 1)]
    best[0][0] = 0.0
    for i, letter in enumerate(word):
        for j in range(max(0, len(phones) - 2 * (len(word) - i)), min(len(phones), 2 * i) + 1):
            if best[i][j] == -math.inf:
                continue
            for size in range(min(3, len(phones) - j + 1)):
                score = best[i][j] + scores.get((letter, tuple(phones[j : j + size])), unseen[size])
                if score > best[i + 1][j + size]:
                    best[i + 1][j + size], back[i + 1][j + size] = score, size
    chunks: list[Chunk] = []
    j = len(phones)
    for i in range(len(word), 0, -1):
        size = back[i][j]
        chunks.append(tuple(phones[j - size : j]))
        j -= size
    return chunks[::-1]


class Guesser:
    """Pronounces what a dictionary lacks; `guess` also says how it came by it."""

    def __init__(self, dictionary: Pronunciations) -> None:
        self.dictionary = dictionary
        self._letters: LetterToSound | None = None

    def guess(self, word: str) -> tuple[tuple[str, ...], str]:
        """Phones and "ending", "compound", "spelling" or "letters". ValueError for a word nothing can be made of."""
        for way in (self._ending, self._compound, self._spelling):
            phones = way(word)
            if phones:
                return phones, way.__name__.strip("_")
        if self._letters is None:
            self._letters = LetterToSound(self.dictionary)
        phones = self._letters.predict(word)
        if not phones:
            raise ValueError(f"no pronunciation can be made for {word!r}: add it to the lexicon")
        return phones, "letters"

    def _ending(self, word: str) -> tuple[str, ...] | None:
        for ending, stem in (("'s", word[:-2]), ("s'", word[:-2]), ("s", word[:-1])):
            if word.endswith(ending) and stem in self.dictionary:
                phones = self.dictionary[stem][0]
                if phones[-1] in SIBILANTS:
                    return (*phones, "AH", "Z")
                return (*phones, "S" if phones[-1] in VOICELESS else "Z")
        if word.endswith("ed") and (word[:-2] in self.dictionary or word[:-1] in self.dictionary):
            phones = self.dictionary[word[:-2] if word[:-2] in self.dictionary else word[:-1]][0]
            if phones[-1] in ("T", "D"):
                return (*phones, "AH", "D")
            return (*phones, "T" if phones[-1] in (*VOICELESS, "S", "SH", "CH") else "D")
        if word.endswith("ing") and (word[:-3] in self.dictionary or word[:-3] + "e" in self.dictionary):
            return (*self.dictionary.get(word[:-3], self.dictionary.get(word[:-3] + "e"))[0], "IH", "NG")
        return None

    def _compound(self, word: str) -> tuple[str, ...] | None:
        """Of two words of the dictionary, the split whose shorter part is longest; or a prefix and a word."""
        places = sorted(range(SHORTEST, len(word) - SHORTEST + 1), key=lambda place: -min(place, len(word) - place))
        for place in places:
            first, second = word[:place], word[place:]
            if first in self.dictionary and second in self.dictionary:
                return (*self.dictionary[first][0], *self.dictionary[second][0])
        for prefix, phones in PREFIXES.items():
            rest = word.removeprefix(prefix)
            if rest != word and rest in self.dictionary:
                return (*phones, *self.dictionary[rest][0])
        return None

    def _spelling(self, word: str) -> tuple[str, ...] | None:
        """The names of its letters, for a word that cannot be said otherwise."""
        if set(word) & set(VOWELS) or any(letter not in self.dictionary for letter in word):
            return None
        return tuple(phone for letter in word for phone in self.dictionary[letter][-1])
