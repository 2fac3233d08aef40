"""N-gram language models: modified Kneser-Ney estimation, interpolation, perplexity, ARPA files.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1998; in the interpolated form,
whose back-off weights are the masses that discounting freed. The unigrams are interpolated with the uniform
distribution over the vocabulary, so that a word that was never seen has a probability. Logarithms are natural in
memory, of base 10 in files.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlx.files import atomic_write

from .lexicon import BOS, EOS, UNKNOWN

Gram = tuple[str, ...]
DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)  # where there are too few n-grams to estimate them from
NEVER = -99.0 * math.log(10)  # of <s>, which nothing predicts


@dataclass
class NgramModel:
    """`probs[n - 1]`: log probability of the last word of each n-gram; `backoffs`: of each context that has one."""

    probs: list[dict[Gram, float]]
    backoffs: dict[Gram, float]

    @property
    def order(self) -> int:
        return len(self.probs)

    @property
    def vocabulary(self) -> list[str]:
        """All words but <s>, with </s> and <unk>."""
        return sorted(gram[0] for gram in self.probs[0] if gram[0] != BOS)

    def score(self, word: str, context: Sequence[str]) -> float:
        """Log probability of a word after a context, of which the last order - 1 words count."""
        if (word,) not in self.probs[0]:
            word = UNKNOWN
        history = tuple(context)[len(context) - min(len(context), self.order - 1) :]
        total = 0.0
        while True:
            found = self.probs[len(history)].get((*history, word))
            if found is not None:
                return total + found
            if not history:
                raise ValueError(f"neither {word!r} nor {UNKNOWN} is in the model's vocabulary")
            total += self.backoffs.get(history, 0.0)
            history = history[1:]

    def sentence(self, words: Sequence[str]) -> list[float]:
        """Log probabilities of the words and of </s>."""
        known = [word if (word,) in self.probs[0] else UNKNOWN for word in words]
        padded = [BOS, *known, EOS]
        return [self.score(padded[place], padded[:place]) for place in range(1, len(padded))]

    def perplexity(self, texts: Iterable[Sequence[str]]) -> float:
        """Over all words and sentence ends; words outside of the vocabulary count as <unk>."""
        scores = [score for words in texts for score in self.sentence(words)]
        if not scores:
            raise ValueError("there is no text to measure")
        return math.exp(-sum(scores) / len(scores))


# Estimation


def count(texts: Iterable[Sequence[str]], order: int, vocabulary: set[str]) -> list[Counter[Gram]]:
    """Counts of n-grams of 1..order, with <s> before and </s> after each text, words outside as <unk>."""
    counts: list[Counter[Gram]] = [Counter() for _ in range(order)]
    for words in texts:
        padded = (BOS, *(word if word in vocabulary else UNKNOWN for word in words), EOS)
        for size in range(1, order + 1):
            counts[size - 1].update(padded[at : at + size] for at in range(len(padded) - size + 1))
    return counts


def adjusted(counts: Sequence[Counter[Gram]]) -> list[Counter[Gram]]:
    """Below the highest order: in how many contexts an n-gram was seen; those that begin with <s> have none."""
    result = [counts[-1]]
    for size in range(len(counts) - 1, 0, -1):
        found = Counter(gram[1:] for gram in counts[size])
        found.update({gram: number for gram, number in counts[size - 1].items() if gram[0] == BOS and size > 1})
        result.append(found)
    return result[::-1]


def discounts(counts: Iterable[int]) -> tuple[float, float, float]:
    """D1, D2, D3+ of n-grams seen once, twice, oftener (Chen and Goodman, equation 26)."""
    n1, n2, n3, n4 = (0, 0, 0, 0)
    for number in counts:
        n1, n2, n3, n4 = n1 + (number == 1), n2 + (number == 2), n3 + (number == 3), n4 + (number == 4)
    if not (n1 and n2 and n3 and n4):
        return DEFAULT_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return found if all(0 < value <= size for size, value in enumerate(found, 1)) else DEFAULT_DISCOUNTS


def estimate(texts: Iterable[Sequence[str]], order: int, vocabulary: Iterable[str]) -> NgramModel:
    """A model of `order` over `vocabulary` (</s> and <unk> are added) by interpolated modified Kneser-Ney."""
    words = set(vocabulary) - {BOS, EOS, UNKNOWN}
    if order < 1:
        raise ValueError(f"an n-gram model has an order of at least 1, not {order}")
    counts = count(texts, order, words)
    if not counts[0]:
        raise ValueError("there is no text to estimate a language model from")
    counts = adjusted(counts)
    counts[0].pop((BOS,), None)  # nothing predicts the beginning
    alphabet = sorted(words | {EOS, UNKNOWN})
    lower: dict[Gram, float] = {}
    probs: list[dict[Gram, float]] = []
    backoffs: dict[Gram, float] = {}
    for size, found in enumerate(counts, 1):
        cut = (0.0, *discounts(found.values()))
        totals: Counter[Gram] = Counter()
        freed: defaultdict[Gram, float] = defaultdict(float)
        for gram, number in found.items():
            totals[gram[:-1]] += number
            freed[gram[:-1]] += cut[min(number, 3)]
        level: dict[Gram, float] = {}
        if size == 1:
            uniform = freed[()] / totals[()] / len(alphabet)
            for word in alphabet:
                number = found[(word,)]
                level[(word,)] = (number - cut[min(number, 3)]) / totals[()] + uniform
        else:
            for gram, number in found.items():
                context = gram[:-1]
                share = freed[context] / totals[context]
                level[gram] = (number - cut[min(number, 3)]) / totals[context] + share * lower[gram[1:]]
            backoffs |= {context: math.log(freed[context] / totals[context]) for context in totals}
        probs.append({gram: math.log(value) for gram, value in level.items()})
        lower = level
    probs[0][BOS,] = NEVER
    return NgramModel(probs, backoffs)


def renormalised(probs: list[dict[Gram, float]]) -> NgramModel:
    """A model with these probabilities, and the back-off weights that make each context's sum 1."""
    model = NgramModel(probs, {})
    for size in range(1, len(probs)):
        left: defaultdict[Gram, float] = defaultdict(lambda: 1.0)
        below: defaultdict[Gram, float] = defaultdict(lambda: 1.0)
        for gram, value in probs[size].items():
            left[gram[:-1]] -= math.exp(value)
            below[gram[:-1]] -= math.exp(model.score(gram[-1], gram[1:-1]))
        for context in left:
            model.backoffs[context] = math.log(max(left[context], 1e-12) / max(below[context], 1e-12))
    return model


def pruned(model: NgramModel, keep: Sequence[Iterable[Gram]]) -> NgramModel:
    """Only the n-grams of 2 words and more that are in `keep` (a set for each order from 2 on), with their contexts."""
    probs = [dict(model.probs[0])]
    wanted = [set(found) for found in keep]
    for size in range(len(wanted) - 1, 0, -1):  # a longer n-gram needs its context
        wanted[size - 1] |= {gram[:-1] for gram in wanted[size]} & model.probs[size].keys()
    for size, found in enumerate(wanted, 1):
        probs.append({gram: value for gram, value in model.probs[size].items() if gram in found})
    return renormalised(probs)


def interpolate(models: Sequence[NgramModel], weights: Sequence[float]) -> NgramModel:
    """One model over the n-grams of all, whose probabilities are the weighted means. Vocabularies must be the same."""
    if len(models) != len(weights) or abs(sum(weights) - 1) > 1e-6 or min(weights) < 0:
        raise ValueError(f"weights {list(weights)} do not share 1 among {len(models)} models")
    if any(model.vocabulary != models[0].vocabulary for model in models):
        raise ValueError("models can be interpolated only over one vocabulary")
    probs: list[dict[Gram, float]] = []
    for size in range(max(model.order for model in models)):
        grams = {gram for model in models if size < model.order for gram in model.probs[size]}
        level = {}
        for gram in grams:
            if gram[-1] == BOS:
                level[gram] = NEVER
                continue
            values = (math.exp(model.score(gram[-1], gram[:-1])) for model in models)
            level[gram] = math.log(sum(w * v for w, v in zip(weights, values, strict=True)))
        probs.append(level)
    return renormalised(probs)


def best_weight(models: Sequence[NgramModel], texts: Sequence[Sequence[str]], passes: int = 30) -> list[float]:
    """Interpolation weights of greatest likelihood of `texts`, by EM."""
    return stream_weights([[math.exp(s) for words in texts for s in model.sentence(words)] for model in models], passes)


def stream_weights(streams: Sequence[Sequence[float]], passes: int = 30) -> list[float]:
    """The same from what each model gives the same words: probabilities, one list for each model."""
    weights = [1 / len(streams)] * len(streams)
    for _ in range(passes):
        shares = [0.0] * len(streams)
        for values in zip(*streams, strict=True):
            total = sum(w * v for w, v in zip(weights, values, strict=True))
            for place, value in enumerate(values):
                shares[place] += weights[place] * value / total
        weights = [share / sum(shares) for share in shares]
    return weights


# Files


def write_arpa(model: NgramModel, path: str | os.PathLike[str]) -> None:
    """The ARPA format, with base 10 logarithms."""
    lines = ["\\data\\", *(f"ngram {size}={len(level)}" for size, level in enumerate(model.probs, 1))]
    for size, level in enumerate(model.probs, 1):
        lines += ["", f"\\{size}-grams:"]
        for gram in sorted(level):
            line = f"{level[gram] / math.log(10):.7f}\t{' '.join(gram)}"
            if gram in model.backoffs and size < model.order:
                line += f"\t{model.backoffs[gram] / math.log(10):.7f}"
            lines.append(line)
    atomic_write(Path(path), "\n".join([*lines, "", "\\end\\", ""]))


def read_arpa(path: str | os.PathLike[str]) -> NgramModel:
    """ValueError names file and line of what is no ARPA format, and a section that is not as long as its head says."""
    path = Path(path)
    probs: list[dict[Gram, float]] = []
    backoffs: dict[Gram, float] = {}
    expected: dict[int, int] = {}
    size, ended = 0, False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line == "\\data\\" or ended:
            continue
        if line.startswith("ngram "):
            order, _, length = line[6:].partition("=")
            expected[int(order)] = int(length)
        elif line == "\\end\\":
            ended = True
        elif line.startswith("\\") and line.endswith("-grams:"):
            size = int(line[1:-7])
            if size != len(probs) + 1:
                raise ValueError(f"{path}:{number}: {size}-grams follow {len(probs)}-grams")
            probs.append({})
        else:
            cells = line.split()
            if not size or len(cells) not in (size + 1, size + 2):
                raise ValueError(f"{path}:{number}: {line!r} is no {size}-gram")
            try:
                values = [float(cells[0]), *(float(cell) for cell in cells[size + 1 :])]
            except ValueError:
                raise ValueError(f"{path}:{number}: {line!r} has no number where one should be") from None
            gram = tuple(cells[1 : size + 1])
            probs[-1][gram] = values[0] * math.log(10)
            if len(values) == 2:
                backoffs[gram] = values[1] * math.log(10)
    if not ended:
        raise ValueError(f"{path}: has no \\end\\: it is cut off or no ARPA file")
    for order, length in expected.items():
        found = len(probs[order - 1]) if order <= len(probs) else 0
        if found != length:
            raise ValueError(f"{path}: {found} {order}-grams, its head says {length}")
    return NgramModel(probs, backoffs)
