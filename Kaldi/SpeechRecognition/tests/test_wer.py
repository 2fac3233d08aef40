"""Word error rates against kaldialign, and the cases that are easily got wrong."""

from __future__ import annotations

import kaldialign
import numpy as np
import pytest

from kaldi_asr import wer


def test_edits_are_those_of_kaldialign():
    rng = np.random.default_rng(0)
    for _ in range(200):
        reference, hypothesis = (list(map(str, rng.integers(0, 4, rng.integers(0, 9)))) for _ in range(2))
        expected = kaldialign.edit_distance(reference, hypothesis)
        found = wer.Scored(wer.align(reference, hypothesis))
        assert found.edits == expected["total"] and found.words == len(reference)
        assert [r for r, _ in found.pairs if r is not None] == reference
        assert [h for _, h in found.pairs if h is not None] == hypothesis


def test_corpus_rate_is_summed_not_averaged():
    found = wer.score({"a": ["x"], "b": list("abcdefghi")}, {"a": ["y"], "b": list("abcdefghi")})
    assert found.wer == pytest.approx(10) and found.substitutions == 1 and found.sentence_errors == 50
    assert found.summary().startswith("%WER 10.00 [ 1 / 10, 0 ins, 0 del, 1 sub ]")
    assert found.report() == "a ref x\na hyp y"
    assert found.confusions() == [("x", "y", 1)]


def test_empty_references_count_their_insertions():
    found = wer.score({"a": [], "b": ["x"]}, {"a": ["y", "z"], "b": ["x"]})
    assert found.insertions == 2 and found.wer == 200
    assert wer.score({"a": []}, {"a": []}).wer == 0
    assert wer.score({"a": []}, {"a": ["x"]}).wer == float("inf")
    assert wer.score({"a": []}, {"a": []}).interval() == (0, 0)


def test_nothing_is_left_out():
    with pytest.raises(ValueError, match="1 references have no hypothesis, e.g. 'b'"):
        wer.score({"a": [], "b": []}, {"a": []})
    with pytest.raises(ValueError, match="1 hypotheses no reference"):
        wer.score({"a": []}, {"a": [], "b": []})


def test_interval_covers_the_rate():
    rng = np.random.default_rng(1)
    reference = {str(i): ["a"] * 10 for i in range(300)}
    hypothesis = {key: ["a" if value > 0.1 else "b" for value in rng.random(10)] for key in reference}
    found = wer.score(reference, hypothesis)
    low, high = found.interval()
    assert low < found.wer < high
    # 3000 independent words at about 10 %: a standard error of 0.55 points, so about 2.1 from end to end
    assert 1.6 < high - low < 2.8
