"""Forced alignment: which state of which phone each frame of a known text belongs to, by Viterbi's algorithm.

A text becomes a graph of phones: silence may stand between words and at both ends, and a word may have several
pronunciations. The graph is unfolded by phonetic context, then by states. Many utterances run through one numpy loop
over frames, their states side by side in one vector, so that a pass over 20 minutes of speech takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .lexicon import Lexicon
from .transitions import NUM_STATES, TransitionModel
from .tree import ContextTree

SILENCE_PROBABILITY = 0.5  # of silence at each place where it may be
BUDGET = 12_000_000  # frames times states of a batch
NOTHING = -1e30


@dataclass
class TextGraph:
    """The states of one text. `before` (S, K): indices of states one may come from (-1: none), itself first."""

    triples: np.ndarray  # (S,) index of the transition model's triple
    words: np.ndarray  # (S,) place of the word in the text, -1 for silence
    before: np.ndarray  # (S, K) int
    costs: np.ndarray  # (S, K) log probability of the choice (silence or not, pronunciation), without transitions
    first: np.ndarray  # (S,) log probability of starting here
    last: np.ndarray  # (S,) log probability of ending here


@dataclass
class _Arc:
    """A phone of the text's phone graph; `entries` are the arcs before it (-1: the start) with log probabilities."""

    phone: int
    word: int
    entries: list[tuple[int, float]]


def phone_graph(words: Sequence[str], lexicon: Lexicon) -> tuple[list[_Arc], list[tuple[int, float]]]:
    """The arcs in order, and those after which the text may end."""
    arcs: list[_Arc] = []
    silence, skip = math.log(SILENCE_PROBABILITY), math.log(1 - SILENCE_PROBABILITY)
    frontier: list[tuple[int, float]] = [(-1, 0.0)]

    def optional_silence() -> None:
        arcs.append(_Arc(1, -1, [(place, score + silence) for place, score in frontier]))
        frontier[:] = [(place, score + skip) for place, score in frontier] + [(len(arcs) - 1, 0.0)]

    optional_silence()
    for number, word in enumerate(words):
        ends = []
        variants = lexicon.pronunciations(word)
        for variant in variants:
            entries = [(place, score - math.log(len(variants))) for place, score in frontier]
            for phone in variant:
                arcs.append(_Arc(phone, number, entries))
                entries = [(len(arcs) - 1, 0.0)]
            ends.append((len(arcs) - 1, 0.0))
        frontier = ends
        optional_silence()
    ends = [(place, score) for place, score in frontier if place >= 0]
    return arcs, ends


def text_graph(
    words: Sequence[str], lexicon: Lexicon, tree: ContextTree, model: TransitionModel, num_states: int = NUM_STATES
) -> TextGraph:
    """Unfold a text by context and states."""
    arcs, ends = phone_graph(words, lexicon)
    final = dict(ends)
    alone = set(lexicon.silence_ids) if tree.width == 3 else set(range(1, len(lexicon.phones) + 1))
    lefts: list[set[int]] = [{arcs[p].phone if p >= 0 else 0 for p, _ in arc.entries} for arc in arcs]
    rights: list[set[int]] = [set() for _ in arcs]
    for arc in arcs:
        for place, _ in arc.entries:
            if place >= 0:
                rights[place].add(arc.phone)
    for place in final:
        rights[place].add(0)
    nodes: list[tuple[int, int, int]] = []  # (arc, left phone, right phone), None as -1
    of_arc: list[list[int]] = []
    for number, arc in enumerate(arcs):
        contexts = [(-1, -1)] if arc.phone in alone else [(a, b) for a in lefts[number] for b in rights[number]]
        of_arc.append(list(range(len(nodes), len(nodes) + len(contexts))))
        nodes += [(number, a, b) for a, b in sorted(contexts)]
    triples, places = [], []
    incoming: list[list[tuple[int, float]]] = []
    first, last = [], []
    for number, left, right in nodes:
        arc = arcs[number]
        entries: list[tuple[int, float]] = []
        start = NOTHING
        for place, score in arc.entries:
            if place < 0:
                start = score if left in (-1, 0) else start
                continue
            for other in of_arc[place]:
                if left in (-1, arcs[place].phone) and nodes[other][2] in (-1, arc.phone):
                    entries.append((other * num_states + num_states - 1, score))
        for state in range(num_states):
            pdf = tree.pdf(max(left, 0), arc.phone, max(right, 0), state)
            triples.append(model.index[arc.phone, state, pdf])
            places.append(arc.word)
            incoming.append(entries if state == 0 else [(len(triples) - 2, 0.0)])
            first.append(start if state == 0 else NOTHING)
            ending = state == num_states - 1 and number in final and right in (-1, 0)
            last.append(final[number] if ending else NOTHING)
    width = 1 + max(len(found) for found in incoming)
    before = np.full((len(triples), width), -1, np.int64)
    costs = np.full((len(triples), width), NOTHING, np.float32)
    before[:, 0], costs[:, 0] = np.arange(len(triples)), 0.0
    for row, found in enumerate(incoming):
        for column, (place, score) in enumerate(found, 1):
            before[row, column], costs[row, column] = place, score
    return TextGraph(
        np.array(triples), np.array(places), before, costs, np.array(first, np.float32), np.array(last, np.float32)
    )


@dataclass
class Alignment:
    """`ids` (T,) int32 transition ids; `words` (T,) int32 place of the word, -1 in silence; log likelihood in all."""

    ids: np.ndarray
    words: np.ndarray
    score: float


def equal_alignment(graph: TextGraph, frames: int) -> np.ndarray | None:
    """States with equal shares of the frames along a path with silence at both ends and nowhere else.

    None where there are fewer frames than states. What training from nothing begins with.
    """
    path = [int(np.flatnonzero(graph.last > NOTHING / 2).max())]
    while True:
        earlier = graph.before[path[-1], 1:]
        earlier = earlier[earlier >= 0]
        if not len(earlier):
            break
        spoken = earlier[graph.words[earlier] >= 0]
        path.append(int((spoken if len(spoken) else earlier).max()))
    path.reverse()
    if len(path) > frames:
        return None
    return np.array(path)[np.arange(frames) * len(path) // frames]


Scores = Callable[[int, np.ndarray], np.ndarray]  # (utterance, pdfs (U,)) -> log likelihoods (T, U)


def align(
    graphs: Sequence[TextGraph], frames: Sequence[int], scores: Scores, model: TransitionModel, scale: float = 1.0
) -> list[Alignment | None]:
    """The best path of each utterance; None where its frames are too few for its states.

    `scores` are asked for the pdfs that occur in an utterance; `scale` multiplies them.
    """
    order = sorted(range(len(graphs)), key=lambda index: frames[index])
    found: list[Alignment | None] = [None] * len(graphs)
    batch: list[int] = []
    states = 0
    for index in order:
        size = len(graphs[index].triples)
        if batch and (states + size) * frames[index] > BUDGET:
            _align_batch(batch, graphs, frames, scores, model, scale, found)
            batch, states = [], 0
        batch.append(index)
        states += size
    if batch:
        _align_batch(batch, graphs, frames, scores, model, scale, found)
    return found


def _emissions(
    batch: Sequence[int], graphs: Sequence[TextGraph], frames: Sequence[int], scores: Scores, model: TransitionModel,
    scale: float, offsets: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """(longest T, states of the batch + 1) float32; what lies after an utterance's end is 0."""
    longest = max(frames[index] for index in batch)
    emissions = np.zeros((longest, offsets[-1] + 1), np.float32)
    for place, index in enumerate(batch):
        pdfs, inverse = np.unique(model.triples[graphs[index].triples, 2], return_inverse=True)
        emissions[: frames[index], offsets[place] : offsets[place + 1]] = scale * scores(index, pdfs)[:, inverse]
    return emissions


def _align_batch(
    batch: Sequence[int], graphs: Sequence[TextGraph], frames: Sequence[int], scores: Scores, model: TransitionModel,
    scale: float, found: list[Alignment | None],
) -> None:  # fmt: skip
    offsets = np.concatenate([[0], np.cumsum([len(graphs[index].triples) for index in batch])])
    total, width = int(offsets[-1]), max(graphs[index].before.shape[1] for index in batch)
    before = np.full((total, width), total, np.int64)  # the state after the last is never reached
    costs = np.full((total, width), NOTHING, np.float32)
    ids = model.log_probabilities()
    for place, index in enumerate(batch):
        graph, rows = graphs[index], slice(offsets[place], offsets[place + 1])
        columns = graph.before.shape[1]
        # What one comes from decides the transition's probability: its own self-loop, or another's way on.
        local = np.where(graph.before >= 0, graph.before, 0)
        transition = np.where(
            np.arange(columns) == 0, ids[2 * graph.triples + 1][:, None], ids[2 * graph.triples[local] + 2]
        )
        before[rows, :columns] = np.where(graph.before >= 0, graph.before + offsets[place], total)
        costs[rows, :columns] = np.where(graph.before >= 0, graph.costs + transition, NOTHING)
    emissions = _emissions(batch, graphs, frames, scores, model, scale, offsets)
    choices = np.zeros((len(emissions), total), np.uint8 if width < 256 else np.uint16)
    current = np.full(total + 1, NOTHING, np.float32)
    current[:-1] = np.concatenate([graphs[index].first for index in batch]) + emissions[0, :-1]
    ends = {frames[index] - 1: [] for index in batch}
    for place, index in enumerate(batch):
        ends[frames[index] - 1].append(place)
    rows = np.arange(total)
    for time in range(len(emissions)):
        if time:
            candidates = current[before] + costs
            choice = candidates.argmax(1)
            choices[time] = choice
            current[:-1] = candidates[rows, choice] + emissions[time, :-1]
        for place in ends.get(time, ()):
            own = slice(offsets[place], offsets[place + 1])
            graph = graphs[batch[place]]
            leave = np.where(graph.last > NOTHING / 2, graph.last + ids[2 * graph.triples + 2], NOTHING)
            finals = current[:-1][own] + leave
            state = int(finals.argmax())
            if finals[state] > NOTHING / 2:
                path = _trace(choices, before, offsets[place] + state, time) - offsets[place]
                found[batch[place]] = _alignment(graph, path, float(finals[state]))


def _trace(choices: np.ndarray, before: np.ndarray, state: int, time: int) -> np.ndarray:
    path = np.empty(time + 1, np.int64)
    for moment in range(time, -1, -1):
        path[moment] = state
        if moment:
            state = before[state, choices[moment, state]]
    return path


def _alignment(graph: TextGraph, path: np.ndarray, score: float) -> Alignment:
    return Alignment(ids_of_path(graph, path), graph.words[path].astype(np.int32), score)


def ids_of_path(graph: TextGraph, path: np.ndarray) -> np.ndarray:
    """Transition ids of a path of states: stays where the next frame is in the same state, else goes on."""
    stays = np.append(path[1:] == path[:-1], False)
    return np.where(stays, 2 * graph.triples[path] + 1, 2 * graph.triples[path] + 2).astype(np.int32)
