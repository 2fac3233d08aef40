"""Graphs and decoding: the best path of HCLG is the best over all sentences, as forced alignment scores them."""

from __future__ import annotations

import itertools
import math

import kaldifst
import numpy as np
import pytest

from kaldi_asr import alignment, decoding, fst, graph, ngram, tree
from kaldi_asr.lexicon import Lexicon
from kaldi_asr.transitions import TransitionModel, monophone_tree

ENTRIES = {"ab": [("A", "B")], "b": [("B",)], "c": [("A", "A"), ("B", "A")], "d": [("A", "B")]}
WORDS = ["ab", "b", "c"]


def context_tree(phones):
    """Every left context and every right one of phones 3 and above its own pdf."""
    number = itertools.count()
    nodes = {}
    for key in monophone_tree(range(1, phones + 1)).keys():
        if key[0] < 3:
            nodes[key] = [(-1, (), next(number), -1)]
        else:
            nodes[key] = [(0, (1, 3), 1, 2), (1, (4,), 3, 4), (1, (0, 3), 5, 6)]
            nodes[key] += [(-1, (), next(number), -1) for _ in range(4)]
    return tree.ContextTree(nodes, 3)


def setting(width, words, seed=0):
    rng = np.random.default_rng(seed)
    lexicon = Lexicon({word: list(ENTRIES[word]) for word in words})
    states = monophone_tree(range(1, len(lexicon.phones) + 1)) if width == 1 else context_tree(len(lexicon.phones))
    model = TransitionModel.of(states)
    model.stay = rng.uniform(0.2, 0.8, len(model.stay))
    return lexicon, states, model, rng


def alignment_cost(words, lexicon, states, model, scores):
    """Forced alignment's cost without what it charges for choosing a pronunciation, which a graph does not."""
    text = alignment.text_graph(words, lexicon, states, model)
    [found] = alignment.align([text], [len(scores)], lambda i, pdfs: scores[:, pdfs], model)
    if found is None:
        return math.inf
    return -found.score - sum(math.log(len(lexicon.pronunciations(word))) for word in words)


@pytest.mark.parametrize("width", [1, 3])
def test_the_graph_is_all_sentences(width):
    lexicon, states, model, rng = setting(width, WORDS)
    texts = [["ab", "b"], ["b"], ["c", "ab"], ["ab", "ab", "c"], ["b", "c"]]
    language = ngram.estimate(texts, 2, WORDS)
    options = graph.GraphOptions(self_loop_scale=1.0)
    hclg = graph.compose_graph(graph.grammar(language, lexicon), lexicon, states, model, options)
    search = decoding.SearchOptions(beam=1000.0, max_active=100000, acoustic_scale=1.0)
    decoder = decoding.Decoder(graph.with_pdf_labels(hclg, model), lexicon, search)
    for frames in (4, 7, 13, 13, 13):
        scores = rng.normal(0, 2, (frames, states.num_pdfs)).astype(np.float32)
        costs = {}
        for length in range(0, 1 + frames // 3):
            for words in itertools.product(WORDS, repeat=length):
                # Backing off may be cheaper than the n-gram itself; a graph takes the cheaper way.
                lm = cheapest(language, words)
                costs[words] = lm + alignment_cost(list(words), lexicon, states, model, scores)
        best = min(costs, key=costs.get)
        found = decoder.decode(scores)
        assert found.final and found.cost == pytest.approx(costs[best], abs=5e-3)
        assert costs[tuple(found.words)] == pytest.approx(costs[best], abs=5e-3)


def cheapest(language, words):
    """The cost of a sentence where every word may be predicted with or without backing off."""

    def options(word, context):
        found = language.probs[len(context)].get((*context, word))
        here = [] if found is None else [-found]
        if context:
            here += [o - language.backoffs.get(context, 0.0) for o in options(word, context[1:])]
        return here

    padded = ["<s>", *words, "</s>"]
    return sum(min(options(padded[i], tuple(padded[i - 1 : i]))) for i in range(1, len(padded)))


def test_homophones_are_told_apart_by_the_grammar():
    lexicon, states, model, rng = setting(3, ["ab", "d", "b"])
    language = ngram.estimate([["ab", "b"]] * 8 + [["d"]] * 8, 2, ["ab", "d", "b"])
    hclg = graph.compose_graph(graph.grammar(language, lexicon), lexicon, states, model)
    decoder = decoding.Decoder(graph.with_pdf_labels(hclg, model), lexicon)

    def say(words):
        text = alignment.text_graph(words, lexicon, states, model)
        path = np.repeat(alignment.equal_alignment(text, 40), 2)
        scores = np.full((80, states.num_pdfs), -60.0, np.float32)
        scores[np.arange(80), model.triples[text.triples[path], 2]] = 0.0
        return decoder.decode(scores).words

    assert say(["ab", "b"]) == ["ab", "b"] and say(["d"]) == ["d"] and say(["ab"]) == ["d"]


def test_grammar_scores_are_the_models():
    lexicon = Lexicon({word: list(ENTRIES[word]) for word in WORDS})
    texts = [["ab", "b"], ["b"], ["c", "ab"], ["ab", "ab", "c"], ["b", "c"]] * 2
    language = ngram.estimate(texts, 3, [*WORDS, "unspoken"])
    acceptor = graph.grammar(language, lexicon)
    arcs = fst.Arcs.of(acceptor)
    arcs.ilabel = np.where(arcs.ilabel == lexicon.backoff_id, 0, arcs.ilabel)
    plain = arcs.to_fst()
    kaldifst.arcsort(plain, "ilabel")
    for words in texts[:5]:
        line = fst.compile_fst(
            [(i, i + 1, lexicon.word_ids[w], lexicon.word_ids[w], 0.0) for i, w in enumerate(words)],
            [(len(words), 0.0)],
        )
        path = kaldifst.shortest_path(kaldifst.compose(line, plain))
        cost = sum(a for a in fst.Arcs.of(path).cost) + sum(fst.Arcs.of(path).final_costs)
        assert cost <= -sum(language.sentence(words)) + 1e-4
        assert cost == pytest.approx(-sum(language.sentence(words)), abs=0.7)  # a way through back-off may be cheaper


def test_grammar_agrees_with_kaldilm(tmp_path):
    kaldilm = pytest.importorskip("kaldilm", reason="kaldilm comes with kaldi-hmm-gmm")
    lexicon = Lexicon({word: list(ENTRIES[word]) for word in WORDS})
    texts = [["ab", "b"], ["b"], ["c", "ab"], ["ab", "ab", "c"], ["b", "c"]] * 2
    language = ngram.estimate(texts, 3, WORDS)
    ngram.write_arpa(language, tmp_path / "lm.arpa")
    lexicon.save(tmp_path)
    text = kaldilm.arpa2fst(
        str(tmp_path / "lm.arpa"), disambig_symbol="#0", read_symbol_table=str(tmp_path / "words.txt"), max_order=3
    )
    unknown = str(lexicon.word_ids["<unk>"])
    theirs = [line.split() for line in text.splitlines()]
    ours = fst.Arcs.of(graph.grammar(language, lexicon))
    expected = sorted(
        (int(r[2]), round(float(r[4]) if len(r) > 4 else 0.0, 3)) for r in theirs if len(r) >= 4 and r[2] != unknown
    )
    expected.remove((lexicon.backoff_id, 0.0))  # from the state after <unk>, which we have not
    found = sorted((int(label), round(float(cost), 3)) for label, cost in zip(ours.ilabel, ours.cost, strict=True))
    assert len(found) == len(expected)
    assert np.allclose([c for _, c in found], [c for _, c in expected], atol=2e-3)
    assert [label for label, _ in found] == [label for label, _ in expected]


def test_self_loops_do_not_change_what_is_accepted():
    lexicon, states, model, _ = setting(3, WORDS)
    loop = graph.word_loop(WORDS, lexicon)
    hclg = graph.compose_graph(loop, lexicon, states, model, graph.GraphOptions(1.0))
    arcs = fst.Arcs.of(hclg)
    # Each state is entered by transition ids of one transition state only, and then has just that self-loop.
    loops = arcs.source == arcs.target
    assert (arcs.ilabel[loops] % 2 == 1).all() and loops.sum() == len(set(arcs.source[loops]))
    own = dict(zip(arcs.source[loops].tolist(), ((arcs.ilabel[loops] - 1) // 2).tolist(), strict=True))
    forward = (arcs.ilabel > 0) & ~loops
    assert (arcs.ilabel[forward] % 2 == 0).all()
    assert all(own[t] == (i - 1) // 2 for t, i in zip(arcs.target[forward], arcs.ilabel[forward], strict=True))
    assert not set(own) & set(arcs.target[(arcs.ilabel == 0)].tolist())
    costs = -model.log_probabilities()
    assert np.allclose(arcs.cost[loops], costs[arcs.ilabel[loops]], atol=1e-3)


@pytest.fixture(scope="module")
def digits():
    """A decoder and scores that say ab, b, b with some doubt."""
    lexicon, states, model, rng = setting(1, WORDS, 5)
    hclg = graph.compose_graph(graph.word_loop(WORDS, lexicon), lexicon, states, model)
    decoder = decoding.Decoder(graph.with_pdf_labels(hclg, model), lexicon)
    text = alignment.text_graph(["ab", "b", "b"], lexicon, states, model)
    path = alignment.equal_alignment(text, 90)
    scores = rng.normal(-40, 15, (90, states.num_pdfs)).astype(np.float32)
    scores[np.arange(90), model.triples[text.triples[path], 2]] = 0.0
    return decoder, scores


def test_a_stream_hears_the_same(digits):
    decoder, scores = digits
    whole = decoder.decode(scores)
    assert whole.words == ["ab", "b", "b"] and len(whole.pdfs) == 90
    for size in (1, 7, 30):
        stream = decoder.stream()
        for start in range(0, 90, size):
            stream.accept(scores[start : start + size])
        found = stream.finish()
        assert found.words == whole.words and found.cost == pytest.approx(whole.cost, abs=1e-3)
    assert stream.partial().words[:2] == ["ab", "b"]
    assert decoder.stream().finish().words == []


def test_nbest_begins_with_the_best(digits):
    decoder, scores = digits
    decoder = decoding.Decoder(decoder.graph, decoder.lexicon, decoding.SearchOptions(lattice_beam=12.0))
    found = decoder.nbest(scores, 4)
    whole = decoder.decode(scores)
    assert found[0].words == whole.words and found[0].cost == pytest.approx(whole.cost, abs=1e-2)
    assert len({tuple(item.words) for item in found}) == len(found) > 1
    assert [item.cost for item in found] == sorted(item.cost for item in found)
    sure = decoding.confidences(found)
    assert len(sure) == 3 and all(0 < value <= 1 for value in sure)


def test_the_cheapest_sequences_are_the_cheapest():
    rng = np.random.default_rng(3)
    rows = [(a, b, label, label, float(rng.random())) for a in range(5) for b in range(a + 1, 6) for label in [10 * b]]
    arcs = fst.Arcs.of(fst.compile_fst(rows, [(5, 0.5), (3, 0.1)]))
    expected = []

    def walk(state, labels, cost):
        expected.extend([(labels, cost + {5: 0.5, 3: 0.1}[state])] if state in (5, 3) else [])
        for a, b, label, _, step in rows:
            if a == state:
                walk(b, [*labels, label], cost + step)

    walk(0, [], 0.0)
    expected.sort(key=lambda item: item[1])
    found = decoding.best_sequences(arcs, 7)
    assert [labels for labels, _ in found] == [labels for labels, _ in expected[:7]]
    assert np.allclose([cost for _, cost in found], [cost for _, cost in expected[:7]], atol=1e-4)


def test_confidence_is_the_share_that_agrees():
    items = [
        decoding.Hypothesis(words, cost, 0.0) for words, cost in ((["a", "b"], 0.0), (["a", "c"], 0.0), (["b"], 50))
    ]
    assert decoding.confidences(items) == pytest.approx([1.0, 0.5])
    assert decoding.confidences([]) == []


def test_arrays_keep_the_transducer():
    made = kaldifst.compile("0 2 1 5 0.5\n2 1 3 0 0.25\n1 0.125\n2 1\n")
    again = fst.Arcs.of(made).to_fst()
    assert sorted(again.to_str().split("\n")) == sorted(made.to_str().split("\n"))
    reordered = fst.compile_fst([(3, 0, 7, 7, 1.0), (0, 3, 8, 8, 2.0)], [(3, 0.0)])
    assert fst.Arcs.of(reordered).source.tolist()[0] == 0 or 0 in fst.Arcs.of(reordered).source


def test_a_grammar_needs_words():
    lexicon = Lexicon({"ab": [("A", "B")]})
    with pytest.raises(ValueError, match="shares no word"):
        graph.grammar(ngram.estimate([["x"]], 2, ["x"]), lexicon)
