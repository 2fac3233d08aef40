"""Molecules as flat arrays, and batches gathered from them on the host or on the device.

A set holds all atoms of all molecules in one array, all bonds in another, and where each molecule's begin. A batch is
made by array gathers, without a loop over molecules; with the set on a GPU no byte of it crosses the bus.

M molecules, A atoms, B directed bonds (sorted by destination within a molecule), T targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dlx import draws

from .chemistry import SHORTEST
from .graph import Graph

NODE_DIM = 6  # one of H, C, N, O, F, and the nuclear charge
EDGE_DIM = 4  # single, double, triple, aromatic; all zero for a pair without a bond
CHARGES = (1, 6, 7, 8, 9)
GRAPHS = ("bonds", "full", "radius")
TRAIN, TEST_SHARE = 100_000, 10  # of 130,831; the test split is a tenth of all
_PER_MOLECULE = ("atoms", "edges", "index", "targets", "perceived")


def flatten(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Pieces of one or more molecules, one after the other."""
    return {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}


@dataclass
class Batch:
    """A graph of several molecules with features for the model and targets (molecules, T), None without."""

    graph: Graph
    node_feats: dict[str, Tensor]
    edge_feats: dict[str, Tensor]
    targets: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""

        def move(features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {key: value.to(device, non_blocking=non_blocking) for key, value in features.items()}

        targets = None if self.targets is None else self.targets.to(device, non_blocking=non_blocking)
        return Batch(self.graph.to(device, non_blocking), move(self.node_feats), move(self.edge_feats), targets)


class Molecules:
    """A set of molecules. ``arrays``: atoms (M,), edges (M,) counts; index (M,); numbers (A,), positions (A, 3);
    src, dst, bond (B,) with atoms counted within the molecule; targets (M, T); perceived (M,)."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = dict(arrays)
        for kind, members in (("atoms", ("numbers", "positions")), ("edges", ("src", "dst", "bond"))):
            total = int(self.arrays[kind].sum())
            for member in members:
                if len(self.arrays[member]) != total:
                    raise ValueError(f"{member} has {len(self.arrays[member])} rows, the molecules have {total} {kind}")

    def __len__(self) -> int:
        return len(self.arrays["atoms"])

    @classmethod
    def open(cls, folder: Path) -> Molecules:
        """The arrays of a folder, mapped into memory."""
        return cls(
            {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
        )

    def save(self, folder: Path) -> None:
        """Write every array to a file of its own in a new folder."""
        folder.mkdir()
        for name, array in self.arrays.items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    def take(self, indices: np.ndarray) -> Molecules:
        """Some of the molecules, in this order."""
        arrays = {name: np.asarray(self.arrays[name])[indices] for name in _PER_MOLECULE}
        for kind, members in (("atoms", ("numbers", "positions")), ("edges", ("src", "dst", "bond"))):
            rows = ranges(starts(self.arrays[kind])[indices], arrays[kind])
            arrays |= {name: np.asarray(self.arrays[name])[rows] for name in members}
        return Molecules(arrays)

    def composition(self) -> np.ndarray:
        """(M, 5) int64: atoms of each element."""
        owner = np.repeat(np.arange(len(self)), self.arrays["atoms"])
        place = np.searchsorted(CHARGES, self.arrays["numbers"])
        return np.bincount(owner * 5 + place, minlength=5 * len(self)).reshape(-1, 5)


def starts(counts: np.ndarray) -> np.ndarray:
    """Where each of the consecutive groups begins."""
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if len(counts) else np.zeros(0, np.int64)


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... counts[0] numbers, then those from first[1], ..."""
    return np.repeat(first - starts(counts), counts) + np.arange(int(counts.sum()))


# Splits and target statistics


def split(count: int, seed: int = 0, train: int | None = None) -> dict[str, np.ndarray]:
    """Disjoint indices of train, val and test: of QM9 100,000 / 17,748 / 13,083, drawn by ``seed``.

    Another ``count`` is split in the same shares unless ``train`` says how many to train on.
    """
    train = round(count * TRAIN / 130_831) if train is None else train
    test = count // TEST_SHARE
    if train < 1 or train + test > count:
        raise ValueError(f"{train} training and {test} test molecules do not fit into {count}")
    order = draws.permutation(seed, 0, count, stream=_SPLIT)
    return {"train": order[:train], "test": order[train : train + test], "val": order[train + test :]}


_SPLIT = 11  # the stream of random numbers


@dataclass(frozen=True)
class TargetScale:
    """How a target is brought to mean 0 and deviation 1: ``(value - composition @ references - mean) / std``.

    ``references``: one number per element (H, C, N, O, F), zeros for targets that do not grow with the atoms.
    """

    name: str
    unit: str
    mean: float
    std: float
    references: tuple[float, ...] = (0.0,) * 5

    def normalize(self, values: np.ndarray, composition: np.ndarray) -> np.ndarray:
        return (values - composition @ np.array(self.references) - self.mean) / self.std

    def restore(self, outputs: np.ndarray, composition: np.ndarray) -> np.ndarray:
        """From the model's outputs to the target's unit."""
        return np.asarray(outputs, np.float64) * self.std + self.mean + composition @ np.array(self.references)

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping) -> TargetScale:
        return cls(**{**content, "references": tuple(content["references"])})


EXTENSIVE = ("U0", "U", "H", "G", "Cv")  # grow with the atoms: least-squares atom references are customary


def fit_scale(
    name: str, unit: str, values: np.ndarray, composition: np.ndarray, references: bool | None = None
) -> TargetScale:
    """Mean, deviation and least-squares atom references over the training split only.

    ``references`` None: for the energies and the heat capacity, which grow with the number of atoms.
    """
    if len(values) != len(composition) or not len(values):
        raise ValueError(f"{name}: {len(values)} values for {len(composition)} molecules")
    if references is None:
        references = name in EXTENSIVE
    fitted = np.zeros(5)
    if references:
        fitted = np.linalg.lstsq(composition.astype(np.float64), values, rcond=None)[0]
    rest = values - composition @ fitted
    std = float(rest.std())
    if not std > 0:
        raise ValueError(f"target {name}: all {len(values)} values are alike ({rest[0]:g} {unit})")
    return TargetScale(name, unit, float(rest.mean()), std, tuple(float(value) for value in fitted))


# Batches


class Collator:
    """Gathers batches from a set that lies on ``device`` as tensors.

    ``graph``: 'bonds' (both directions of every bond), 'full' (all ordered pairs) or 'radius' (pairs not further apart
    than ``radius`` angstrom; on a GPU this one waits, since the number of edges depends on the data). The molecules'
    sizes stay on the host too, so the other two never wait for the device. ``targets`` (M, T) in the model's scale.
    """

    def __init__(
        self,
        molecules: Molecules,
        graph: Literal["bonds", "full", "radius"] = "bonds",
        targets: np.ndarray | None = None,
        device: torch.device | str = "cpu",
        radius: float = 5.0,
    ):
        if graph not in GRAPHS:
            raise ValueError(f"graph must be one of {', '.join(GRAPHS)}, got {graph!r}")
        if targets is not None and len(targets) != len(molecules):
            raise ValueError(f"{len(targets)} rows of targets for {len(molecules)} molecules")
        if not radius > 0:
            raise ValueError(f"radius must be above 0, got {radius}")
        self.graph, self.radius, self.device = graph, radius, torch.device(device)
        self.atoms = np.asarray(molecules.arrays["atoms"], np.int64)
        self.bonds = np.asarray(molecules.arrays["edges"], np.int64)

        def put(array, dtype):
            return torch.from_numpy(np.array(array)).to(self.device, dtype)

        self._atoms, self._bonds = put(self.atoms, torch.int64), put(self.bonds, torch.int64)
        self._first_atom, self._first_bond = put(starts(self.atoms), torch.int64), put(starts(self.bonds), torch.int64)
        self._numbers = put(molecules.arrays["numbers"], torch.int64)
        self._positions = put(molecules.arrays["positions"], torch.float32)
        self._features = torch.cat([self._numbers[:, None] == torch.tensor(CHARGES, device=self.device),
                                    self._numbers[:, None]], 1).float()  # fmt: skip
        self._src, self._dst = (put(molecules.arrays[name], torch.int64) for name in ("src", "dst"))
        self._bond = put(molecules.arrays["bond"], torch.int64)
        self._targets = None if targets is None else put(targets, torch.float32)
        self._one_hot = torch.eye(EDGE_DIM + 1, device=self.device)[:, :EDGE_DIM].contiguous()  # type 4: no bond
        if graph != "bonds":
            self._first_pair, self._pair_types = self._make_pair_types()
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Batches promise that no edge has length zero (``Graph.degenerate``), so look once."""
        size = 20_000 if self.graph == "bonds" else 2_000
        for start in range(0, len(self.atoms), size):
            indices = np.arange(start, min(start + size, len(self.atoms)))
            chosen = torch.from_numpy(indices).to(self.device)
            edges = self._bond_edges if self.graph == "bonds" else self._pair_edges
            src, dst, _ = edges(chosen, indices, self._first_atom[chosen])
            length = (self._positions[dst] - self._positions[src]).norm(dim=1)
            if len(length) and float(length.min()) < SHORTEST:
                atom = int(dst[int(length.argmin())])
                molecule = int(torch.searchsorted(self._first_atom, atom, right=True)) - 1
                raise ValueError(
                    f"molecule {molecule}: atom {atom - int(self._first_atom[molecule])} and another are "
                    f"{float(length.min()):g} angstrom apart"
                )

    def _make_pair_types(self) -> tuple[Tensor, Tensor]:
        """Bond type of every ordered pair (dst, src) of a molecule's atoms, 4 without a bond, as uint8."""
        sizes = self.atoms**2
        first = torch.from_numpy(starts(sizes)).to(self.device)
        types = torch.full((int(sizes.sum()),), EDGE_DIM, dtype=torch.uint8, device=self.device)
        owner = torch.repeat_interleave(torch.arange(len(self.atoms), device=self.device), self._bonds)
        types[first[owner] + self._dst * self._atoms[owner] + self._src] = self._bond.to(torch.uint8)
        return first, types

    def __call__(self, indices: np.ndarray) -> Batch:
        """The batch of these molecules, in this order."""
        indices = np.asarray(indices, np.int64)
        if not len(indices) or indices.min() < 0 or indices.max() >= len(self.atoms):
            raise ValueError(f"a batch needs molecules 0 to {len(self.atoms) - 1}, got {indices[:5].tolist()} ...")
        chosen = torch.from_numpy(indices)
        if self.device.type == "cuda":
            chosen = chosen.pin_memory()
        chosen = chosen.to(self.device, non_blocking=True)
        total = int(self.atoms[indices].sum())
        counts = self._atoms[chosen]
        first = counts.cumsum(0) - counts  # of each molecule in the batch
        graphs = torch.arange(len(indices), device=self.device)
        batch = torch.repeat_interleave(graphs, counts, output_size=total)
        node = torch.arange(total, device=self.device) + (self._first_atom[chosen] - first)[batch]
        positions = self._positions[node]
        edges = self._bond_edges if self.graph == "bonds" else self._pair_edges
        src, dst, kind = edges(chosen, indices, first)
        relative = positions[dst] - positions[src]
        if self.graph == "radius":
            near = relative.square().sum(1) <= self.radius**2
            src, dst, kind, relative = src[near], dst[near], kind[near], relative[near]
        graph = Graph(torch.stack([src, dst]), total, batch, len(indices), relative, degenerate=None)
        targets = None if self._targets is None else self._targets[chosen]
        return Batch(graph, {"0": self._features[node][..., None]}, {"0": self._one_hot[kind][..., None]}, targets)

    def _bond_edges(self, chosen: Tensor, indices: np.ndarray, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, counts = int(self.bonds[indices].sum()), self._bonds[chosen]
        owner = torch.repeat_interleave(torch.arange(len(indices), device=self.device), counts, output_size=total)
        before = counts.cumsum(0) - counts
        edge = torch.arange(total, device=self.device) + (self._first_bond[chosen] - before)[owner]
        return self._src[edge] + first[owner], self._dst[edge] + first[owner], self._bond[edge]

    def _pair_edges(self, chosen: Tensor, indices: np.ndarray, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes, atoms = self.atoms[indices] * (self.atoms[indices] - 1), self._atoms[chosen]
        total, counts = int(sizes.sum()), atoms * (atoms - 1)
        owner = torch.repeat_interleave(torch.arange(len(indices), device=self.device), counts, output_size=total)
        within = torch.arange(total, device=self.device) - (counts.cumsum(0) - counts)[owner]
        others = (atoms - 1)[owner]
        dst = within // others
        src = within - dst * others
        src = src + (src >= dst)
        kind = self._pair_types[self._first_pair[chosen][owner] + dst * atoms[owner] + src].long()
        return src + first[owner], dst + first[owner], kind
