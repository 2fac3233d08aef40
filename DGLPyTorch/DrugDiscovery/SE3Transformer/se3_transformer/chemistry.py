"""Molecules from SMILES, SDF, XYZ or QM9's tables: elements, positions and bonds, by RDKit.

Bond types are 0 single, 1 double, 2 triple, 3 aromatic. Positions are in angstrom, centred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}  # what QM9, and so every model trained on it, knows
SYMBOLS = {number: symbol for symbol, number in ELEMENTS.items()}
_RADII = {1: 0.31, 6: 0.76, 7: 0.71, 8: 0.66, 9: 0.57}  # covalent radii (Cordero et al. 2008), angstrom
_LONGEST = 1.3  # times the sum of the radii
SHORTEST = 1e-3  # angstrom: closer atoms are in one place
FARTHEST = 1e3  # angstrom from the middle: no molecule is so large
_FEWEST = {1: 1, 6: 2, 7: 1, 8: 1, 9: 1}  # neighbours that an atom of a whole molecule has
EMBEDDINGS = 8  # tries for a conformer, each with a seed of its own


@dataclass
class Molecule:
    """``numbers`` (n,) uint8 nuclear charges, ``positions`` (n, 3) float64, ``bonds`` (b, 3) int64: atom, atom, type.

    Positions are moved so that their mean is the origin.
    """

    name: str
    numbers: np.ndarray
    positions: np.ndarray
    bonds: np.ndarray

    def __post_init__(self) -> None:
        self.positions = self.positions - self.positions.mean(0) if len(self.positions) else self.positions


def _rdkit():
    try:
        from rdkit import Chem, RDLogger
    except ImportError as error:
        raise ValueError(f"reading molecules needs the package rdkit: {error}") from None
    RDLogger.DisableLog("rdApp.*")
    return Chem


def _bond_rows(molecule) -> np.ndarray:
    """Rows atom, atom, type; a dative bond counts as single. ValueError for a bond of no such type."""
    kind = _rdkit().BondType
    types = {kind.SINGLE: 0, kind.DOUBLE: 1, kind.TRIPLE: 2, kind.AROMATIC: 3, kind.DATIVE: 0}
    rows = []
    for bond in molecule.GetBonds():
        ends = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        if bond.GetBondType() not in types:
            raise ValueError(
                f"the bond of atoms {ends[0]} and {ends[1]} is {bond.GetBondType()}, which QM9 has none of"
            )
        rows.append((*ends, types[bond.GetBondType()]))
    return np.array(rows, np.int64).reshape(-1, 3)


def bonds_from_smiles(smiles: str, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """Bonds (b, 3) of a geometry whose heavy atoms are in the order of the SMILES; hydrogens go to the nearest one.

    None where SMILES and geometry disagree: other elements, another count of hydrogens, a bond that is too long.
    """
    molecule = _rdkit().MolFromSmiles(smiles)
    heavy, light = np.flatnonzero(numbers != 1), np.flatnonzero(numbers == 1)
    if molecule is None or [atom.GetAtomicNum() for atom in molecule.GetAtoms()] != numbers[heavy].tolist():
        return None
    rows = _bond_rows(molecule)
    rows[:, :2] = heavy[rows[:, :2]]
    if len(light):
        gaps = np.linalg.norm(positions[light][:, None] - positions[heavy][None], axis=-1)
        nearest = gaps.argmin(1)
        wanted = [atom.GetTotalNumHs() for atom in molecule.GetAtoms()]
        if np.bincount(nearest, minlength=len(heavy)).tolist() != wanted:
            return None
        rows = np.concatenate([rows, np.stack([heavy[nearest], light, np.zeros(len(light), np.int64)], 1)])
    radii = np.array([_RADII.get(int(number), 0.8) for number in numbers])
    length = np.linalg.norm(positions[rows[:, 0]] - positions[rows[:, 1]], axis=-1)
    return None if (length > _LONGEST * (radii[rows[:, 0]] + radii[rows[:, 1]])).any() else rows


def bonds_from_geometry(numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Bonds (b, 3) perceived from positions alone: RDKit's for a neutral molecule, single bonds where it fails."""
    chem = _rdkit()
    from rdkit.Chem import rdDetermineBonds

    lines = [
        f"{SYMBOLS[int(number)]} {x:.8f} {y:.8f} {z:.8f}" for number, (x, y, z) in zip(numbers, positions, strict=True)
    ]
    molecule = chem.MolFromXYZBlock("\n".join([str(len(numbers)), "", *lines, ""]))
    try:
        rdDetermineBonds.DetermineBonds(molecule, charge=0)
        chem.SanitizeMol(molecule)
        return _bond_rows(molecule)
    except ValueError:
        radii = np.array([_RADII[int(number)] for number in numbers])
        gaps = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
        first, second = np.nonzero(np.triu(gaps < _LONGEST * (radii[:, None] + radii[None]), 1))
        return np.stack([first, second, np.zeros(len(first), np.int64)], 1)


def _from_rdkit(molecule, name: str, bonds: np.ndarray | None = None) -> Molecule:
    unknown = sorted({atom.GetSymbol() for atom in molecule.GetAtoms()} - ELEMENTS.keys())
    if unknown:
        raise ValueError(f"{name}: element {', '.join(unknown)} is none of QM9's ({', '.join(ELEMENTS)})")
    numbers = np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()], np.uint8)
    positions = np.asarray(molecule.GetConformer().GetPositions(), np.float64).reshape(-1, 3)
    if not np.isfinite(positions).all():
        raise ValueError(f"{name}: a position is not a finite number")
    found = Molecule(name, numbers, positions, _bond_rows(molecule) if bonds is None else bonds)
    _check_distances(found)
    return found


def _check_distances(molecule: Molecule) -> None:
    gaps = np.linalg.norm(molecule.positions[:, None] - molecule.positions[None], axis=-1)
    first, second = np.nonzero(np.triu(gaps < SHORTEST, 1))
    if len(first):
        raise ValueError(f"{molecule.name}: atoms {first[0]} and {second[0]} are in one place")


def _check_whole(molecule: Molecule) -> None:
    """ValueError where bonds found from a geometry show that atoms are missing or out of place."""
    if len(molecule.numbers) > 1:
        neighbours = np.bincount(molecule.bonds[:, :2].ravel(), minlength=len(molecule.numbers))
        for atom, (number, count) in enumerate(zip(molecule.numbers.tolist(), neighbours.tolist(), strict=True)):
            if count < min(_FEWEST[number], len(molecule.numbers) - 1):
                raise ValueError(
                    f"atom {atom + 1} ({SYMBOLS[number]}) has {count} neighbour(s) within the length of a bond: "
                    "hydrogens are missing, or the geometry is not in angstrom"
                )
        pieces = np.arange(len(molecule.numbers))
        for _ in pieces:  # the smallest number among all that are connected
            for first, second in molecule.bonds[:, :2]:
                pieces[first] = pieces[second] = min(pieces[first], pieces[second])
        if pieces.any():
            raise ValueError(f"holds {len(set(pieces.tolist()))} molecules; give each by itself")


def from_smiles(smiles: str, seed: int = 0) -> Molecule:
    """A molecule with a conformer by ETKDG, relaxed with MMFF94 where that knows all atoms.

    ValueError for a SMILES that RDKit cannot read, other elements than QM9's, or where no conformer is found.
    """
    chem = _rdkit()
    from rdkit.Chem import AllChem

    molecule = chem.MolFromSmiles(smiles)
    if molecule is None or not molecule.GetNumAtoms():
        raise ValueError(f"{smiles!r} is not a valid SMILES")
    unknown = sorted({atom.GetSymbol() for atom in molecule.GetAtoms()} - ELEMENTS.keys())
    if unknown:
        raise ValueError(f"{smiles!r}: element {', '.join(unknown)} is none of QM9's ({', '.join(ELEMENTS)})")
    if len(chem.GetMolFrags(molecule)) > 1:
        raise ValueError(f"{smiles!r} holds several molecules; give each by itself")
    molecule = chem.AddHs(molecule)
    tries = ({"randomSeed": seed + number, "useRandomCoords": number > 0} for number in range(EMBEDDINGS))
    if all(AllChem.EmbedMolecule(molecule, **options) for options in tries):
        raise ValueError(f"{smiles!r}: no conformer found in {EMBEDDINGS} tries; give its geometry as a file")
    bonds = _bond_rows(molecule)  # before the force field, which marks other bonds as aromatic
    if AllChem.MMFFHasAllMoleculeParams(molecule):
        AllChem.MMFFOptimizeMolecule(molecule, maxIters=2000)
    return _from_rdkit(molecule, smiles, bonds)


Skipped = list[tuple[str, str]]  # what could not be read: name and reason


def read_molecules(path: str | Path, skipped: Skipped | None = None) -> list[Molecule]:
    """The molecules of an .sdf or .mol file (with 3-D positions and hydrogens) or of an .xyz file.

    ValueError names the file, and the record that cannot be read; with ``skipped`` a record is noted there instead.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    readers = {".xyz": _xyz_records, ".sdf": _sdf_records, ".mol": _sdf_records}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: not an .sdf, .mol or .xyz file")
    found: list[Molecule] = []
    empty = True
    for place, read in readers[path.suffix.lower()](path):
        empty = False
        try:
            found.append(read())
        except ValueError as error:
            if skipped is None:
                raise ValueError(f"{path}: {place}: {error}") from None
            skipped.append((f"{path}: {place}", f"{path}: {place}: {error}"))
    if empty:
        raise ValueError(f"{path}: holds no molecule")
    return found


Record = tuple[str, Callable[[], Molecule]]  # where it is, and what reads it


def _sdf_records(path: Path) -> Iterator[Record]:
    for index, molecule in enumerate(_rdkit().SDMolSupplier(str(path), removeHs=False), 1):
        yield f"record {index}", functools.partial(_from_sdf, molecule, f"{path.name}#{index}")


def _from_sdf(molecule, name: str) -> Molecule:
    if molecule is None:
        raise ValueError("not a valid molecule")
    if not molecule.GetNumConformers() or not molecule.GetConformer().Is3D():
        raise ValueError("has no 3-D positions; give its SMILES instead")
    missing = sum(atom.GetTotalNumHs() for atom in molecule.GetAtoms())
    if missing:
        raise ValueError(f"lacks {missing} hydrogen atom(s), whose positions the model needs; give its SMILES instead")
    title = molecule.GetProp("_Name").strip() if molecule.HasProp("_Name") else ""
    return _from_rdkit(molecule, title or name)


def _xyz_records(path: Path) -> Iterator[Record]:
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    row = number = 0
    while row < len(lines):
        if not lines[row].strip():
            row += 1
            continue
        number += 1
        place = f"the molecule at line {row + 1}"
        try:
            count = int(lines[row])
        except ValueError:
            raise ValueError(f"{path}: line {row + 1}: {lines[row][:40]!r} is not a number of atoms") from None
        if count < 1:
            raise ValueError(f"{path}: line {row + 1}: {count} atoms")
        block = lines[row + 1 : row + 2 + count]
        yield place, functools.partial(_from_xyz, block, count, f"{path.name}#{number}")
        row += 2 + count


def _from_xyz(block: list[str], count: int, name: str) -> Molecule:
    """``block``: the comment and the lines of the atoms."""
    atoms = [line.split() for line in block[1:]]
    if len(atoms) != count:
        raise ValueError(f"{count} atoms announced, {len(atoms)} found")
    try:
        for number, atom in enumerate(atoms, 1):
            if len(atom) < 4:
                raise ValueError(f"atom {number} has {max(len(atom) - 1, 0)} coordinates")
        numbers = np.array([ELEMENTS[atom[0]] for atom in atoms], np.uint8)
        positions = np.array([[float(value) for value in atom[1:4]] for atom in atoms]).reshape(count, 3)
    except KeyError as error:
        known = ", ".join(ELEMENTS)
        raise ValueError(f"element {error} is none of QM9's, which are written {known}") from None
    except (ValueError, IndexError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if not np.isfinite(positions).all():
        raise ValueError("a position is not a finite number")
    if np.abs(positions - positions.mean(0)).max() > FARTHEST:
        raise ValueError(f"an atom is more than {FARTHEST:g} angstrom from the middle")
    molecule = Molecule(block[0].strip() or name, numbers, positions, np.zeros((0, 3), np.int64))
    _check_distances(molecule)
    molecule.bonds = bonds_from_geometry(numbers, positions)
    _check_whole(molecule)
    return molecule


def draw(molecule: Molecule, lines: list[str], size: tuple[int, int] = (480, 420)) -> bytes:
    """A PNG of the structure in two dimensions with ``lines`` below it."""
    chem = _rdkit()
    from rdkit.Chem import rdDepictor
    from rdkit.Chem.Draw import rdMolDraw2D

    editable = chem.RWMol()
    for number in molecule.numbers:
        editable.AddAtom(chem.Atom(int(number)))
    kinds = [chem.BondType.SINGLE, chem.BondType.DOUBLE, chem.BondType.TRIPLE, chem.BondType.AROMATIC]
    for first, second, kind in molecule.bonds.tolist():
        editable.AddBond(first, second, kinds[kind])
        if kind == kinds.index(chem.BondType.AROMATIC):
            for atom in (first, second):
                editable.GetAtomWithIdx(atom).SetIsAromatic(True)
    # Charges are not kept, so valences may look wrong: draw what is there without judging it.
    plain = chem.RemoveHs(editable.GetMol(), sanitize=False) if len(molecule.numbers) > 4 else editable.GetMol()
    plain.UpdatePropertyCache(strict=False)
    chem.FastFindRings(plain)
    rdDepictor.Compute2DCoords(plain)
    canvas = rdMolDraw2D.MolDraw2DCairo(*size)
    canvas.drawOptions().legendFraction = min(0.5, 0.08 * len(lines) + 0.02)
    canvas.drawOptions().legendFontSize = 20
    canvas.drawOptions().prepareMolsBeforeDrawing = False
    canvas.DrawMolecule(plain, legend="\n".join(lines))
    canvas.FinishDrawing()
    return canvas.GetDrawingText()
