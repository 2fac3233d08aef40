"""Phonetic decision trees: which states of phones in context share a pdf (Young, Odell and Woodland, 1994).

A tree for each state of each phone asks whether the phone to the left or to the right is in a set. It grows where a
question raises the likelihood of single Gaussians most; the sets come from clustering the phones themselves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

VARIANCE_FLOOR = 0.01
Key = tuple[int, int]  # phone, state
# A node: (side -1 leaf, 0 left, 1 right; the set asked for; child if in it, or the pdf of a leaf; child if not)
Node = tuple[int, tuple[int, ...], int, int]
Statistics = dict[Key, dict[tuple[int, int], np.ndarray]]  # (left, right) -> (1 + 2 D,) count, sums, sums of squares


@dataclass
class ContextTree:
    """`nodes`: for each (phone, state) its nodes, the root first. `width` 1: no context, 3: a phone on each side."""

    nodes: Mapping[Key, Sequence[Node]]
    width: int = 3
    num_pdfs: int = field(init=False)

    def __post_init__(self) -> None:
        if self.width not in (1, 3):
            raise ValueError(f"a tree looks at 1 or 3 phones, not {self.width}")
        self.sets = {key: [frozenset(node[1]) for node in nodes] for key, nodes in self.nodes.items()}
        leaves = sorted({node[2] for nodes in self.nodes.values() for node in nodes if node[0] == -1})
        if leaves != list(range(len(leaves))):
            raise ValueError("the pdfs of a tree must be numbered from 0 without gaps")
        self.num_pdfs = len(leaves)

    def keys(self) -> list[Key]:
        return sorted(self.nodes)

    def pdf(self, left: int, phone: int, right: int, state: int) -> int:
        """The pdf of a state of `phone` between two others; 0 is the utterance's border."""
        key = (phone, state)
        nodes, sets = self.nodes[key], self.sets[key]
        place = 0
        while nodes[place][0] != -1:
            side, _, yes, no = nodes[place]
            place = yes if (right if side else left) in sets[place] else no
        return nodes[place][2]

    def leaves_of(self, phone: int, state: int) -> list[int]:
        return sorted({node[2] for node in self.nodes[phone, state] if node[0] == -1})

    def to_dict(self) -> dict:
        return {
            "width": self.width,
            "trees": [[*key, [[n[0], list(n[1]), n[2], n[3]] for n in self.nodes[key]]] for key in self.keys()],
        }

    @classmethod
    def from_dict(cls, values: Mapping) -> ContextTree:
        nodes = {
            (phone, state): [(n[0], tuple(n[1]), n[2], n[3]) for n in found] for phone, state, found in values["trees"]
        }
        return cls(nodes, values["width"])


# Statistics


def accumulate(
    statistics: Statistics,
    features: np.ndarray,
    segments: Sequence[tuple[int, int, int]],
    states: np.ndarray,
    alone: frozenset[int],
) -> None:
    """Add one utterance's frames: `segments` are (phone, first frame, frames), `states` (T,) of the phones.

    Phones in `alone` have no context of their own, but are context of others.
    """
    wide = features.astype(np.float64)
    for place, (phone, start, frames) in enumerate(segments):
        left = segments[place - 1][0] if place else 0
        right = segments[place + 1][0] if place + 1 < len(segments) else 0
        context = (0, 0) if phone in alone else (left, right)
        for state in np.unique(states[start : start + frames]):
            rows = wide[start : start + frames][states[start : start + frames] == state]
            value = np.concatenate([[len(rows)], rows.sum(0), (rows * rows).sum(0)])
            found = statistics.setdefault((phone, int(state)), {})
            found[context] = found[context] + value if context in found else value


def objective(stats: np.ndarray) -> np.ndarray:
    """Log likelihood of frames under their own Gaussian with a diagonal covariance: (..., 1 + 2 D) -> (...)."""
    dim = (stats.shape[-1] - 1) // 2
    count = np.maximum(stats[..., 0], 1e-10)
    mean = stats[..., 1 : 1 + dim] / count[..., None]
    variance = np.maximum(stats[..., 1 + dim :] / count[..., None] - mean**2, VARIANCE_FLOOR)
    second = stats[..., 1 + dim :] / count[..., None] - mean**2  # differs from variance where that was floored
    likelihood = np.log(variance) + second / variance
    return -0.5 * count * (dim * math.log(2 * math.pi) + likelihood.sum(-1))


def questions(statistics: Statistics, phones: Sequence[int]) -> list[tuple[int, ...]]:
    """Sets of phones that are worth asking for: all clusters on the way from single phones to one set.

    At each step the two clusters are joined whose union costs the least likelihood of the middle states' frames.
    """
    middle = {}
    for phone in phones:
        found = [sum(contexts.values()) for (p, state), contexts in statistics.items() if p == phone and state == 1]
        if found:
            middle[phone] = np.asarray(found[0])
    clusters = {(phone,): stats for phone, stats in middle.items()}
    result = [(phone,) for phone in phones]
    while len(clusters) > 2:
        names = list(clusters)
        stacked = np.stack([clusters[name] for name in names])
        alone = objective(stacked)
        cost = alone[:, None] + alone[None] - objective(stacked[:, None] + stacked[None])
        np.fill_diagonal(cost, np.inf)
        one, other = np.unravel_index(int(cost.argmin()), cost.shape)
        joined = tuple(sorted(names[one] + names[other]))
        clusters[joined] = clusters.pop(names[one]) + clusters.pop(names[other])
        result.append(joined)
    return sorted(set(result), key=lambda found: (len(found), found))


# Growing


@dataclass
class _Growing:
    """A leaf that may be split: its contexts, and the best question for it."""

    contexts: list[tuple[int, int]]
    stats: np.ndarray  # (K, 1 + 2 D)
    gain: float = 0.0
    side: int = -1
    question: tuple[int, ...] = ()
    inside: np.ndarray | None = None


def _best_question(
    contexts: list[tuple[int, int]],
    stats: np.ndarray,
    sets: Sequence[tuple[int, ...]],
    member: np.ndarray,
    least: float,
) -> _Growing:
    """`member` (Q, phones + 1) bool: the sets as rows."""
    leaf = _Growing(contexts, stats)
    total = stats.sum(0)
    before = objective(total)
    sides = np.array(contexts)
    for side in (0, 1):
        inside = member[:, sides[:, side]]  # (Q, K)
        yes = inside.astype(np.float64) @ stats
        no = total - yes
        gain = objective(yes) + objective(no) - before
        gain[(yes[:, 0] < least) | (no[:, 0] < least)] = -np.inf
        best = int(gain.argmax())
        if gain[best] > leaf.gain:
            leaf.gain, leaf.side, leaf.question, leaf.inside = float(gain[best]), side, sets[best], inside[best]
    return leaf


def grow(
    statistics: Statistics,
    phones: Sequence[int],
    alone: frozenset[int],
    *,
    num_leaves: int,
    num_states: int,
    least: float = 50.0,
    least_gain: float = 100.0,
) -> ContextTree:
    """Split the leaf that gains most until there are `num_leaves`, or no split gains `least_gain`.

    Both sides of a split have at least `least` frames. A state that was never seen gets a leaf of its own.
    """
    sets = [found for found in questions(statistics, [p for p in phones if p not in alone])]
    sets += [(0,), *((phone,) for phone in sorted(alone)), tuple(sorted(alone | {0}))]
    member = np.zeros((len(sets), max(phones) + 1), bool)
    for row, found in enumerate(sets):
        member[row, list(found)] = True
    nodes: dict[Key, list[Node]] = {}
    heap: list[tuple[float, int, Key, int, _Growing]] = []
    count = order = 0

    def offer(key: Key, place: int, contexts: list[tuple[int, int]], stats: np.ndarray) -> None:
        nonlocal order
        leaf = _best_question(contexts, stats, sets, member, least)
        order += 1
        if leaf.gain >= least_gain:
            heapq.heappush(heap, (-leaf.gain, order, key, place, leaf))

    for key in [(phone, state) for phone in phones for state in range(num_states)]:
        nodes[key] = [(-1, (), -1, -1)]
        count += 1
        found = statistics.get(key)
        if found and key[0] not in alone:
            offer(key, 0, list(found), np.stack(list(found.values())))
    while heap and count < num_leaves:
        _, _, key, place, leaf = heapq.heappop(heap)
        yes, no = len(nodes[key]), len(nodes[key]) + 1
        nodes[key][place] = (leaf.side, leaf.question, yes, no)
        nodes[key] += [(-1, (), -1, -1), (-1, (), -1, -1)]
        count += 1
        for child, mask in ((yes, leaf.inside), (no, ~leaf.inside)):
            chosen = np.flatnonzero(mask)
            offer(key, child, [leaf.contexts[i] for i in chosen], leaf.stats[chosen])
    return ContextTree(_numbered(nodes), 3)


def _numbered(nodes: dict[Key, list[Node]]) -> dict[Key, list[Node]]:
    """Number the leaves from 0, phone by phone."""
    number = 0
    for key in sorted(nodes):
        for place, node in enumerate(nodes[key]):
            if node[0] == -1:
                nodes[key][place] = (-1, (), number, -1)
                number += 1
    return nodes
