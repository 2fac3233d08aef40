"""English sentences to be read aloud: the examples in WordNet's entries, cleaned and chosen by a seed.

Only sentences of plain words and punctuation are taken (no digits, acronyms, quotations), so that what is written is
what is said, whoever normalises it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlx import data, draws

from .sources import WORDNET

KINDS = ("noun", "verb", "adj", "adv")
OPENERS = frozenset(
    "he she they the i we it you this that these those his her my our their your there who what when where why how "
    "if".split()
)  # of sentences; most other examples are fragments
MIN_WORDS, MAX_WORDS = 5, 30
LONGEST = 200  # characters of sentences read in one breath
STREAM = 41  # of the draws that choose and join
SHARES = (0.5, 0.85, 1.0)  # of texts of one sentence, up to two, up to three


@dataclass(frozen=True)
class Text:
    """One thing to read: its split, and one to three sentences."""

    split: str
    text: str


def read_wordnet(home: str | os.PathLike[str] | None = None) -> list[str]:
    """The sentences (about 17,000) of WordNet, fetched if need be (6.5 MB)."""
    folder = data.prepare(WORDNET, home=home)
    return examples([folder / f"data.{kind}" for kind in KINDS])


def examples(paths: list[Path]) -> list[str]:
    """Clean sentences of WordNet's data files, each once, in their order."""
    found: dict[str, str] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("  "):
                continue  # the licence
            for example in re.findall(r'"([^"]+)"', line.partition(" | ")[2]):
                sentence = clean(example)
                if sentence:
                    found.setdefault(sentence.lower(), sentence)
    return list(found.values())


def clean(example: str) -> str | None:
    """A sentence with a capital and a full stop, or None for what is no plain sentence."""
    text = " ".join(example.split()).strip(" ;,:-")
    count = len(text.split())
    if not MIN_WORDS <= count <= MAX_WORDS or text.split()[0].lower() not in OPENERS:
        return None
    if not re.fullmatch(r"[A-Za-z ,.'?!;:-]+", text) or re.search(r"[A-Z]{2}|\.\.|--|\b[A-Z]\.|\.\S|\B'|'\B", text):
        return None
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + "."


def choose(sentences: list[str], count: int, seed: int = 1, held_out: int | None = None) -> list[Text]:
    """`count` texts, of which `held_out` each are for validation and test (a twentieth, at most 200, by default).

    Every sentence is used at most once, so that no split holds one of another. A smaller count is a part of a larger
    one, split by split. ValueError when there are not enough sentences.
    """
    held_out = max(1, min(200, count // 20)) if held_out is None else held_out
    if count <= 2 * held_out:
        raise ValueError(f"{count} texts leave nothing to train on beside 2 x {held_out} for validation and test")
    order = draws.permutation(seed, 0, len(sentences), STREAM)
    fixed = min(len(sentences) // 6, 1000)  # sentences set aside for each held-out split, whatever the count
    pools = {"val": order[:fixed], "test": order[fixed : 2 * fixed], "train": order[2 * fixed :]}
    wanted = {"train": count - 2 * held_out, "val": held_out, "test": held_out}
    found = []
    for split, number in wanted.items():
        texts = _join([sentences[index] for index in pools[split]], number, seed, split)
        found += [Text(split, text) for text in texts]
    return found


def _join(sentences: list[str], count: int, seed: int, split: str) -> list[str]:
    chance = draws.draws(seed, ("train", "val", "test").index(split), np.arange(count), 1, STREAM)[:, 0]
    texts: list[str] = []
    place = 0
    for value in chance:
        parts: list[str] = []
        for _ in range(1 + sum(value >= share for share in SHARES[:-1])):
            if place < len(sentences) and len(" ".join([*parts, sentences[place]])) <= LONGEST:
                parts.append(sentences[place])
                place += 1
        if not parts:
            raise ValueError(f"{len(sentences)} sentences make {len(texts)} texts for {split}, not {count}")
        texts.append(" ".join(parts))
    return texts
