"""Which letter speaks which phone: a monotonic alignment of spelling and pronunciation, learnt from examples.

Each symbol of a text speaks 0 to SPAN phones, in their order. How well a letter goes with a phone, and how many phones
it speaks, start from what English spelling does most often and are counted anew in a few rounds of best alignments
(Viterbi training of the model of Damper et al. 2005, "Aligning text and phonemes for speech technology applications
using an EM-like algorithm"). Phones are Flite's: ARPAbet in lower case without stress, `ax`, and `pau` for a pause.

A text is its symbols, characters or, after '@', phones. N texts, T symbols, P phones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

SPAN = 3  # phones that one symbol speaks at most ("one": the o speaks w and ah)
PAUSE = "pau"
ROUNDS = 4
EXAMPLES = 400  # texts that are counted
GROUP = 256  # texts that are aligned at a time
NEVER = -1e9
SPELLING = {
    "a": "ae ax ey ao ah eh aa", "b": "b", "c": "k s sh ch", "d": "d jh t", "e": "eh iy ax ih ey er", "f": "f v",
    "g": "g jh zh", "h": "hh", "i": "ih ay iy ax y", "j": "jh", "k": "k", "l": "l", "m": "m", "n": "n ng",
    "o": "ow aa ao ax ah uw uh w aw oy", "p": "p f", "q": "k", "r": "r er", "s": "s z sh zh", "t": "t sh ch th dh",
    "u": "ah uw uh y ax w er", "v": "v", "w": "w", "x": "k s g z", "y": "iy ay ih y", "z": "z s zh",
}  # fmt: skip
KNOWN, UNKNOWN = 1.0, 0.002  # weights of pairs before anything is counted
PAIRS = 20.0  # examples that the weights of a letter are worth together
COUNTS = {True: (0.3, 0.66, 0.039, 0.001), False: (0.6, 0.4, 1e-6, 1e-9)}  # of 0 to SPAN phones: letters, other symbols


class Spelling:
    """Log probabilities of phones given symbols, and of the number of phones that a symbol speaks."""

    def __init__(self, texts: Sequence[Sequence[str]], phones: Sequence[Sequence[str]]) -> None:
        self.symbols = {symbol: number for number, symbol in enumerate(sorted({s for text in texts for s in text}))}
        self.phones = {phone: number for number, phone in enumerate(sorted({p for row in phones for p in row}))}
        self.priors = np.full((len(self.symbols), len(self.phones)), UNKNOWN)
        self.count_priors = np.zeros((len(self.symbols), SPAN + 1))
        for symbol, number in self.symbols.items():
            itself = symbol[1:].rstrip("012").lower()  # of a symbol that is a phone itself, such as @AH0
            speaks = bool(itself) or symbol.isalpha()
            self.count_priors[number] = COUNTS[speaks]
            for phone in SPELLING.get(symbol, itself).split() if speaks else [PAUSE]:
                if phone in self.phones:
                    self.priors[number, self.phones[phone]] = KNOWN
            if speaks and PAUSE in self.phones:
                self.priors[number, self.phones[PAUSE]] = UNKNOWN / 100
        self.priors /= self.priors.sum(1, keepdims=True)
        self.count_priors /= self.count_priors.sum(1, keepdims=True)
        self._set(np.zeros_like(self.priors), np.zeros_like(self.count_priors))
        self._train(texts, phones)

    def _set(self, pairs: np.ndarray, counts: np.ndarray) -> None:
        for name, found, prior in (("emission", pairs, self.priors), ("count", counts, self.count_priors)):
            total = found + PAIRS * prior
            setattr(self, name, np.log(total / total.sum(1, keepdims=True)).astype(np.float32))

    def _train(self, texts: Sequence[Sequence[str]], phones: Sequence[Sequence[str]]) -> None:
        chosen = range(0, len(texts), max(1, len(texts) // EXAMPLES))
        texts, phones = [texts[index] for index in chosen], [phones[index] for index in chosen]
        for _ in range(ROUNDS):
            pairs, counts = np.zeros_like(self.priors), np.zeros_like(self.count_priors)
            seen: Counter[tuple[int, int]] = Counter()
            for text, row, spoken in zip(texts, phones, self.align(texts, phones), strict=True):
                place = 0
                for symbol, number in zip(text, spoken, strict=True):
                    index = self.symbols[symbol]
                    counts[index, number] += 1
                    seen.update((index, self.phones[phone]) for phone in row[place : place + number])
                    place += number
            for (symbol, phone), number in seen.items():
                pairs[symbol, phone] = number
            self._set(pairs, counts)

    def align(self, texts: Sequence[Sequence[str]], phones: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """For each text the number of phones that each symbol speaks, int64 (T,); they add up to the text's phones.

        ValueError for a text with more phones than its symbols can speak, or with symbols or phones not in examples.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: dict[int, np.ndarray] = {}
        for first in range(0, len(order), GROUP):
            group = order[first : first + GROUP]
            found |= zip(group, self._align([texts[i] for i in group], [phones[i] for i in group]), strict=True)
        return [found[index] for index in range(len(texts))]

    def _align(self, texts: Sequence[Sequence[str]], phones: Sequence[Sequence[str]]) -> list[np.ndarray]:
        length, width = max(map(len, texts)), max(map(len, phones))
        symbols = np.zeros((len(texts), length), np.int64)
        spoken = np.zeros((len(texts), width), np.int64)
        for number, (text, row) in enumerate(zip(texts, phones, strict=True)):
            if len(row) > SPAN * len(text):
                raise ValueError(f"{len(row)} phones cannot be spoken by the {len(text)} symbols of {''.join(text)!r}")
            try:
                symbols[number, : len(text)] = [self.symbols[symbol] for symbol in text]
                spoken[number, : len(row)] = [self.phones[phone] for phone in row]
            except KeyError as error:
                raise ValueError(f"{''.join(text)!r}: {error.args[0]!r} was in no example") from None
        best = np.full((len(texts), width + 1), NEVER, np.float32)
        best[:, 0] = 0
        choices = np.zeros((length, len(texts), width + 1), np.int8)
        rows = np.arange(len(texts))[:, None]
        for step in range(length):
            now = symbols[:, step]
            emitted = np.cumsum(np.pad(self.emission[now[:, None], spoken], ((0, 0), (1, 0))), 1, dtype=np.float64)
            options = np.full((SPAN + 1, *best.shape), NEVER, np.float32)
            options[0] = best + self.count[now, 0][:, None]
            for number in range(1, min(SPAN, width) + 1):
                gain = (emitted[:, number:] - emitted[:, :-number]) + self.count[now, number][:, None]
                options[number, :, number:] = best[:, :-number] + gain
            choices[step] = options.argmax(0)
            reached = options.max(0)
            ended = np.array([step >= len(text) for text in texts])[:, None]
            best = np.where(ended, best, reached)
        places = np.array([len(row) for row in phones])
        if (best[rows[:, 0], places] <= NEVER / 2).any():
            raise ValueError("a text and its phones have no alignment")
        counts = np.zeros((len(texts), length), np.int64)
        for step in reversed(range(length)):
            taken = np.where(step < np.array([len(text) for text in texts]), choices[step, rows[:, 0], places], 0)
            counts[:, step] = taken
            places = places - taken
        return [counts[number, : len(text)] for number, text in enumerate(texts)]
