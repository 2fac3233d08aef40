"""Search for the best words: kaldi_decoder's token passing over a graph whose input labels are pdf + 1.

    decoder = Decoder(graph, lexicon)
    decoder.decode(log_likelihoods)                  # Hypothesis(words, cost, ...)
    stream = decoder.stream(); stream.accept(chunk); stream.partial(); stream.finish()
"""

from __future__ import annotations

from dataclasses import dataclass, field

import kaldi_decoder
import kaldifst
import numpy as np

from .lexicon import EPSILON, Lexicon


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
        self.graph, self.options = graph, options
        self.names = [EPSILON, *lexicon.words]

    def decode(self, scores: np.ndarray) -> Hypothesis:
        """(T, P) log likelihoods -> the best words."""
        stream = self.stream()
        stream.accept(scores)
        return stream.finish()

    def stream(self) -> Stream:
        """A search that goes on as frames arrive."""
        return Stream(self)

    def lattice(self, scores: np.ndarray) -> kaldifst.Lattice | None:
        """The raw lattice within lattice_beam of the best path; None where the search fails."""
        config = kaldi_decoder.LatticeSimpleDecoderConfig(
            beam=self.options.beam, lattice_beam=self.options.lattice_beam, determinize_lattice=False
        )
        search = kaldi_decoder.LatticeSimpleDecoder(self.graph, config)
        search.decode(self._decodable(scores))
        found, lattice = search.get_raw_lattice()
        return lattice if found else None

    def nbest(self, scores: np.ndarray, count: int) -> list[Hypothesis]:
        """Up to `count` different word sequences, the best first."""
        lattice = self.lattice(scores)
        if lattice is None:
            return []
        found: dict[tuple[str, ...], Hypothesis] = {}
        # Paths differ in alignments, too, so more are asked for than are wanted.
        for path in kaldifst.lattice_to_nbest(lattice, acoustic_scale=1.0, lm_scale=1.0, n=count * 20):
            hypothesis = self.hypothesis(path, True)
            found.setdefault(tuple(hypothesis.words), hypothesis)
        return sorted(found.values(), key=lambda item: item.cost)[:count]

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
        options = kaldi_decoder.FasterDecoderOptions(
            beam=decoder.options.beam, max_active=decoder.options.max_active
        )
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
