"""Fibers: how many channels a feature has of each degree.

A feature of degree d has 2 d + 1 components per channel and turns with the real Wigner matrix D_d: degree 0 are
scalars, degree 1 vectors (x, y, z). Features are dictionaries from the degree's name ('0', '1', ...) to tensors of
shape (rows, channels, 2 d + 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


def degree_to_dim(degree: int) -> int:
    """Components of a feature of this degree."""
    return 2 * degree + 1


class FiberEl(NamedTuple):
    """One degree of a fiber."""

    degree: int
    channels: int


class Fiber:
    """Degrees with their channel counts, sorted by degree. ``fiber[d]`` is 0 where a degree is absent.

    Takes a mapping {degree: channels} or pairs (degree, channels). Iterating gives ``FiberEl``s. ValueError for a
    negative degree, a channel count below 0 or a degree given twice. Degrees with no channels are left out.
    """

    def __init__(self, structure: Mapping[int, int] | Iterable[tuple[int, int]]):
        pairs = structure.structure if isinstance(structure, Fiber) else structure
        pairs = list(pairs.items()) if isinstance(pairs, Mapping) else [tuple(pair) for pair in pairs]
        counts: dict[int, int] = {}
        for degree, channels in pairs:
            degree, channels = int(degree), int(channels)
            if degree < 0 or channels < 0:
                raise ValueError(f"a fiber needs degrees and channels of at least 0, got degree {degree}: {channels}")
            if degree in counts:
                raise ValueError(f"degree {degree} is given twice: {counts[degree]} and {channels} channels")
            counts[degree] = channels
        self.structure = tuple(FiberEl(d, c) for d, c in sorted(counts.items()) if c > 0)
        self.structure_dict = dict(self.structure)

    @staticmethod
    def create(num_degrees: int, num_channels: int) -> Fiber:
        """Degrees 0 to ``num_degrees - 1`` with ``num_channels`` each."""
        return Fiber([(degree, num_channels) for degree in range(num_degrees)])

    @staticmethod
    def from_features(features: Mapping[str, Tensor]) -> Fiber:
        """The fiber of a dictionary of features; checks that each has 2 d + 1 components."""
        for degree, value in features.items():
            if value.shape[-1] != degree_to_dim(int(degree)):
                raise ValueError(f"features of degree {degree} need {degree_to_dim(int(degree))} components, "
                                 f"got shape {tuple(value.shape)}")  # fmt: skip
        return Fiber({int(degree): value.shape[-2] for degree, value in features.items()})

    @property
    def degrees(self) -> list[int]:
        return [degree for degree, _ in self.structure]

    @property
    def channels(self) -> list[int]:
        return [channels for _, channels in self.structure]

    @property
    def num_features(self) -> int:
        """Numbers in one row of such a feature."""
        return sum(channels * degree_to_dim(degree) for degree, channels in self.structure)

    @property
    def max_degree(self) -> int:
        """The highest degree; -1 of an empty fiber."""
        return self.degrees[-1] if self.structure else -1

    def __getitem__(self, degree: int | str) -> int:
        return self.structure_dict.get(int(degree), 0)

    def __contains__(self, degree: object) -> bool:
        return degree in self.structure_dict

    def __iter__(self) -> Iterator[FiberEl]:
        return iter(self.structure)

    def __len__(self) -> int:
        return len(self.structure)

    def items(self):
        """(degree, channels) pairs."""
        return self.structure_dict.items()

    def keys(self):
        """The degrees."""
        return self.structure_dict.keys()

    def values(self):
        """The channel counts."""
        return self.structure_dict.values()

    def get(self, degree, default=0):
        return self.structure_dict.get(degree, default)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fiber) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)

    def __add__(self, other: Fiber) -> Fiber:
        """Channels of a concatenation: every degree of either side."""
        return Fiber({degree: self[degree] + other[degree] for degree in {*self.degrees, *other.degrees}})

    def combine_max(self, other: Fiber) -> Fiber:
        """Every degree of either side with the larger channel count."""
        return Fiber({degree: max(self[degree], other[degree]) for degree in {*self.degrees, *other.degrees}})

    def select(self, degrees: Iterable[int]) -> Fiber:
        """The same channel counts for those of ``degrees`` that are here."""
        return Fiber({degree: self[degree] for degree in set(degrees) if degree in self})

    def to_attention_heads(self, features: Mapping[str, Tensor], num_heads: int) -> Tensor:
        """(rows, heads, numbers per head): each head gets consecutive channels of every degree."""
        parts = [features[str(d)].unflatten(-2, (num_heads, c // num_heads)).flatten(-2) for d, c in self.structure]
        return torch.cat(parts, -1)

    def __repr__(self) -> str:
        return f"Fiber({ {degree: channels for degree, channels in self.structure} })"
