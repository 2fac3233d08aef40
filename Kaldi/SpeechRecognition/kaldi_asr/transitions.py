"""Hidden Markov models of phones, and Kaldi's numbering of their transitions.

Every phone has NUM_STATES emitting states from left to right; each stays (self-loop) or goes on (forward). A transition
state is a triple (phone, state of the phone, pdf); transition ids count from 1, two for each triple: 2 i + 1 stays and
2 i + 2 goes on. That is the numbering of Kaldi's transition model for this topology, so graphs agree with it.

An alignment gives each frame the transition that follows it: d frames in a state are d - 1 self-loops and one forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .tree import ContextTree

NUM_STATES = 3
START = 0.75  # probability of staying before anything is known
FLOOR = 0.01  # of a probability that is estimated
LEAST = 5.0  # times a state must have been left or kept to be estimated


@dataclass
class TransitionModel:
    """`triples` (N, 3) int32 in rising order; `stay` (N,) float64 probabilities of the self-loops."""

    triples: np.ndarray
    stay: np.ndarray

    def __post_init__(self) -> None:
        self.triples = np.asarray(self.triples, np.int32).reshape(-1, 3)
        self.stay = np.asarray(self.stay, np.float64)
        rows = [tuple(row) for row in self.triples.tolist()]
        if rows != sorted(set(rows)):
            raise ValueError("the triples of a transition model must be different and sorted")
        if len(self.stay) != len(rows) or not ((self.stay > 0) & (self.stay < 1)).all():
            raise ValueError(f"{len(self.stay)} probabilities for {len(rows)} states, each between 0 and 1")
        self.index = {row: number for number, row in enumerate(rows)}

    @classmethod
    def of(cls, tree: ContextTree) -> TransitionModel:
        """All triples that a tree can give, with the topology's probabilities."""
        triples = sorted((phone, state, pdf) for phone, state in tree.keys() for pdf in tree.leaves_of(phone, state))
        return cls(np.array(triples, np.int32), np.full(len(triples), START))

    @property
    def num_ids(self) -> int:
        """The highest transition id."""
        return 2 * len(self.triples)

    @property
    def num_pdfs(self) -> int:
        return int(self.triples[:, 2].max()) + 1

    def pdfs_of_ids(self) -> np.ndarray:
        """(num_ids + 1,) int32: the pdf of each transition id; -1 for 0."""
        return np.concatenate([[-1], np.repeat(self.triples[:, 2], 2)]).astype(np.int32)

    def phones_of_ids(self) -> np.ndarray:
        """(num_ids + 1,) int32: the phone of each transition id; 0 for 0."""
        return np.concatenate([[0], np.repeat(self.triples[:, 0], 2)]).astype(np.int32)

    def log_probabilities(self) -> np.ndarray:
        """(num_ids + 1,) float64: log probability of each transition id; 0 for 0."""
        pairs = np.stack([np.log(self.stay), np.log1p(-self.stay)], 1)
        return np.concatenate([[0.0], pairs.reshape(-1)])

    def update(self, alignments: Iterable[np.ndarray]) -> None:
        """Maximum likelihood from alignments; states with too few frames keep what they had."""
        counts = np.zeros(self.num_ids + 1)
        for alignment in alignments:
            counts += np.bincount(alignment, minlength=len(counts))
        stay, leave = counts[1::2], counts[2::2]
        total = stay + leave
        enough = total >= LEAST
        estimate = np.clip(stay / np.maximum(total, 1), FLOOR, 1 - FLOOR)
        self.stay = np.where(enough, estimate, self.stay)


def monophone_tree(phones: Sequence[int], num_states: int = NUM_STATES) -> ContextTree:
    """A tree that asks nothing: a pdf for each state of each phone."""
    keys = [(phone, state) for phone in phones for state in range(num_states)]
    return ContextTree({key: [(-1, (), number, -1)] for number, key in enumerate(keys)}, 1)


def phone_segments(alignment: np.ndarray, model: TransitionModel) -> list[tuple[int, int, int]]:
    """(phone, first frame, frames) of each phone in an alignment."""
    phone, state = model.triples[(alignment - 1) // 2, 0], model.triples[(alignment - 1) // 2, 1]
    leaves = (alignment % 2 == 0) & (state == state_count(model, phone) - 1)
    ends = np.flatnonzero(leaves) + 1
    if not len(ends) or ends[-1] != len(alignment):
        ends = np.append(ends, len(alignment))
    starts = np.concatenate([[0], ends[:-1]])
    return [(int(phone[a]), int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)]


def state_count(model: TransitionModel, phone: np.ndarray) -> np.ndarray:
    """How many states each of the phones has."""
    counts = np.zeros(model.triples[:, 0].max() + 1, np.int64)
    np.maximum.at(counts, model.triples[:, 0], model.triples[:, 1] + 1)
    return counts[phone]
