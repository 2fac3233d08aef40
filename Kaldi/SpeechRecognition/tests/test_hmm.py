"""GMMs, trees, transforms and forced alignment against float64 computations and searches by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kaldi_asr import alignment, gmm, gmm_training, hmm, transforms, tree
from kaldi_asr.features import FeatureConfig
from kaldi_asr.lexicon import Lexicon
from kaldi_asr.transitions import TransitionModel, monophone_tree


def some_mixtures(rng, pdfs=4, dim=3):
    counts = rng.integers(1, 4, pdfs)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    total = offsets[-1]
    weights = rng.random(total) + 0.1
    for a, b in itertools.pairwise(offsets):
        weights[a:b] /= weights[a:b].sum()
    return gmm.Mixtures(offsets, weights, rng.normal(size=(total, dim)), rng.random((total, dim)) + 0.3)


def brute_likelihood(mixtures, x, pdf):
    total = 0.0
    for g in range(mixtures.offsets[pdf], mixtures.offsets[pdf + 1]):
        density = 1.0
        for d in range(mixtures.dim):
            v = mixtures.variances[g, d]
            density *= math.exp(-((x[d] - mixtures.means[g, d]) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
        total += mixtures.weights[g] * density
    return math.log(total)


# Mixtures


def test_likelihoods_are_the_definition():
    rng = np.random.default_rng(0)
    mixtures = some_mixtures(rng)
    x = rng.normal(size=(5, 3))
    expected = np.array([[brute_likelihood(mixtures, row, p) for p in range(4)] for row in x])
    assert np.allclose(mixtures.log_likelihoods(x), expected, atol=1e-4)
    chosen = np.array([3, 1])
    assert np.allclose(mixtures.log_likelihoods(x, chosen), expected[:, chosen], atol=1e-4)


def test_em_is_the_definition_and_climbs():
    rng = np.random.default_rng(1)
    mixtures = some_mixtures(rng, pdfs=2)
    x = np.concatenate([rng.normal(size=(150, 3)), rng.normal(2, 0.5, size=(150, 3))]).astype(np.float32)
    pdfs = np.repeat([0, 1], 150)
    floor = np.full(3, 1e-4)
    sums = gmm.accumulate(mixtures, x, pdfs)
    g = 0  # the first component of pdf 0 by hand
    parts = np.array([
        [mixtures.weights[k] * math.exp(brute_likelihood(gmm.Mixtures(np.array([0, 1]), np.ones(1),
         mixtures.means[k : k + 1], mixtures.variances[k : k + 1]), row, 0)) for k in range(mixtures.offsets[1])]
        for row in x[:150].astype(np.float64)
    ])  # fmt: skip
    shares = parts[:, g] / parts.sum(1)
    assert sums.occupancy[g] == pytest.approx(shares.sum(), rel=1e-4)
    assert np.allclose(sums.first[g], shares @ x[:150].astype(np.float64), rtol=1e-3, atol=1e-3)
    before = -math.inf
    for _ in range(6):
        sums = gmm.accumulate(mixtures, x, pdfs)
        assert sums.log_likelihood >= before - 0.05  # float32 likelihoods of 300 frames
        before = sums.log_likelihood
        mixtures = gmm.update(mixtures, sums, floor)
    assert mixtures.weights[: mixtures.offsets[1]].sum() == pytest.approx(1)


def test_splitting_keeps_the_density_and_makes_room():
    rng = np.random.default_rng(2)
    mixtures = some_mixtures(rng)
    x = rng.normal(size=(50, 3))
    more = gmm.split(mixtures, np.array([1000.0, 500, 200, 5]), 16, rng)
    assert len(more.weights) == 16 and np.allclose(more.log_likelihoods(x), mixtures.log_likelihoods(x), atol=0.05)
    assert np.diff(more.offsets)[3] == np.diff(mixtures.offsets)[3]  # five frames are not enough for more


def test_components_without_frames_go_but_never_all():
    mixtures = gmm.Mixtures(
        np.array([0, 2, 3]), np.array([0.5, 0.5, 1.0]), np.array([[0.0], [50.0], [3.0]]), np.ones((3, 1))
    )
    x = np.random.default_rng(3).normal(size=(40, 1)).astype(np.float32)
    found = gmm.update(mixtures, gmm.accumulate(mixtures, x, np.zeros(40, int)), np.array([0.01]))
    assert found.offsets.tolist() == [0, 1, 2] and found.means[1, 0] == 3.0 and found.weights.tolist() == [1, 1]
    assert found.means[0, 0] == pytest.approx(float(x.mean()), abs=1e-5)


# Trees


def test_objective_is_the_likelihood_of_the_frames():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(60, 2)) * [1.0, 3.0] + [5, -2]
    stats = np.concatenate([[60], x.sum(0), (x * x).sum(0)])
    v = x.var(0)
    expected = sum(-0.5 * (np.log(2 * np.pi * v) + (row - x.mean(0)) ** 2 / v).sum() for row in x)
    assert tree.objective(stats) == pytest.approx(expected, rel=1e-9)


def grown_statistics(rng):
    """Phone 3 has other frames after 4 than after 5 in state 1, and other ones before 5 in state 2."""
    statistics: tree.Statistics = {}
    for left, right in itertools.product((4, 5), repeat=2):
        for state in range(3):
            mean = (4.0 if state == 1 and left == 4 else 0) + (9.0 if state == 2 and right == 5 else 0)
            frames = rng.normal(mean, 1, size=(40, 2)).astype(np.float32)
            segments = [(left, 0, 0), (3, 0, 40), (right, 40, 0)]
            tree.accumulate(statistics, frames, segments, np.full(40, state), frozenset())
    for phone in (4, 5):
        tree.accumulate(statistics, rng.normal(phone * 5, 1, (40, 2)), [(phone, 0, 40)], np.ones(40, int), frozenset())
    return statistics


def test_a_tree_asks_what_matters():
    statistics = grown_statistics(np.random.default_rng(5))
    found = tree.grow(statistics, [1, 2, 3, 4, 5], frozenset({1, 2}), num_leaves=17, num_states=3)
    assert found.num_pdfs == 17  # 15 states, and two of them split
    assert found.pdf(4, 3, 4, 1) == found.pdf(4, 3, 5, 1) != found.pdf(5, 3, 4, 1)
    assert found.pdf(4, 3, 5, 2) == found.pdf(5, 3, 5, 2) != found.pdf(4, 3, 4, 2)
    assert found.pdf(4, 3, 4, 0) == found.pdf(5, 3, 5, 0)
    again = tree.ContextTree.from_dict(found.to_dict())
    assert all(again.pdf(a, 3, b, s) == found.pdf(a, 3, b, s) for a in range(6) for b in range(6) for s in range(3))


def test_the_first_split_is_the_best_of_all():
    rng = np.random.default_rng(6)
    contexts = [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
    stats = []
    for a, b in contexts:
        x = rng.normal(a * 0.7 - b * 0.4, 1, size=(30, 2))
        stats.append(np.concatenate([[30], x.sum(0), (x * x).sum(0)]))
    stats = np.stack(stats)
    sets = [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]
    member = np.zeros((6, 4), bool)
    for row, chosen in enumerate(sets):
        member[row, list(chosen)] = True
    leaf = tree._best_question(contexts, stats, sets, member, 1.0)
    gains = {}
    for side, chosen in itertools.product((0, 1), sets):
        inside = np.array([context[side] in chosen for context in contexts])
        gains[side, chosen] = sum(tree.objective(stats[m].sum(0)) for m in (inside, ~inside))
    assert (leaf.side, leaf.question) in [k for k, v in gains.items() if v == pytest.approx(max(gains.values()))]
    assert leaf.gain == pytest.approx(max(gains.values()) - tree.objective(stats.sum(0)))


def test_questions_come_from_clusters():
    statistics = {}
    rng = np.random.default_rng(7)
    for phone, mean in ((1, 0.0), (2, 0.1), (3, 5.0), (4, 5.1)):
        tree.accumulate(statistics, rng.normal(mean, 1, (500, 2)), [(phone, 0, 500)], np.ones(500, int), frozenset())
    assert tree.questions(statistics, [1, 2, 3, 4]) == [(1,), (2,), (3,), (4,), (1, 2), (3, 4)]


# Alignment


ENTRIES = {"ab": [("A", "B")], "b": [("B",)], "c": [("A", "A"), ("B", "A")]}


def small_model(rng, width):
    lexicon = Lexicon({word: list(v) for word, v in ENTRIES.items()})
    states = monophone_tree(range(1, 5))
    if width == 3:  # every context of A and B its own pdf
        number = itertools.count()
        nodes = {}
        for key in states.keys():
            if key[0] < 3:
                nodes[key] = [(-1, (), next(number), -1)]
                continue
            nodes[key] = [(0, (1, 3), 1, 2), (1, (4,), 3, 4), (1, (0, 3), 5, 6)]
            nodes[key] += [(-1, (), next(number), -1) for _ in range(4)]
        states = tree.ContextTree(nodes, 3)
    model = TransitionModel.of(states)
    model.stay = rng.uniform(0.2, 0.8, len(model.stay))
    return lexicon, states, model


def best_by_enumeration(words, lexicon, states, model, scores):
    """The score of the best path: all sequences of phones, all durations."""
    choices = []
    for word in words:
        variants = lexicon.pronunciations(word)
        choices.append([(phones, -math.log(len(variants))) for phones in variants])
    best = -math.inf
    frames = len(scores)
    logs = model.log_probabilities()
    for pronunciations in itertools.product(*choices):
        for silences in itertools.product((0, 1), repeat=len(words) + 1):
            phones = [1] * silences[0]
            for (chosen, _), silence in zip(pronunciations, silences[1:], strict=True):
                phones += [*chosen, *([1] * silence)]
            prior = sum(score for _, score in pronunciations) + (len(words) + 1) * math.log(0.5)
            states_in_line = []
            for place, phone in enumerate(phones):
                left = phones[place - 1] if place else 0
                right = phones[place + 1] if place + 1 < len(phones) else 0
                for state in range(3):
                    pdf = states.pdf(left, phone, right, state) if phone > 2 else states.pdf(0, phone, 0, state)
                    states_in_line.append(model.index[phone, state, pdf])
            if not 1 <= len(states_in_line) <= frames:
                continue
            for cuts in itertools.combinations(range(1, frames), len(states_in_line) - 1):
                bounds = [0, *cuts, frames]
                total = prior
                for index, (a, b) in zip(states_in_line, itertools.pairwise(bounds), strict=True):
                    total += scores[a:b, model.triples[index, 2]].sum()
                    total += (b - a - 1) * logs[2 * index + 1] + logs[2 * index + 2]
                best = max(best, total)
    return best


@pytest.mark.parametrize("width", [1, 3])
def test_alignment_is_the_best_of_all_paths(width):
    rng = np.random.default_rng(8)
    lexicon, states, model = small_model(rng, width)
    texts = [["ab"], ["b", "b"], ["c"], ["b"], []]
    lengths = [9, 10, 11, 4, 5]
    scores = [rng.normal(0, 3, (n, states.num_pdfs)) for n in lengths]
    graphs = [alignment.text_graph(words, lexicon, states, model) for words in texts]
    found = alignment.align(graphs, lengths, lambda i, pdfs: scores[i][:, pdfs].astype(np.float32), model)
    for words, item, table in zip(texts, found, scores, strict=True):
        expected = best_by_enumeration(words, lexicon, states, model, table)
        assert item.score == pytest.approx(expected, abs=2e-3)
        spoken = [w for w, _ in itertools.groupby(item.words[item.words >= 0].tolist())]
        assert spoken == list(range(len(words)))


def test_too_few_frames_have_no_alignment():
    rng = np.random.default_rng(9)
    lexicon, states, model = small_model(rng, 1)
    graphs = [alignment.text_graph(["ab"], lexicon, states, model)] * 2
    scores = rng.normal(size=(6, states.num_pdfs)).astype(np.float32)
    found = alignment.align(graphs, [5, 6], lambda i, pdfs: scores[: 5 + i][:, pdfs], model)
    assert found[0] is None and len(found[1].ids) == 6
    assert alignment.equal_alignment(graphs[0], 5) is None
    path = alignment.equal_alignment(graphs[0], 24)
    assert np.bincount(path, minlength=len(graphs[0].triples)).max() == 2  # 12 states with silence at both ends


def test_transition_probabilities_are_shares():
    rng = np.random.default_rng(10)
    _, _, model = small_model(rng, 1)
    ids = np.array([1, 1, 1, 2] * 3 + [4, 4], np.int32)  # state 0: 9 stays, 3 leaves; state 1: too few
    before = model.stay[1]
    model.update([ids])
    assert model.stay[0] == pytest.approx(9 / 12) and model.stay[1] == before


# Transforms


def test_lda_whitens_within_and_orders_between():
    rng = np.random.default_rng(11)
    _, _, model = small_model(rng, 1)
    pdfs = rng.integers(0, 3, 4000)
    item = rng.normal(size=(4000, 2)).astype(np.float32)
    item[:, 0] += 4 * pdfs
    ids = (2 * pdfs + 1).astype(np.int32)
    matrix = transforms.lda([item], [ids], model, 3)
    from kaldi_asr.features import splice

    seen = splice(item, 3, 3).astype(np.float64) @ matrix.T
    within = sum((pdfs == p).mean() * np.cov(seen[pdfs == p].T, bias=True) for p in range(3))
    assert np.allclose(within, np.eye(3), atol=0.01)
    spread = np.var([seen[pdfs == p].mean(0) for p in range(3)], axis=0)
    assert spread[0] > 5 * spread[1:].max()
    with pytest.raises(ValueError, match="15 dimensions"):
        transforms.lda([item], [ids], model, 15)


def test_mllt_raises_the_likelihood_and_undoes_a_rotation():
    rng = np.random.default_rng(12)
    turn = np.array([[1.0, 0.8], [-0.6, 1.0]])
    x = (rng.normal(size=(6000, 2)) * [1.0, 3.0]) @ turn.T
    pdfs = rng.integers(0, 2, 6000)
    x[pdfs == 1] += 2
    x = x.astype(np.float32)
    mixtures = gmm.Mixtures(np.array([0, 1, 2]), np.ones(2), *(
        np.stack([f(x[pdfs == p].astype(np.float64), 0) for p in (0, 1)]) for f in (np.mean, np.var)
    ))  # fmt: skip
    matrix = transforms.mllt(mixtures, x, pdfs)
    turned = x @ matrix.T.astype(np.float32)
    floor = np.full(2, 1e-6)
    after = gmm.update(
        transforms.turned(mixtures, matrix), gmm.accumulate(transforms.turned(mixtures, matrix), turned, pdfs), floor
    )
    gain = gmm.accumulate(after, turned, pdfs).log_likelihood + 6000 * np.log(abs(np.linalg.det(matrix)))
    assert gain > gmm.accumulate(mixtures, x, pdfs).log_likelihood + 500
    covariance = np.cov(turned[pdfs == 0].T)
    assert abs(covariance[0, 1]) < 0.05 * np.sqrt(covariance[0, 0] * covariance[1, 1])


# Training


def spoken(rng, texts, lexicon):
    """Features that say the texts: each state of each phone has its own mean and takes two or three frames."""
    means = rng.normal(0, 4, size=(len(lexicon.phones) + 1, 3, 4))
    items = []
    for words in texts:
        phones = [1] + [p for word in words for p in lexicon.pronunciations(word)[0]] + [1]
        rows = [means[p, s] for p in phones for s in range(3) for _ in range(rng.integers(2, 4))]
        items.append((np.array(rows) + rng.normal(0, 0.5, (len(rows), 4))).astype(np.float32))
    return items, means


@pytest.fixture(scope="module")
def trained():
    rng = np.random.default_rng(13)
    lexicon = Lexicon({"ab": [("A", "B")], "ba": [("B", "A")], "ca": [("C", "A")], "cb": [("C", "B")]})
    texts = [[lexicon.words[k] for k in rng.integers(1, 5, 4)] for _ in range(60)]
    items, means = spoken(rng, texts, lexicon)
    corpus = gmm_training.Corpus(items, texts)
    seen = []
    model, alignments = gmm_training.train_monophones(
        corpus, lexicon, components=20, passes=12, features=FeatureConfig(num_ceps=4), cmvn="none",
        report=lambda stage, step, values: seen.append(values["log_likelihood"]),
    )  # fmt: skip
    return corpus, lexicon, means, model, alignments, seen


def test_flat_start_finds_the_phones(trained):
    corpus, lexicon, means, model, alignments, seen = trained
    assert seen[-1] > seen[0] + 3
    for phone in range(3, 6):
        for state in range(3):
            pdf = model.tree.pdf(0, phone, 0, state)
            rows = slice(model.mixtures.offsets[pdf], model.mixtures.offsets[pdf + 1])
            found = model.mixtures.weights[rows] @ model.mixtures.means[rows, :4]
            assert np.abs(found - means[phone, state]).max() < 1.0


def test_phones_in_context_and_saving(trained, tmp_path):
    corpus, lexicon, means, mono, alignments, _ = trained
    model, again = gmm_training.train_triphones(corpus, mono, alignments, leaves=24, components=30, passes=5, lda=6)
    assert model.tree.width == 3 and model.frontend.matrix.shape == (6, 28)
    same = np.mean([
        np.mean(model.transitions.phones_of_ids()[a] == mono.transitions.phones_of_ids()[b])
        for a, b in zip(again, alignments, strict=True)
    ])  # fmt: skip
    assert same > 0.95
    model.save(tmp_path)
    loaded = hmm.HmmModel.load(tmp_path)
    x = loaded.frontend(corpus.items[0])
    assert np.array_equal(x, model.frontend(corpus.items[0]))
    assert np.array_equal(loaded.mixtures.log_likelihoods(x), model.mixtures.log_likelihoods(x))
    found = loaded.align([x], loaded.graphs(corpus.texts[:1]))
    assert np.array_equal(found[0].ids, again[0])
    with pytest.raises(ValueError, match="no GMM-HMM"):
        hmm.HmmModel.load(tmp_path / "nowhere")
