"""Texts and language models of a task: its own transcripts, mixed with English at large and with what people count.

    model, vocabulary = mixed(train_texts, tuning_texts, dictionary)

None of the texts that are tested on is ever among them.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlx import data
from dlx.speech import numbers, sentences
from dlx.speech.sources import WORDNET

from . import ngram
from .dictionary import Pronunciations
from .words import words_of

Texts = Sequence[Sequence[str]]
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
MONTHS = ("january february march april may june july august september october november december").split()
SPELLING = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
).split()
SIGNS = (
    "comma|period|dot|point|colon|semicolon|dash|hyphen|slash|backslash|star|asterisk|pound|hash|at|ampersand|percent|"
    "dollar|plus|minus|equals|space|underscore|caret|quote|apostrophe|tilde|backtick|pipe|less than|greater than|"
    "exclamation point|question mark|left bracket|right bracket|left parenthesis|right parenthesis"
).split("|")
FOLDS = 5
PIECES = re.compile(r'[;:"()]|--')
WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
MEASURES = "second seconds minute minutes hour hours day days week weeks month months year years dollars cents".split()


@dataclass(frozen=True)
class LanguageOptions:
    """`order` of the task's own n-grams, `background_order` of English; words seen less than `least` times are left
    out, and n-grams of English seen less than `repeated` times."""

    order: int = 3
    background_order: int = 2
    least: int = 5
    repeated: int = 2


def background(home: str | os.PathLike[str] | None = None) -> list[list[str]]:
    """WordNet's definitions and example sentences as words: 316,000 phrases, 1.5 million words of English."""
    folder = data.prepare(WORDNET, home=home)
    found = []
    for kind in sentences.KINDS:
        for line in (folder / f"data.{kind}").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("  "):
                continue  # the licence
            for piece in PIECES.split(line.partition(" | ")[2].lower()):
                words = WORD.findall(piece)
                if len(words) > 1:
                    found.append(words)
    return found


def spoken_forms() -> list[list[str]]:
    """What is said in every language task and seldom written: numbers, dates, letters, spelling words, signs, units."""
    found = [numbers.cardinal(value) for value in range(100)] + [numbers.ordinal(value) for value in range(1, 101)]
    found += [f"{value} hundred" for value in numbers.ONES[1:10]] + ["hundred", "thousand", "million", "billion"]
    found += ["oh", "o'clock", "a m", "p m", "noon", "midnight", "niner", "half past", "quarter past"]
    found += [*DAYS, *MONTHS, *SPELLING, *SIGNS, *MEASURES, *"abcdefghijklmnopqrstuvwxyz"]
    found += [f"{month} {numbers.ordinal(day)}" for month in MONTHS for day in range(1, 32)]
    return [words_of(text) for text in found]


def deleted_weights(
    own: Texts, others: Sequence[ngram.NgramModel], order: int, vocabulary: set[str], folds: int = FOLDS
) -> list[float]:
    """Weights of the task's own model and the others that fit texts the own model has not seen (deleted interpolation).

    Each fold of the different texts is scored by a model of the other folds.
    """
    place = {text: number % folds for number, text in enumerate(sorted({tuple(words) for words in own}))}
    streams: list[list[float]] = [[] for _ in range(1 + len(others))]
    for fold in range(folds):
        held = [words for words in own if place[tuple(words)] == fold]
        rest = [words for words in own if place[tuple(words)] != fold]
        if held and rest:
            models = [ngram.estimate(rest, order, vocabulary), *others]
            for stream, model in zip(streams, models, strict=True):
                stream += [math.exp(score) for words in held for score in model.sentence(words)]
    return ngram.stream_weights(streams) if streams[0] else [1 / len(streams)] * len(streams)


def mixed(
    own: Texts,
    tuning: Texts,
    dictionary: Pronunciations,
    options: LanguageOptions = LanguageOptions(),
    home: str | os.PathLike[str] | None = None,
) -> tuple[ngram.NgramModel, dict[str, float]]:
    """The task's own model, one of English and one of spoken forms, mixed; `tuning` texts only measure.

    The vocabulary is what `own` and the spoken forms have, and what is frequent enough in English and in the
    dictionary. Also returns the weights and perplexities.
    """
    english, forms = background(home), spoken_forms()
    counts = Counter(word for words in english for word in words)
    vocabulary = {word for words in (*own, *forms) for word in words}
    vocabulary |= {word for word, number in counts.items() if number >= options.least and word in dictionary}
    whole = ngram.estimate(english, options.background_order, vocabulary)
    seen = ngram.count(english, options.background_order, vocabulary)[1:]
    kept = [[gram for gram, number in level.items() if number >= options.repeated] for level in seen]
    others = [
        ngram.pruned(whole, kept) if kept else whole,
        ngram.estimate(forms, min(2, options.order), vocabulary),
    ]
    weights = deleted_weights(own, others, options.order, vocabulary)
    models = [ngram.estimate(own, options.order, vocabulary), *others]
    model = ngram.interpolate(models, weights)
    measures = {"own": weights[0], "english": weights[1], "forms": weights[2]}
    return model, measures | {"perplexity": model.perplexity(tuning), "vocabulary": float(len(vocabulary))}
