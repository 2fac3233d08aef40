"""Search for the best words: kaldi_decoder's token passing over a graph whose input labels are pdf + 1.

decoder = Decoder(graph, lexicon)
decoder.decode(log_likelihoods)                  # Hypothesis(words, cost, ...)
stream = decoder.stream(); stream.accept(chunk); stream.partial(); stream.finish()
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import kaldi_decoder
import kaldifst
import numpy as np

from . import wer
from .fst import Arcs, compile_fst
from .lexicon import EPSILON, Lexicon

MOST_STATES = 20000  # of a word lattice


@dataclass(frozen=True)
class SearchOptions:
    """`acoustic_scale` times log likelihoods are weighed against the graph's costs."""

    beam: float = 14.0
    max_active: int = 7000
    acoustic_scale: float = 0.1
    lattice_beam: float = 6.0


@dataclass
class Hypothesis:
    """What was heard; `cost` in all, the graph's part in it, and whether the search reached a final state."""

    words: list[str]
    graph_cost: float = float("inf")
    acoustic_cost: float = float("inf")
    final: bool = False
    pdfs: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def cost(self) -> float:
        return self.graph_cost + self.acoustic_cost


class Decoder:
    """A graph with input labels pdf + 1, ready to search; `words` of a lexicon name its output labels."""

    def __init__(
        self, graph: kaldifst.StdVectorFst, lexicon: Lexicon, options: SearchOptions = SearchOptions()
    ) -> None:
        self.graph, self.lexicon, self.options = graph, lexicon, options
        self.names = [EPSILON, *lexicon.words]

    def decode(self, scores: np.ndarray) -> Hypothesis:
        """(T, P) log likelihoods -> the best words."""
        stream = self.stream()
        stream.accept(scores)
        return stream.finish()

    def stream(self) -> Stream:
        """A search that goes on as frames arrive."""
        return Stream(self)

    def lattice(self, scores: np.ndarray, lattice_beam: float | None = None) -> kaldifst.Lattice | None:
        """The raw lattice within lattice_beam of the best path; None where the search fails."""
        config = kaldi_decoder.LatticeSimpleDecoderConfig(
            beam=self.options.beam,
            lattice_beam=self.options.lattice_beam if lattice_beam is None else lattice_beam,
            determinize_lattice=False,
        )
        search = kaldi_decoder.LatticeSimpleDecoder(self.graph, config)
        search.decode(self._decodable(scores))
        found, lattice = search.get_raw_lattice()
        return lattice if found else None

    def word_lattice(self, scores: np.ndarray) -> Arcs | None:
        """The word sequences within lattice_beam of the best, each once with its least cost: an acyclic acceptor."""
        beam = self.options.lattice_beam
        while True:
            lattice = self.lattice(scores, beam)
            if lattice is None:
                return None
            words = lattice_words(lattice)
            try:
                kaldifst.determinize_star(words, max_states=MOST_STATES)
            except RuntimeError:  # so many sequences are that near to the best: the beam was too wide
                beam /= 2
                continue
            return Arcs.of(words)

    def nbest(self, scores: np.ndarray, count: int) -> list[Hypothesis]:
        """Up to `count` different word sequences, the best first; their cost is all in `graph_cost`."""
        words = self.word_lattice(scores)
        if words is None:
            return []
        return [
            Hypothesis([self.names[label] for label in labels], cost, 0.0, True)
            for labels, cost in best_sequences(words, count)
        ]

    def hypothesis(self, path: kaldifst.Lattice, final: bool) -> Hypothesis:
        _, ilabels, olabels, weight = kaldifst.get_linear_symbol_sequence(path)
        words = [self.names[label] for label in olabels]
        return Hypothesis(words, weight.value1, weight.value2, final, np.array(ilabels, np.int32) - 1)

    def _decodable(self, scores: np.ndarray, offset: int = 0) -> kaldi_decoder.DecodableCtc:
        scaled = np.ascontiguousarray(scores * np.float32(self.options.acoustic_scale), np.float32)
        return kaldi_decoder.DecodableCtc(scaled, offset)


class Stream:
    """One utterance while it is heard."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        options = kaldi_decoder.FasterDecoderOptions(beam=decoder.options.beam, max_active=decoder.options.max_active)
        self.search = kaldi_decoder.FasterDecoder(decoder.graph, options)
        self.search.init_decoding()
        self.frames = 0

    def accept(self, scores: np.ndarray) -> None:
        """(T, P) log likelihoods of the next frames."""
        if len(scores):
            self.search.advance_decoding(self.decoder._decodable(scores, self.frames))
            self.frames += len(scores)

    def partial(self) -> Hypothesis:
        """The best words so far, whether or not a sentence may end here."""
        return self._best(False)

    def finish(self) -> Hypothesis:
        """The best words of the whole; of a path that is no complete sentence if none is."""
        return self._best(self.search.reached_final())

    def _best(self, final: bool) -> Hypothesis:
        if not self.frames:
            return Hypothesis([])
        found, path = self.search.get_best_path(final)
        return self.decoder.hypothesis(path, final) if found else Hypothesis([])


def lattice_words(lattice: kaldifst.Lattice) -> kaldifst.StdVectorFst:
    """The output labels of a raw lattice as an acceptor; a path's cost is the graph's and the acoustic together."""
    arcs, finals = [], []
    for line in lattice.to_str().splitlines():
        cells = line.split()
        if len(cells) >= 4:
            cost = sum(map(float, cells[4].split(","))) if len(cells) > 4 else 0.0
            arcs.append((int(cells[0]), int(cells[1]), int(cells[3]), int(cells[3]), cost))
        elif cells:
            finals.append((int(cells[0]), sum(map(float, cells[1].split(","))) if len(cells) > 1 else 0.0))
    return compile_fst(arcs, finals)


def best_sequences(words: Arcs, count: int) -> list[tuple[list[int], float]]:
    """The `count` cheapest label sequences of an acyclic deterministic acceptor with their costs (A*)."""
    outgoing: dict[int, list[tuple[int, int, float]]] = {}
    for source, target, label, cost in zip(
        words.source.tolist(), words.target.tolist(), words.ilabel.tolist(), words.cost.tolist(), strict=True
    ):
        outgoing.setdefault(source, []).append((target, label, cost))
    finals = dict(zip(words.final_states.tolist(), words.final_costs.tolist(), strict=True))
    rest: dict[int, float] = {}

    def remaining(state: int) -> float:
        order, seen = [state], set()
        while order:  # depth first, without recursion: lattices are deep
            here = order[-1]
            open_states = [t for t, _, _ in outgoing.get(here, ()) if t not in rest]
            if here in seen or not open_states:
                costs = [cost + rest[target] for target, _, cost in outgoing.get(here, ())]
                rest[here] = min([*costs, finals.get(here, math.inf)])
                order.pop()
            else:
                seen.add(here)
                order += open_states
        return rest[state]

    heap: list[tuple[float, int, float, int, tuple[int, ...]]] = [(remaining(0), 0, 0.0, 0, ())]
    found: list[tuple[list[int], float]] = []
    number = 0
    while heap and len(found) < count:
        total, _, cost, state, labels = heapq.heappop(heap)
        if state < 0:
            found.append((list(labels), total))
            continue
        for target, label, step in outgoing.get(state, ()):
            number += 1
            heapq.heappush(heap, (cost + step + rest[target], number, cost + step, target, (*labels, label)))
        if state in finals:
            number += 1
            heapq.heappush(heap, (cost + finals[state], number, cost + finals[state], -1, labels))
    return found


def confidences(hypotheses: Sequence[Hypothesis], scale: float = 1.0) -> list[float]:
    """For each word of the first hypothesis how likely it is: the share of all whose alignment with it has that word.

    Hypotheses weigh exp(-scale cost).
    """
    if not hypotheses:
        return []
    costs = np.array([item.cost for item in hypotheses])
    weights = np.exp(-scale * (costs - costs.min()))
    weights /= weights.sum()
    best = hypotheses[0].words
    result = np.zeros(len(best))
    for item, weight in zip(hypotheses, weights, strict=True):
        place = 0
        for reference, heard in wer.align(best, item.words):
            if reference is not None:
                result[place] += weight * (reference == heard)
                place += 1
    return result.tolist()
