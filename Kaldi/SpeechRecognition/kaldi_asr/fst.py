"""Weighted transducers as numpy arrays, and to and from kaldifst, whose Python interface goes arc by arc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import kaldifst
import numpy as np


@dataclass
class Arcs:
    """Arcs of a transducer in the tropical semiring; state 0 is the start. `finals`: (states, costs)."""

    source: np.ndarray
    target: np.ndarray
    ilabel: np.ndarray
    olabel: np.ndarray
    cost: np.ndarray
    final_states: np.ndarray
    final_costs: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    @property
    def num_states(self) -> int:
        groups = [self.source, self.target, self.final_states]
        return 1 + max((int(group.max()) for group in groups if len(group)), default=-1)

    def to_fst(self) -> kaldifst.StdVectorFst:
        return compile_fst(
            zip(*(x.tolist() for x in (self.source, self.target, self.ilabel, self.olabel, self.cost)), strict=True),
            zip(self.final_states.tolist(), self.final_costs.tolist(), strict=True),
        )

    @classmethod
    def of(cls, fst: kaldifst.StdVectorFst) -> Arcs:
        """The start state becomes 0 by changing places with state 0."""
        rows: list[list[str]] = [line.split() for line in fst.to_str().splitlines() if line]
        arcs = [row for row in rows if len(row) >= 4]
        ends = [row for row in rows if len(row) < 4]
        numbers = np.array([row[:4] for row in arcs], np.int64).reshape(-1, 4)
        cost = np.array([float(row[4]) if len(row) > 4 else 0.0 for row in arcs])
        final_states = np.array([int(row[0]) for row in ends], np.int64)
        final_costs = np.array([float(row[1]) if len(row) > 1 else 0.0 for row in ends])
        start = fst.start
        start = start() if callable(start) else start
        source, target, ilabel, olabel = numbers.T

        def moved(states: np.ndarray) -> np.ndarray:
            return np.where(states == start, 0, np.where(states == 0, start, states))

        return cls(moved(source), moved(target), ilabel, olabel, cost, moved(final_states), final_costs)


def compile_fst(arcs: Sequence | zip, finals: Sequence | zip) -> kaldifst.StdVectorFst:
    """From (source, target, ilabel, olabel, cost) and (state, cost); the first arc's source must be 0, the start."""
    lines = [f"{s} {t} {i} {o} {c:.7g}" for s, t, i, o, c in arcs]
    start = next((number for number, line in enumerate(lines) if line.startswith("0 ")), None)
    if start:  # the first line decides which state is the start
        lines.insert(0, lines.pop(start))
    lines += [f"{s} {c:.7g}" for s, c in finals]
    return kaldifst.compile("\n".join(lines) + "\n", keep_state_numbering=True)
