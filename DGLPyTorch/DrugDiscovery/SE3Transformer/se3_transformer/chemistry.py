"""Molecules from SMILES, SDF, XYZ or QM9's tables: elements, positions and bonds, by RDKit.

Bond types are 0 single, 1 double, 2 triple, 3 aromatic. Positions are in angstrom, centred.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}  # what QM9, and so every model trained on it, knows
SYMBOLS = {number: symbol for symbol, number in ELEMENTS.items()}
_RADII = {1: 0.31, 6: 0.76, 7: 0.71, 8: 0.66, 9: 0.57}  # covalent radii (Cordero et al. 2008), angstrom
_LONGEST = 1.3  # times the sum of the radii


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
    chem = _rdkit()
    kinds = [chem.BondType.SINGLE, chem.BondType.DOUBLE, chem.BondType.TRIPLE, chem.BondType.AROMATIC]
    rows = [
        (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), kinds.index(bond.GetBondType()))
        for bond in molecule.GetBonds()
        if bond.GetBondType() in kinds
    ]
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


def _from_rdkit(molecule, name: str) -> Molecule:
    unknown = sorted({atom.GetSymbol() for atom in molecule.GetAtoms()} - ELEMENTS.keys())
    if unknown:
        raise ValueError(f"{name}: element {', '.join(unknown)} is none of QM9's ({', '.join(ELEMENTS)})")
    numbers = np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()], np.uint8)
    positions = np.asarray(molecule.GetConformer().GetPositions(), np.float64).reshape(-1, 3)
    if not np.isfinite(positions).all():
        raise ValueError(f"{name}: a position is not a finite number")
    return Molecule(name, numbers, positions, _bond_rows(molecule))


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
    molecule = chem.AddHs(molecule)
    if AllChem.EmbedMolecule(molecule, randomSeed=seed) and AllChem.EmbedMolecule(
        molecule, randomSeed=seed, useRandomCoords=True
    ):
        raise ValueError(f"{smiles!r}: no conformer found")
    if AllChem.MMFFHasAllMoleculeParams(molecule):
        AllChem.MMFFOptimizeMolecule(molecule, maxIters=2000)
    return _from_rdkit(molecule, smiles)


def read_molecules(path: str | Path) -> list[Molecule]:
    """The molecules of an .sdf or .mol file (with 3-D positions and hydrogens) or of an .xyz file.

    ValueError names the file, and the record that cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix.lower() == ".xyz":
        return _read_xyz(path)
    if path.suffix.lower() not in (".sdf", ".mol"):
        raise ValueError(f"{path}: not an .sdf, .mol or .xyz file")
    found = []
    for index, molecule in enumerate(_rdkit().SDMolSupplier(str(path), removeHs=False), 1):
        if molecule is None:
            raise ValueError(f"{path}: record {index} is not a valid molecule")
        if not molecule.GetNumConformers() or not molecule.GetConformer().Is3D():
            raise ValueError(f"{path}: record {index} has no 3-D positions; give its SMILES instead")
        name = molecule.GetProp("_Name") if molecule.HasProp("_Name") else ""
        found.append(_from_rdkit(molecule, name or f"{path.name}#{index}"))
    if not found:
        raise ValueError(f"{path}: holds no molecule")
    return found


def _read_xyz(path: Path) -> list[Molecule]:
    lines, found, row = path.read_text().splitlines(), [], 0
    while row < len(lines):
        if not lines[row].strip():
            row += 1
            continue
        try:
            count = int(lines[row])
            atoms = [line.split() for line in lines[row + 2 : row + 2 + count]]
            if len(atoms) != count or count < 1:
                raise ValueError(f"{count} atoms announced, {len(atoms)} found")
            numbers = np.array([ELEMENTS[atom[0]] for atom in atoms], np.uint8)
            positions = np.array([[float(value) for value in atom[1:4]] for atom in atoms]).reshape(count, 3)
        except KeyError as error:
            raise ValueError(f"{path}: line {row + 1}: element {error} is none of QM9's") from None
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}: the molecule at line {row + 1} cannot be read: {error}") from None
        if not np.isfinite(positions).all():
            raise ValueError(f"{path}: the molecule at line {row + 1} has a position that is not a finite number")
        name = lines[row + 1].strip() or f"{path.name}#{len(found) + 1}"
        found.append(Molecule(name, numbers, positions, bonds_from_geometry(numbers, positions)))
        row += 2 + count
    if not found:
        raise ValueError(f"{path}: holds no molecule")
    return found


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
