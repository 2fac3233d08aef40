"""Training of GMM-HMMs from data folders: monophones from a flat start, then phones in context, then better features.

Viterbi EM: frames are aligned now and then, mixtures are estimated in every pass and split until they are many (the
course of Kaldi's train_mono.sh, train_deltas.sh and train_lda_mllt.sh).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import gmm, transforms, tree
from .alignment import Alignment, equal_alignment
from .features import GMM_FEATURES, FeatureConfig
from .hmm import Frontend, HmmModel
from .lexicon import Lexicon
from .transitions import NUM_STATES, TransitionModel, monophone_tree, phone_segments

Report = Callable[[str, int, dict[str, float]], None]  # stage, pass, measures
MONO_REALIGN = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 23)
REALIGN = (6, 12, 18)
SPLITTING = 0.75  # of the passes, in which components are split
MLLT_PASSES = (2, 4, 6, 10)


@dataclass
class Corpus:
    """Utterances as training sees them: normalised MFCC (T, D) and words."""

    items: list[np.ndarray]
    texts: list[list[str]]

    def __len__(self) -> int:
        return len(self.items)


@dataclass
class _Run:
    """A stage while it runs: the model, its features, graphs and alignments."""

    name: str
    model: HmmModel
    corpus: Corpus
    report: Report
    rng: np.random.Generator
    seen: list[np.ndarray] = field(default_factory=list)
    graphs: list = field(default_factory=list)
    alignments: list[np.ndarray | None] = field(default_factory=list)

    def prepare(self) -> None:
        self.seen = [self.model.frontend(item) for item in self.corpus.items]
        self.graphs = self.model.graphs(self.corpus.texts)

    def realign(self) -> None:
        found = self.model.align(self.seen, self.graphs)
        self.alignments = [item.ids if item is not None else None for item in found]
        self.model.transitions.update(item for item in self.alignments if item is not None)

    def frames(self) -> tuple[np.ndarray, np.ndarray]:
        """All aligned frames (N, D) and their pdfs (N,)."""
        pdfs = self.model.transitions.pdfs_of_ids()
        kept = [index for index, item in enumerate(self.alignments) if item is not None]
        if not kept:
            raise ValueError(f"{self.name}: no utterance could be aligned with its text; are sounds and texts apart?")
        rows = np.concatenate([self.seen[index] for index in kept])
        return rows, np.concatenate([pdfs[self.alignments[index]] for index in kept])

    def estimate(self, step: int, target: int) -> None:
        """One pass of EM, splitting up to `target` components."""
        frames, pdfs = self.frames()
        floor = gmm.VARIANCE_FLOOR * frames.var(0, dtype=np.float64)
        sums = gmm.accumulate(self.model.mixtures, frames, pdfs)
        mixtures = gmm.update(self.model.mixtures, sums, floor)
        if len(mixtures.weights) < target:
            occupancy = np.bincount(pdfs, minlength=mixtures.num_pdfs).astype(float)
            mixtures = gmm.split(mixtures, occupancy, target, self.rng)
        self.model.mixtures = mixtures
        self.report(
            self.name,
            step,
            {
                "log_likelihood": sums.log_likelihood / max(sums.frames, 1),
                "components": len(mixtures.weights),
                "aligned": sum(item is not None for item in self.alignments),
            },
        )


def _targets(passes: int, start: int, total: int) -> list[int]:
    """Components wanted after each pass: from `start` in equal factors to `total`, then that."""
    last = max(1, math.floor(passes * SPLITTING))
    return [round(start * (total / start) ** min(1.0, (step + 1) / last)) for step in range(passes)]


def train_monophones(
    corpus: Corpus,
    lexicon: Lexicon,
    *,
    components: int,
    passes: int = 25,
    seed: int = 1,
    features: FeatureConfig = GMM_FEATURES,
    cmvn: str = "speaker",
    report: Report = lambda stage, step, values: None,
) -> tuple[HmmModel, list[np.ndarray | None]]:
    """Models of phones without context from sounds and texts alone; and alignments (None: more text than sound)."""
    states = monophone_tree(range(1, len(lexicon.phones) + 1))
    frontend = Frontend()
    everything = np.concatenate([frontend(item) for item in corpus.items]).astype(np.float64)
    mixtures = gmm.Mixtures.single(everything.mean(0), everything.var(0), states.num_pdfs)
    model = HmmModel(lexicon, states, TransitionModel.of(states), mixtures, frontend, features, cmvn)
    run = _Run("mono", model, corpus, report, np.random.Generator(np.random.Philox(seed)))
    run.prepare()
    paths = [equal_alignment(graph, len(item)) for graph, item in zip(run.graphs, run.seen, strict=True)]
    # Of the path only the pdfs count here, so every frame may carry the id of its state's self-loop.
    run.alignments = [
        (2 * graph.triples[path] + 1).astype(np.int32) if path is not None else None
        for graph, path in zip(run.graphs, paths, strict=True)
    ]
    targets = _targets(passes, states.num_pdfs, components)
    run.estimate(0, states.num_pdfs)
    for step in range(1, passes):
        if step in MONO_REALIGN:
            run.realign()
        run.estimate(step, targets[step])
    run.realign()
    return run.model, run.alignments


def _statistics(run: _Run) -> tree.Statistics:
    """Sums for the decision tree, of the run's features, from its alignments."""
    statistics: tree.Statistics = {}
    model = run.model.transitions
    alone = frozenset(run.model.lexicon.silence_ids)
    for item, ids in zip(run.seen, run.alignments, strict=True):
        if ids is not None:
            states = model.triples[(ids - 1) // 2, 1]
            tree.accumulate(statistics, item, phone_segments(ids, model), states, alone)
    return statistics


def _transfer(old: TransitionModel, new: HmmModel, ids: np.ndarray) -> np.ndarray:
    """The same path through the same phones, in the numbers of another tree."""
    segments = phone_segments(ids, old)
    alone = frozenset(new.lexicon.silence_ids)
    states = old.triples[(ids - 1) // 2, 1]
    result = np.empty_like(ids)
    for place, (phone, start, frames) in enumerate(segments):
        left = segments[place - 1][0] if place else 0
        right = segments[place + 1][0] if place + 1 < len(segments) else 0
        if phone in alone:
            left = right = 0
        for state in np.unique(states[start : start + frames]):
            index = new.transitions.index[phone, int(state), new.tree.pdf(left, phone, right, int(state))]
            rows = start + np.flatnonzero(states[start : start + frames] == state)
            result[rows] = 2 * index + 1 + (ids[rows] + 1) % 2
    return result


def train_triphones(
    corpus: Corpus,
    previous: HmmModel,
    alignments: Sequence[np.ndarray | None],
    *,
    leaves: int,
    components: int,
    passes: int = 24,
    seed: int = 1,
    lda: int = 0,
    report: Report = lambda stage, step, values: None,
    name: str = "tri",
) -> tuple[HmmModel, list[np.ndarray | None]]:
    """Models of phones in context. With `lda` > 0 features are that many dimensions of spliced MFCC (LDA and MLLT)."""
    frontend = Frontend()
    if lda:
        frontend = Frontend(transforms.lda(corpus.items, alignments, previous.transitions, lda))
    rng = np.random.Generator(np.random.Philox(seed))
    seed_model = HmmModel(
        previous.lexicon, previous.tree, previous.transitions, previous.mixtures, frontend, previous.features,
        previous.cmvn,
    )  # fmt: skip
    run = _Run(name, seed_model, corpus, report, rng)
    run.seen = [frontend(item) for item in corpus.items]
    run.alignments = list(alignments)
    phones = range(1, len(previous.lexicon.phones) + 1)
    grown = tree.grow(
        _statistics(run), phones, frozenset(previous.lexicon.silence_ids), num_leaves=leaves, num_states=NUM_STATES
    )
    model = HmmModel(
        previous.lexicon, grown, TransitionModel.of(grown), previous.mixtures, frontend, previous.features,
        previous.cmvn,
    )  # fmt: skip
    run.alignments = [_transfer(previous.transitions, model, ids) if ids is not None else None for ids in alignments]
    run.model = model
    model.transitions.update(ids for ids in run.alignments if ids is not None)
    everything = np.concatenate(run.seen).astype(np.float64)
    model.mixtures = gmm.Mixtures.single(everything.mean(0), everything.var(0), grown.num_pdfs)
    run.graphs = model.graphs(corpus.texts)
    targets = _targets(passes, grown.num_pdfs, components)
    run.estimate(0, grown.num_pdfs)
    for step in range(1, passes):
        if step in REALIGN:
            run.realign()
        if lda and step in MLLT_PASSES:
            frames, pdfs = run.frames()
            turn = transforms.mllt(model.mixtures, frames, pdfs)
            model.frontend = Frontend(turn @ model.frontend.matrix, model.frontend.context)
            model.mixtures = transforms.turned(model.mixtures, turn)
            run.seen = [model.frontend(item) for item in corpus.items]
        run.estimate(step, targets[step])
    run.realign()
    return run.model, run.alignments


def alignments_of(found: Sequence[Alignment | None]) -> list[np.ndarray | None]:
    """The transition ids alone."""
    return [item.ids if item is not None else None for item in found]
