"""Language models: modified Kneser-Ney by its definition, sums of one, ARPA files as other programs read them."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from kaldi_asr import ngram

WORDS = list("abcdefghijklmnopqrstuvwxy")


@pytest.fixture(scope="module")
def texts():
    """Sentences of a Markov chain, long enough that all discounts can be estimated."""
    rng = np.random.default_rng(0)
    table = rng.dirichlet(1 / np.arange(1, len(WORDS) + 1), size=len(WORDS))
    found = []
    for _ in range(150):
        word, sentence = int(rng.integers(len(WORDS))), []
        for _ in range(int(rng.integers(1, 9))):
            sentence.append(WORDS[word])
            word = int(rng.choice(len(WORDS), p=table[word]))
        found.append(sentence)
    return found


def by_definition(texts, order, vocabulary, word, context):
    """Chen and Goodman's recursion, from raw counts, without any table of what was computed before."""
    raw = [Counter() for _ in range(order + 1)]
    for text in texts:
        padded = ("<s>", *text, "</s>")
        for n in range(1, order + 1):
            raw[n].update(padded[i : i + n] for i in range(len(padded) - n + 1))

    def table(n):
        if n == order:
            return {gram: number for gram, number in raw[n].items() if gram != ("<s>",)}
        found = defaultdict(set)
        for gram in raw[n + 1]:
            found[gram[1:]].add(gram[0])
        counts = {gram: len(left) for gram, left in found.items()}
        counts |= {gram: number for gram, number in raw[n].items() if gram[0] == "<s>" and n > 1}
        return {gram: number for gram, number in counts.items() if gram != ("<s>",)}

    def cut(n):
        of = Counter(table(n).values())
        if not all(of[k] for k in (1, 2, 3, 4)):
            return [0, 0.5, 1.0, 1.5]
        y = of[1] / (of[1] + 2 * of[2])
        found = [k - (k + 1) * y * of[k + 1] / of[k] for k in (1, 2, 3)]
        return [0, *found] if all(0 < d <= k for k, d in enumerate(found, 1)) else [0, 0.5, 1.0, 1.5]

    def probability(n, history):
        if n == 0:
            return 1 / (len(vocabulary) + 2)
        counts, discount = table(n), cut(n)
        following = {gram[-1]: number for gram, number in counts.items() if gram[:-1] == history}
        total = sum(following.values())
        if not total:
            return probability(n - 1, history[1:])
        mine = following.get(word, 0)
        freed = sum(discount[min(number, 3)] for number in following.values())
        return (mine - discount[min(mine, 3)]) / total + freed / total * probability(n - 1, history[1:])

    padded = ("<s>", *context)
    history = padded[len(padded) - min(len(padded), order - 1) :]
    return probability(len(history) + 1, history)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_estimates_are_the_definition(texts, order):
    model = ngram.estimate(texts, order, [*WORDS, "z"])
    for context, word in itertools.product(
        [(), ("a",), ("a", "b"), ("h", "c", "d")], ["a", "b", "c", "y", "z", "</s>"]
    ):
        expected = by_definition(texts, order, [*WORDS, "z"], word, context)
        assert math.exp(model.score(word, ("<s>", *context))) == pytest.approx(expected, rel=1e-9)


def test_every_context_sums_to_one(texts):
    model = ngram.estimate(texts, 3, [*WORDS, "z"])
    for context in [("<s>",), ("<s>", "a"), ("a", "b"), ("z", "z"), ("h",), ()]:
        total = sum(math.exp(model.score(word, context)) for word in model.vocabulary)
        assert total == pytest.approx(1, abs=1e-9)


def test_few_texts_have_default_discounts():
    model = ngram.estimate([["a"], ["b"]], 2, ["a", "b", "c"])
    assert sum(math.exp(model.score(w, ("<s>",))) for w in model.vocabulary) == pytest.approx(1)
    with pytest.raises(ValueError, match="no text"):
        ngram.estimate([], 2, ["a"])
    assert ngram.discounts([1] * 10 + [2] * 5 + [3] * 3 + [4] * 2) == pytest.approx((0.5, 1.1, 5 / 3))


def test_interpolation_and_its_weights(texts):
    parts = [ngram.estimate(part, order, WORDS) for part, order in ((texts[:60], 3), (texts[60:120], 2))]
    mixed = ngram.interpolate(parts, [0.3, 0.7])
    for context in [("<s>", "a"), ("b", "c"), ()]:
        assert sum(math.exp(mixed.score(w, context)) for w in mixed.vocabulary) == pytest.approx(1, abs=1e-6)
    gram = next(iter(parts[0].probs[2]))
    expected = sum(w * math.exp(m.score(gram[2], gram[:2])) for w, m in zip((0.3, 0.7), parts, strict=True))
    assert math.exp(mixed.score(gram[2], gram[:2])) == pytest.approx(expected)
    weights = ngram.best_weight([*parts, ngram.estimate([["h"]] * 3, 1, WORDS)], texts[:60])
    assert weights[0] > 0.6 > 0.1 > weights[2] and sum(weights) == pytest.approx(1)
    with pytest.raises(ValueError, match="do not share 1"):
        ngram.interpolate(parts, [0.3, 0.3])


def test_pruning_keeps_sums(texts):
    model = ngram.estimate(texts, 3, WORDS)
    counts = ngram.count(texts, 3, set(WORDS))
    small = ngram.pruned(model, [[g for g, n in counts[size].items() if n > 2] for size in (1, 2)])
    assert 0 < len(small.probs[2]) < len(model.probs[2])
    for context in [("<s>", "a"), ("b", "c"), ("h",)]:
        assert sum(math.exp(small.score(w, context)) for w in small.vocabulary) == pytest.approx(1, abs=1e-6)


def test_arpa_files(texts, tmp_path):
    model = ngram.estimate(texts, 3, WORDS)
    ngram.write_arpa(model, tmp_path / "lm.arpa")
    again = ngram.read_arpa(tmp_path / "lm.arpa")
    assert again.perplexity(texts) == pytest.approx(model.perplexity(texts), rel=1e-5)
    lines = (tmp_path / "lm.arpa").read_text().splitlines()
    (tmp_path / "cut.arpa").write_text("\n".join(lines[:-2]))
    with pytest.raises(ValueError, match="cut off"):
        ngram.read_arpa(tmp_path / "cut.arpa")
    lines.remove("\\2-grams:")
    (tmp_path / "bad.arpa").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"bad.arpa:\d+: "):
        ngram.read_arpa(tmp_path / "bad.arpa")


def test_kenlm_reads_the_same_model(texts, tmp_path):
    kenlm = pytest.importorskip("kenlm", reason="kenlm (pip install kenlm==0.3.0) is the other program here")
    model = ngram.estimate(texts, 3, WORDS)
    ngram.write_arpa(model, tmp_path / "lm.arpa")
    other = kenlm.Model(str(tmp_path / "lm.arpa"))
    for text in [*texts[:20], ["a", "unheard", "b"]]:
        assert other.score(" ".join(text)) * math.log(10) == pytest.approx(sum(model.sentence(text)), abs=1e-4)
