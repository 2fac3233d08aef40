"""Run verbs on a few made-up molecules, for tests that need processes of their own.

python small_run.py '[["train", ["--epochs", "1", ...]], ["evaluate", [...]]]'
"""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import torch

from dlx import dist
from se3_transformer import chemistry, options, qm9
from se3_transformer.molecules import Molecules, flatten

COUNT = 61  # neither two processes nor any batch size divide its splits


def make_molecules(count: int = COUNT) -> Molecules:
    """Chains whose every target is, in a deviation of 1, the number of carbons plus the length between the ends."""
    generator = np.random.default_rng(0)
    pieces = []
    for index in range(count):
        atoms = int(generator.integers(4, 9))
        numbers = generator.choice(np.array([1, 6, 8], np.uint8), atoms)
        positions = np.cumsum(generator.normal(size=(atoms, 3)) * 0.4 + 0.7, 0)
        bonds = np.stack([np.arange(atoms - 1), np.arange(1, atoms), generator.integers(0, 2, atoms - 1)], 1)
        molecule = chemistry.Molecule(str(index), numbers, positions, bonds.astype(np.int64))
        value = (numbers == 6).sum() + 0.2 * np.linalg.norm(positions[-1] - positions[0])
        pieces.append(qm9.molecule_arrays(molecule, np.full(len(qm9.TARGETS), value), index))
    return Molecules(flatten(pieces))


def patch() -> None:
    """Take these molecules for QM9."""
    qm9.load = lambda *args, **kwargs: make_molecules()
    options.MoleculeOptions.identity = lambda self: {}


def main(jobs: list[tuple[str, list[str]]]) -> None:
    torch.set_num_threads(1)
    patch()
    close = dist.World.close
    with dist.init("cpu") as world:
        # A process group is made once: a second one would find the addresses of the first.
        dist.init, dist.World.close = lambda *args, **kwargs: world, lambda self: None
        for verb, arguments in jobs:
            importlib.import_module(f"se3_transformer.{verb}").main(arguments)
        dist.World.close = close


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
