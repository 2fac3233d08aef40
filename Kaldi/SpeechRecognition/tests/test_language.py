"""Texts that language models are mixed of, and the pictures of what was heard."""

from __future__ import annotations

import numpy as np
import pytest

from kaldi_asr import fst, language, ngram, plots


def test_weights_fit_what_was_not_seen():
    rng = np.random.default_rng(0)
    words = [f"w{k}" for k in range(12)]
    own = [[words[k] for k in rng.integers(0, 6, 5)] for _ in range(80)]
    alike = ngram.estimate([[words[k] for k in rng.integers(0, 6, 5)] for _ in range(300)], 1, words)
    other = ngram.estimate([[words[k] for k in rng.integers(6, 12, 5)] for _ in range(300)], 1, words)
    weights = language.deleted_weights(own, [alike, other], 4, set(words))
    assert sum(weights) == pytest.approx(1) and weights[2] < 0.02
    # On the texts themselves a model of order 4 would take all the weight; on others it has little to say.
    assert weights[1] > weights[0]
    whole = [ngram.estimate(own, 4, words), alike, other]
    assert ngram.best_weight(whole, own)[0] > 0.95


def test_spoken_forms_are_words():
    forms = language.spoken_forms()
    assert ["twenty", "first"] in forms and ["september", "thirtieth"] in forms and ["z"] in forms
    assert ["question", "mark"] in forms and all(word.replace("'", "").isalpha() for words in forms for word in words)


def test_pictures(tmp_path):
    phones, words = [("SIL", 0, 10), ("B", 10, 20)], [("b", 0.1, 0.2)]
    plots.draw_alignment(tmp_path / "a.png", np.random.default_rng(0).normal(size=(30, 8)), phones, words)
    lattice = fst.Arcs.of(fst.compile_fst([(0, 1, 1, 1, 0.5), (0, 2, 2, 2, 1.0), (1, 2, 2, 2, 0.1)], [(2, 0.0)]))
    plots.draw_lattice(tmp_path / "l.png", lattice, ["<eps>", "a", "b"])
    for name in ("a.png", "l.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    cycle = fst.Arcs.of(fst.compile_fst([(0, 1, 1, 1, 0.5), (1, 0, 2, 2, 1.0)], [(1, 0.0)]))
    with pytest.raises(ValueError, match="cycle"):
        plots.draw_lattice(tmp_path / "c.png", cycle, ["<eps>", "a", "b"])
