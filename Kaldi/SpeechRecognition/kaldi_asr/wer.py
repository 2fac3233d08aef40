"""Word error rates: edits summed over utterances, over reference words summed; alignments to look at; confidence.

result = score({"utt1": ["a", "b"]}, {"utt1": ["a", "c"]})
result.wer, result.substitutions; print(result.report()); low, high = result.interval()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Pair = tuple[str | None, str | None]  # a word of the reference and what was heard; None: inserted, deleted


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Pair]:
    """A cheapest alignment: substitution, insertion and deletion cost 1 each (Levenshtein)."""
    rows, columns = len(reference) + 1, len(hypothesis) + 1
    cost = np.zeros((rows, columns), np.int64)
    cost[:, 0], cost[0] = np.arange(rows), np.arange(columns)
    for i in range(1, rows):
        for j in range(1, columns):
            same = cost[i - 1, j - 1] + (reference[i - 1] != hypothesis[j - 1])
            cost[i, j] = min(same, cost[i - 1, j] + 1, cost[i, j - 1] + 1)
    pairs: list[Pair] = []
    i, j = len(reference), len(hypothesis)
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + (reference[i - 1] != hypothesis[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((reference[i], hypothesis[j]))
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
            pairs.append((reference[i], None))
        else:
            j -= 1
            pairs.append((None, hypothesis[j]))
    return pairs[::-1]


@dataclass
class Scored:
    """One utterance: its alignment and its edits."""

    pairs: list[Pair]

    @property
    def words(self) -> int:
        return sum(reference is not None for reference, _ in self.pairs)

    @property
    def substitutions(self) -> int:
        return sum(r is not None and h is not None and r != h for r, h in self.pairs)

    @property
    def insertions(self) -> int:
        return sum(r is None for r, _ in self.pairs)

    @property
    def deletions(self) -> int:
        return sum(h is None for _, h in self.pairs)

    @property
    def edits(self) -> int:
        return self.substitutions + self.insertions + self.deletions


@dataclass
class Result:
    """The score of a set of utterances by name."""

    utterances: dict[str, Scored] = field(default_factory=dict)

    def _sum(self, name: str) -> int:
        return sum(getattr(item, name) for item in self.utterances.values())

    @property
    def words(self) -> int:
        return self._sum("words")

    @property
    def substitutions(self) -> int:
        return self._sum("substitutions")

    @property
    def insertions(self) -> int:
        return self._sum("insertions")

    @property
    def deletions(self) -> int:
        return self._sum("deletions")

    @property
    def edits(self) -> int:
        return self._sum("edits")

    @property
    def wer(self) -> float:
        """Percent. Without any reference word: 0 if nothing was heard, else infinite."""
        if not self.words:
            return float("inf") if self.edits else 0.0
        return 100 * self.edits / self.words

    @property
    def sentence_errors(self) -> float:
        """Percent of utterances with an edit."""
        return 100 * sum(item.edits > 0 for item in self.utterances.values()) / max(len(self.utterances), 1)

    def interval(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
        """Confidence interval of the rate in percent, by drawing utterances anew (Bisani and Ney, 2004)."""
        edits = np.array([item.edits for item in self.utterances.values()], float)
        words = np.array([item.words for item in self.utterances.values()], float)
        if not words.sum():
            return self.wer, self.wer
        rng = np.random.Generator(np.random.Philox(seed))
        chosen = rng.integers(0, len(edits), (draws, len(edits)))
        rates = 100 * edits[chosen].sum(1) / np.maximum(words[chosen].sum(1), 1)
        low, high = np.quantile(rates, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def confusions(self, count: int = 10) -> list[tuple[str, str, int]]:
        """The commonest (reference, heard, times) that differ; `*` stands for no word."""
        found = Counter((r or "*", h or "*") for item in self.utterances.values() for r, h in item.pairs if r != h)
        return [(r, h, number) for (r, h), number in found.most_common(count)]

    def summary(self) -> str:
        """`%WER 3.21 [ 12 / 374, 2 ins, 4 del, 6 sub ] 95% 1.6..5.1`, as Kaldi's scoring prints it."""
        low, high = self.interval()
        return (
            f"%WER {self.wer:.2f} [ {self.edits} / {self.words}, {self.insertions} ins, {self.deletions} del, "
            f"{self.substitutions} sub ] 95% {low:.2f}..{high:.2f}, %SER {self.sentence_errors:.1f}"
        )

    def report(self, only_wrong: bool = True) -> str:
        """The alignment of each utterance in two lines, with `*` for no word."""
        lines = []
        for name, item in self.utterances.items():
            if only_wrong and not item.edits:
                continue
            cells = [(r or "*", h or "*") for r, h in item.pairs]
            widths = [max(len(r), len(h)) for r, h in cells]
            for head, side in (("ref", 0), ("hyp", 1)):
                row = " ".join(cell[side].ljust(width) for cell, width in zip(cells, widths, strict=True))
                lines.append(f"{name} {head} {row}".rstrip())
        return "\n".join(lines)


def score(references: Mapping[str, Sequence[str]], hypotheses: Mapping[str, Sequence[str]]) -> Result:
    """Align all. ValueError where a hypothesis has no reference or the other way round: nothing is left out."""
    missing = sorted(references.keys() - hypotheses.keys())
    extra = sorted(hypotheses.keys() - references.keys())
    if missing or extra:
        what = f"{len(missing)} references have no hypothesis" if missing else f"{len(extra)} hypotheses no reference"
        raise ValueError(f"{what}, e.g. {(missing or extra)[0]!r}")
    return Result({name: Scored(align(references[name], hypotheses[name])) for name in references})
