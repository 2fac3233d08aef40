"""Everything that a batch's relative positions determine, computed once and shared by all layers."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from . import frames
from .basis import TINY, Basis, lengths, pair_basis, spherical_harmonics


class Geometry:
    """Distances, bases and edge frames of the edges' relative positions (E, 3).

    ``basis``: precomputed pair bases, used as they are. ``degenerate``: the indices of edges without a direction, None
    where it is known that there are none, or True: look (which waits for a GPU once).
    """

    def __init__(
        self,
        relative_pos: Tensor,
        max_degree: int,
        basis: Basis | None = None,
        degenerate: Tensor | bool | None = True,
    ):
        if relative_pos.dim() != 2 or relative_pos.shape[1] != 3:
            raise ValueError(f"relative positions must have shape (edges, 3), got {tuple(relative_pos.shape)}")
        self.relative_pos, self.max_degree = relative_pos, max_degree
        self._pairs = basis
        self._cache: dict[str, Tensor] = {}
        self._harmonics: list[Tensor] | None = None
        self._rotations: Tensor | None = None
        self._degenerate = degenerate

    @property
    def has_own_basis(self) -> bool:
        """Whether the bases came from the caller."""
        return self._pairs is not None

    @property
    def distances(self) -> Tensor:
        """(E, 1, 1), the invariant that every radial profile sees."""
        return lengths(self.relative_pos)[..., None]

    @property
    def degenerate(self) -> Tensor | None:
        """Indices of edges without a direction, or None."""
        if self._degenerate is True:
            found = (self.relative_pos.square().sum(-1) <= TINY**2).nonzero().squeeze(-1)
            self._degenerate = found if len(found) else None
        return None if self._degenerate is False else self._degenerate

    def _exactly(self) -> contextlib.AbstractContextManager:
        """Angles are computed in the positions' own type, also under autocast."""
        return torch.autocast(self.relative_pos.device.type, enabled=False)

    def pair(self, degree_in: int, degree_out: int) -> Tensor:
        """(E, 2 in + 1, F, 2 out + 1)."""
        key = f"{degree_in},{degree_out}"
        if self._pairs is not None:
            if key not in self._pairs:
                raise ValueError(f"the given basis lacks {key!r}; it has {', '.join(self._pairs)}")
            return self._pairs[key][..., : 2 * degree_out + 1]  # the reference package may have padded it
        if key not in self._cache:
            with self._exactly():
                if self._harmonics is None:
                    self._harmonics = spherical_harmonics(2 * self.max_degree, self.relative_pos)
                self._cache[key] = pair_basis(degree_in, degree_out, self._harmonics)
        return self._cache[key]

    @property
    def rotations(self) -> Tensor:
        """(E, sum of (2 l + 1)^2): the matrices D_0 ... D_max of every edge, row-major, one after the other."""
        if self._rotations is None:
            with self._exactly():
                matrices = frames.wigner_matrices(frames.rotation_to_axis(self.relative_pos), self.max_degree)
            self._rotations = torch.cat([matrix.flatten(1) for matrix in matrices], 1).contiguous()
        return self._rotations

    def prepare(self, in_frames: bool) -> None:
        """Compute what layers will ask for."""
        _ = self.degenerate
        if in_frames:
            _ = self.rotations
        elif self._pairs is None:
            _ = [self.pair(i, o) for i in range(self.max_degree + 1) for o in range(self.max_degree + 1)]

    def part(self, edges: Tensor) -> Geometry:
        """The geometry of some of the edges."""
        basis = None if self._pairs is None else {key: value[edges] for key, value in self._pairs.items()}
        return Geometry(self.relative_pos[edges], self.max_degree, basis)
