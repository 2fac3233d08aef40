"""QM9's tables, molecules of files, splits, scales, batches, and predictions of own molecules."""

from __future__ import annotations

import importlib.util
import json
import time

import numpy as np
import pytest
import torch

from dlx import checkpoint
from se3_transformer import chemistry, infer, options, prepare, pretrained, qm9
from se3_transformer.molecules import CHARGES, Collator, Molecules, TargetScale, fit_scale, flatten, split

needs_rdkit = pytest.mark.skipif(importlib.util.find_spec("rdkit") is None, reason="needs the package rdkit")
HEADER = (
    "XYZ_file,Index,SMILES,InChi,N_atoms,Stoichiometry,Elements,XYZ_Ang,Mulliken_pop,Harmonic_Freq_cmi,RotA_GHz,RotB_GHz,"
    "RotC_GHz,Dipole_debye,Polarizability_bohr3,HOMO_au,LUMO_au,HOMO_LUMO_gap_au,R2_bohr2,ZPVE_au,InternalEnergy_0K_au,"
    "InternalEnergy_298K_au,Enthalphy_298K_au,GibbsFreeEnergy_298K_au,Heatcapacity_Cv_cal_mol_K"
)
WATER = (
    '"x",3,"O","i",3,"[3,0,0,1,0]","[\'O\',\'H\',\'H\']","[[-0.0343604951,0.9775395708,0.0076015923],'
    '[0.0647664923,0.0205721989,0.0015346341],[0.8717903737,1.3007924048,0.0006931336]]","[]","[]",799.58812,437.90386,'
    "282.94545,1.8511,6.31,-0.2928,0.0687,0.3615,19.0002,0.021375,-76.404702,-76.401867,-76.400922,-76.422349,6.002"
)
ETHYNE = (
    '"x",4,"C#C","i",4,"[2,2,0,0,0]","[\'C\',\'C\',\'H\',\'H\']","[[0.5995394918,0.,1.],[-0.5995394918,0.,1.],'
    '[-1.6616385861,0.,1.],[1.6616385861,0.,1.]]","[]","[]",0.,35.6100361,35.6100361,0.,16.28,-0.2845,0.0506,0.3351,'
    "59.5248,0.026841,-77.308427,-77.305527,-77.304583,-77.327429,8.574"
)


def fake_set(count: int = 40, seed: int = 0) -> Molecules:
    """Random chains: every atom is bonded to the one before it."""
    generator = np.random.default_rng(seed)
    pieces = []
    for index in range(count):
        atoms = int(generator.integers(1, 9))
        numbers = generator.choice(CHARGES, atoms).astype(np.uint8)
        positions = np.cumsum(generator.normal(size=(atoms, 3)) + 0.5, 0)
        bonds = np.stack([np.arange(atoms - 1), np.arange(1, atoms), generator.integers(0, 4, atoms - 1)], 1)
        molecule = chemistry.Molecule(str(index), numbers, positions, bonds.astype(np.int64))
        pieces.append(qm9.molecule_arrays(molecule, generator.normal(size=len(qm9.TARGETS)), index))
    return Molecules(flatten(pieces))


def one_by_one(molecules: Molecules, index: int) -> dict[str, np.ndarray]:
    """A molecule's own arrays, by slicing."""
    arrays = molecules.arrays
    atom, edge = int(arrays["atoms"][:index].sum()), int(arrays["edges"][:index].sum())
    atoms, edges = slice(atom, atom + int(arrays["atoms"][index])), slice(edge, edge + int(arrays["edges"][index]))
    return {name: arrays[name][atoms] for name in ("numbers", "positions")} | {
        name: arrays[name][edges] for name in ("src", "dst", "bond")
    }


@pytest.mark.parametrize("graph", ["bonds", "full", "radius"])
def test_batches_are_what_a_loop_over_molecules_gives(graph):
    molecules = fake_set()
    targets = np.arange(40.0)[:, None]
    indices = np.array([7, 3, 3, 39, 0, 12])
    batch = Collator(molecules, graph, targets, radius=1.5)(indices)
    features, edges, start, owner = [], [], 0, []
    for place, index in enumerate(indices):
        own = one_by_one(molecules, index)
        count = len(own["numbers"])
        features += [[float(z == charge) for charge in CHARGES] + [float(z)] for z in own["numbers"]]
        owner += [place] * count
        bonds = {(int(d), int(s)): int(t) for s, d, t in zip(own["src"], own["dst"], own["bond"], strict=True)}
        for d in range(count):
            for s in range(count):
                relative = own["positions"][d] - own["positions"][s]
                wanted = (d, s) in bonds if graph == "bonds" else s != d
                if wanted and (graph != "radius" or (relative**2).sum() <= 1.5**2):
                    kind = [float(bonds.get((d, s)) == k) for k in range(4)]
                    edges.append([s + start, d + start, *relative, *kind])
        start += count
    edges = np.array(edges)
    assert batch.graph.num_nodes == start and batch.graph.num_graphs == 6
    assert batch.graph.edge_index.numpy().T.tolist() == edges[:, :2].astype(int).tolist()
    assert np.allclose(batch.graph.relative_pos.numpy(), edges[:, 2:5], atol=1e-6)
    assert np.array_equal(batch.edge_feats["0"][..., 0].numpy(), edges[:, 5:])
    assert np.array_equal(batch.node_feats["0"][..., 0].numpy(), np.array(features, np.float32))
    assert batch.graph.batch.tolist() == owner and batch.targets[:, 0].tolist() == indices.tolist()
    assert batch.graph.degenerate is None


def test_subsets_and_files_keep_every_array(tmp_path):
    molecules = fake_set()
    chosen = np.array([5, 0, 17])
    part = molecules.take(chosen)
    for place, index in enumerate(chosen):
        for name, value in one_by_one(molecules, index).items():
            assert np.array_equal(one_by_one(part, place)[name], value)
    assert np.array_equal(part.arrays["targets"], molecules.arrays["targets"][chosen])
    part.save(tmp_path / "set")
    opened = Molecules.open(tmp_path / "set")
    assert opened.arrays.keys() == part.arrays.keys() and isinstance(opened.arrays["positions"], np.memmap)
    assert all(np.array_equal(opened.arrays[name], value) for name, value in part.arrays.items())
    counts = [[int((one_by_one(part, k)["numbers"] == z).sum()) for z in CHARGES] for k in range(3)]
    assert part.composition().tolist() == counts


def test_wrong_sets_and_batches_are_refused():
    molecules = fake_set(5)
    with pytest.raises(ValueError, match="numbers has"):
        Molecules(molecules.arrays | {"numbers": molecules.arrays["numbers"][1:]})
    with pytest.raises(ValueError, match="molecules 0 to 4, got"):
        Collator(molecules)(np.array([5]))
    with pytest.raises(ValueError, match="'bond'"):
        Collator(molecules, "bond")
    with pytest.raises(ValueError, match="3 rows of targets for 5"):
        Collator(molecules, targets=np.zeros((3, 1)))
    broken = {name: np.array(value) for name, value in molecules.arrays.items()}
    broken["positions"][:] = 0
    with pytest.raises(ValueError, match="apart"):
        Collator(Molecules(broken), "full")


def test_split_is_disjoint_seeded_and_of_the_published_sizes():
    parts = split(130_831)
    assert {name: len(part) for name, part in parts.items()} == {"train": 100_000, "test": 13_083, "val": 17_748}
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(130_831))
    assert np.array_equal(parts["test"], split(130_831)["test"])
    assert not np.array_equal(parts["test"], split(130_831, seed=1)["test"])
    with pytest.raises(ValueError, match="do not fit into 10"):
        split(10, train=10)


def test_scale_of_a_target():
    """References are recovered, normalised values have mean 0 and deviation 1, and restoring undoes it."""
    generator = np.random.default_rng(0)
    composition = generator.integers(0, 9, (500, 5))
    atoms = np.array([-13.6, -1030.0, -1485.0, -2042.0, -2713.0])
    energies = composition @ atoms + generator.normal(size=500) * 0.5
    scale = fit_scale("U0", "eV", energies, composition)
    assert np.allclose(scale.references, atoms, atol=0.1)
    normal = scale.normalize(energies, composition)
    assert abs(normal.mean()) < 1e-12 and normal.std() == pytest.approx(1)
    assert np.allclose(scale.restore(normal, composition), energies, atol=1e-9)
    again = TargetScale.from_json(json.loads(json.dumps(scale.to_json())))
    assert again == scale and scale.std == pytest.approx(0.5, rel=0.1)
    plain = fit_scale("homo", "eV", energies, composition)
    assert plain.references == (0.0,) * 5 and plain.mean == pytest.approx(energies.mean())
    with pytest.raises(ValueError, match="all 3 values are alike"):
        fit_scale("mu", "D", np.ones(3), composition[:3])


def test_gathering_is_fast_enough():
    """At least 5,000 molecules per second of one core's time, batches of 240: others may use the machine, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    molecules = fake_set(2000)
    collate = Collator(molecules, "full", np.zeros((2000, 1)))
    order = np.random.default_rng(0).permutation(2000)
    best = 0.0
    for _ in range(3):
        started = time.process_time()
        for start in range(0, 1920, 240):
            collate(order[start : start + 240])
        best = max(best, 1920 / (time.process_time() - started))
    torch.set_num_threads(threads)
    assert best > 5000


@needs_rdkit
def test_tables_of_qm9(tmp_path):
    table = tmp_path / "part.csv"
    table.write_text("\n".join([HEADER, WATER, ETHYNE, ""]))
    counts = qm9.build([table], tmp_path / "arrays", workers=1, expected=2)
    assert counts == {"molecules": 2, "bonds_from_geometry": 0}
    assert json.loads((tmp_path / "arrays" / "complete.json").read_text())["molecules"] == 2
    assert not (tmp_path / "arrays.parts").exists()
    molecules = Molecules.open(tmp_path / "arrays")
    water, ethyne = one_by_one(molecules, 0), one_by_one(molecules, 1)
    assert water["numbers"].tolist() == [8, 1, 1] and ethyne["numbers"].tolist() == [6, 6, 1, 1]
    assert list(zip(water["src"], water["dst"], strict=True)) == [(1, 0), (2, 0), (0, 1), (0, 2)]
    bonds = {(int(s), int(d)): int(t) for s, d, t in zip(ethyne["src"], ethyne["dst"], ethyne["bond"], strict=True)}
    assert bonds == {(0, 1): 2, (1, 0): 2, (0, 3): 0, (3, 0): 0, (1, 2): 0, (2, 1): 0}
    assert np.allclose(water["positions"].mean(0), 0, atol=1e-6)
    row = dict(zip(qm9.TARGETS, molecules.arrays["targets"][0], strict=True))
    assert row["homo"] == pytest.approx(-0.2928 * 27.211386245988) and row["mu"] == 1.8511 and row["A"] == 799.58812
    atomisation = -76.404702 - (-75.064579 - 2 * 0.500273)  # water minus its atoms, in hartree
    assert row["U0_atom"] == pytest.approx(atomisation * 27.211386245988) and row["U0_atom"] == pytest.approx(
        -9.24, abs=0.1
    )
    assert row["gap"] == pytest.approx(row["lumo"] - row["homo"], abs=0.01)
    assert molecules.arrays["index"].tolist() == [3, 4]


@needs_rdkit
def test_reading_goes_on_after_an_interruption(tmp_path, monkeypatch):
    """Parts that are there are not made again; a damaged row names its molecule."""
    table = tmp_path / "part.csv"
    table.write_text("\n".join([HEADER, WATER, ETHYNE, ""]))
    monkeypatch.setattr(qm9, "CHUNK", 1)
    parts = tmp_path / "arrays.parts"
    parts.mkdir()
    first = next(qm9._chunks([table]))
    path = qm9._read_chunk((0, first, parts))
    stamp = path.stat().st_mtime_ns
    assert qm9._read_chunk((0, [("broken",)], parts)) == path and path.stat().st_mtime_ns == stamp
    assert qm9.build([table], tmp_path / "arrays", workers=1)["molecules"] == 2
    table.write_text("\n".join([HEADER, WATER.replace("0.9775395708", "nan"), ""]))
    with pytest.raises(ValueError, match="QM9 molecule 3"):
        qm9.build([table], tmp_path / "other", workers=1)
    assert not (tmp_path / "other").exists()
    table.write_text("\n".join([HEADER, WATER, ""]))
    with pytest.raises(ValueError, match="1 molecules, expected 2"):
        qm9.build([table], tmp_path / "third", workers=1, expected=2)


@needs_rdkit
@pytest.mark.skipif(not (qm9.folder() / "complete.json").is_file(), reason="QM9 is not prepared (104 MB)")
def test_the_whole_of_qm9():
    molecules = qm9.load()
    assert len(molecules) == qm9.COUNT == len(set(molecules.arrays["index"].tolist()))
    assert molecules.arrays["perceived"].sum() < 20
    assert molecules.arrays["edges"].mean() == pytest.approx(37.3, abs=0.1)
    targets = dict(zip(qm9.TARGETS, np.asarray(molecules.arrays["targets"]).T, strict=True))
    assert targets["homo"].mean() == pytest.approx(-6.54, abs=0.01) and targets["homo"].std() == pytest.approx(
        0.6, abs=0.01
    )
    assert np.abs(targets["lumo"] - targets["homo"] - targets["gap"]).max() < 0.01
    assert targets["U0_atom"].max() < 0


@needs_rdkit
def test_smiles_and_geometry_that_disagree_are_noticed():
    water = np.array([8, 1, 1], np.uint8), np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    assert chemistry.bonds_from_smiles("O", *water).tolist() == [[0, 1, 0], [0, 2, 0]]
    assert chemistry.bonds_from_smiles("[OH-]", *water) is None  # hydrogens
    assert chemistry.bonds_from_smiles("C", *water) is None  # element
    assert chemistry.bonds_from_smiles("not a smiles", *water) is None
    assert chemistry.bonds_from_smiles("O", water[0], 3 * water[1]) is None  # too long
    assert np.sort(chemistry.bonds_from_geometry(*water)[:, :2], 1).tolist() == [[0, 1], [0, 2]]


@needs_rdkit
def test_molecules_from_smiles_and_files(tmp_path):
    from rdkit import Chem

    phenol = chemistry.from_smiles("c1ccccc1O")
    assert sorted(phenol.numbers.tolist()) == [1] * 6 + [6] * 6 + [8]
    assert (phenol.bonds[:, 2] == 3).sum() == 6 and np.allclose(phenol.positions.mean(0), 0, atol=1e-9)
    length = np.linalg.norm(phenol.positions[phenol.bonds[:, 0]] - phenol.positions[phenol.bonds[:, 1]], axis=1)
    assert length.min() > 0.9 and length.max() < 1.6
    assert np.array_equal(chemistry.from_smiles("CCO", 3).positions, chemistry.from_smiles("CCO", 3).positions)
    path = tmp_path / "two.xyz"
    path.write_text("3\nwater\nO 0 0 0\nH 0.96 0 0\nH -0.24 0.93 0\n\n2\n\nC 0 0 0\nO 0 0 1.13\n")
    water, monoxide = chemistry.read_molecules(path)
    assert water.name == "water" and monoxide.name == "two.xyz#2" and len(water.bonds) == 2 and len(monoxide.bonds) == 1
    molecule = Chem.AddHs(Chem.MolFromSmiles("C#N"))
    from rdkit.Chem import AllChem

    AllChem.EmbedMolecule(molecule, randomSeed=1)
    molecule.SetProp("_Name", "hydrogen cyanide")
    with Chem.SDWriter(str(tmp_path / "one.sdf")) as writer:
        writer.write(molecule)
    (cyanide,) = chemistry.read_molecules(tmp_path / "one.sdf")
    assert cyanide.name == "hydrogen cyanide" and cyanide.numbers.tolist() == [6, 7, 1] and 2 in cyanide.bonds[:, 2]


@needs_rdkit
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("2\n\nC 0 0 0\n", "line 1: 2 atoms announced, 1 found"),
        ("1\n\nS 0 0 0\n", "element 'S' is none of QM9's"),
        ("1\n\nC 0 zero 0\n", "cannot be read"),
        ("1\n\nC 0 nan 0\n", "not a finite number"),
        ("\n", "holds no molecule"),
        ("two\n\nC 0 0 0\n", "line 1: 'two' is not a number of atoms"),
        ("0\n\n", "line 1: 0 atoms"),
        ("2\nodd\nC 0 0 0\nH 0 0 0\n", "line 1: odd: atoms 0 and 1 are in one place"),
        ("3\n\nC 0 0 0\nC 1.5 0 0\nO 2 1.3 0\n", r"atom 1 \(C\) has 1 neighbour.*hydrogens are missing"),
        ("3\n\nO 0 0 0\nH 96 0 0\nH -24 93 0\n", r"atom 1 \(O\) has 0 neighbour.*not in angstrom"),
        ("4\n\nH 0 0 0\nH 0.74 0 0\nH 50 0 0\nH 50.74 0 0\n", "holds 2 molecules"),
        ("2\n\nH 0 0 0\nF 1e300 0 0\n", "more than 1000 angstrom"),
        ("1\n\nC 0 0\n", "atom 1 has 2 coordinates"),
        ("1\n\no 0 0 0\n", "element 'o' is none of QM9's, which are written H, C, N, O, F"),
    ],
)
def test_damaged_xyz_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.xyz"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        chemistry.read_molecules(path)
    assert str(path) in str(caught.value)


@needs_rdkit
def test_impossible_requests_are_refused(tmp_path):
    for smiles, message in (
        ("C.C", "several molecules"),
        ("C(", "not a valid SMILES"),
        ("", "not a valid SMILES"),
        ("CCl", "element Cl"),
    ):
        with pytest.raises(ValueError, match=message):
            chemistry.from_smiles(smiles)
    with pytest.raises(ValueError, match="no such file"):
        chemistry.read_molecules(tmp_path / "none.sdf")
    (tmp_path / "a.pdb").write_text("x")
    with pytest.raises(ValueError, match="not an .sdf, .mol or .xyz file"):
        chemistry.read_molecules(tmp_path / "a.pdb")


@needs_rdkit
def test_smiles_and_file_give_the_same_bonds(tmp_path):
    """The force field marks bonds as aromatic by rules of its own: caffeine and uracil are such cases."""
    from rdkit import Chem

    for smiles in ("CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "O=C1C=CNC(=O)N1", "c1ccc2[nH]ccc2c1"):
        found = chemistry.from_smiles(smiles)
        plain = chemistry._bond_rows(Chem.AddHs(Chem.MolFromSmiles(smiles)))
        assert np.array_equal(found.bonds, plain), smiles
        molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
        conformer = Chem.Conformer(molecule.GetNumAtoms())
        for index, place in enumerate(found.positions.tolist()):
            conformer.SetAtomPosition(index, place)
        molecule.AddConformer(conformer)
        with Chem.SDWriter(str(tmp_path / "one.sdf")) as writer:
            writer.write(molecule)
        (again,) = chemistry.read_molecules(tmp_path / "one.sdf")
        assert np.array_equal(again.bonds, found.bonds), smiles


@needs_rdkit
def test_bad_records_are_named_or_skipped(tmp_path):
    from rdkit import Chem
    from rdkit.Chem import AllChem

    bare = Chem.MolFromSmiles("CC(=O)O")
    whole = Chem.AddHs(bare)
    for molecule in (bare, whole):
        AllChem.EmbedMolecule(molecule, randomSeed=1)
    with Chem.SDWriter(str(tmp_path / "acids.sdf")) as writer:
        writer.write(bare)
        writer.write(whole)
    message = r"acids\.sdf: record 1: lacks 4 hydrogen atom\(s\)"
    with pytest.raises(ValueError, match=message):
        chemistry.read_molecules(tmp_path / "acids.sdf")
    skipped = []
    (left,) = chemistry.read_molecules(tmp_path / "acids.sdf", skipped)
    assert len(left.numbers) == 8 and len(skipped) == 1 and "lacks 4 hydrogen" in skipped[0][1]
    (tmp_path / "bytes.xyz").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"bytes\.xyz: not a text file"):
        chemistry.read_molecules(tmp_path / "bytes.xyz")
    with pytest.raises(ValueError, match="is a folder"):
        chemistry.read_molecules(tmp_path)
    dative = chemistry.from_smiles("CN(C)(C)->O")
    assert len(dative.bonds) == len(dative.numbers) - 1  # no ring, nothing apart
    with pytest.raises(ValueError, match="which QM9 has none of"):
        chemistry.from_smiles("C~C")


def test_molecules_of_more_than_256_atoms_keep_their_bonds():
    count = 300
    chain = np.stack([np.arange(count - 1), np.arange(1, count), np.zeros(count - 1, int)], 1)
    positions = np.stack([np.arange(count) * 1.5, np.zeros(count), np.zeros(count)], 1)
    molecule = chemistry.Molecule("chain", np.full(count, 6, np.uint8), positions, chain)
    small = chemistry.Molecule("two", np.full(2, 6, np.uint8), positions[:2], chain[:1])
    molecules = Molecules(flatten([qm9.molecule_arrays(entry, np.zeros(0)) for entry in (molecule, small)]))
    graph = Collator(molecules, "bonds", None)(np.arange(2)).graph
    assert int(graph.dst.max()) == 301 and sorted((graph.src - graph.dst).abs().tolist()) == [1] * (2 * count)


def small_checkpoint(folder, graph: str = "bonds") -> torch.nn.Module:
    torch.manual_seed(0)
    chosen = options.ModelOptions(num_layers=1, num_channels=8, num_degrees=2, num_heads=2).model_options()
    model = options.build_model(chosen)
    target = TargetScale("homo", "eV", -6.5, 0.6).to_json()
    metadata = {"model_options": chosen, "targets": [target], "graph": graph, "radius": 5.0}
    checkpoint.Checkpoints(folder / "checkpoints").save(
        1, model={"model": model.state_dict()}, state={}, metadata=metadata
    )
    return model


@needs_rdkit
@pytest.mark.parametrize("graph", ["bonds", "full"])
def test_infer_writes_what_the_model_says(tmp_path, graph, capsys):
    model = small_checkpoint(tmp_path, graph).eval()
    arguments = ["--checkpoint", str(tmp_path), "--smiles", "CCO C( [H][H]", "--tolerant", "true"]
    content = infer.main([*arguments, "--output_dir", str(tmp_path / "out"), "--device", "cpu"])
    assert [entry["molecule"] for entry in content["predictions"]] == ["CCO", "[H][H]"]
    assert content["skipped"][0][0] == "C("
    assert json.loads((tmp_path / "out" / "predictions.json").read_text())["predictions"] == content["predictions"]
    assert (tmp_path / "out" / "molecule_0001.png").read_bytes().startswith(b"\x89PNG")
    assert "homo" in capsys.readouterr().out
    piece = qm9.molecule_arrays(chemistry.from_smiles("CCO"), np.zeros(0))
    batch = Collator(Molecules(flatten([piece])), graph)(np.array([0]))
    expected = model(batch.graph, batch.node_feats, batch.edge_feats).item() * 0.6 - 6.5
    assert content["predictions"][0]["predictions"]["homo"] == {
        "value": pytest.approx(expected, abs=1e-5),
        "unit": "eV",
    }


@needs_rdkit
def test_predictions_do_not_depend_on_the_batch(tmp_path):
    small_checkpoint(tmp_path)
    predictor = pretrained.load(tmp_path)
    molecules = [chemistry.from_smiles(smiles) for smiles in ("CCO", "C", "N#CC", "O")]
    together = predictor.predict(molecules)
    apart = predictor.predict(molecules, batch_size=1)
    assert together.shape == (4, 1) and np.allclose(together, apart, atol=1e-5)
    assert predictor.describe()["targets"][0]["unit"] == "eV"


def test_useless_sources_and_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in this folder"):
        pretrained.load(tmp_path)
    with pytest.raises(ValueError, match="neither a folder, a file"):
        pretrained.load(tmp_path / "nothing")
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match="does not say what it is"):
        pretrained.load(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="targets, graph missing"):
        pretrained.from_metadata({"model_options": {}}, {}, "somewhere")
    with pytest.raises(ValueError, match="cannot be split into num_heads 8"):
        options.build_model({"num_channels": 8})
    with pytest.raises(ValueError, match="unknown model options: layers"):
        options.build_model({"layers": 8})
    with pytest.raises(ValueError, match="nothing to predict"):
        infer.main(["--checkpoint", "x"])


def test_data_options_give_the_published_split(monkeypatch):
    """A set of another size is split in the same shares; targets are scaled by the training split alone."""
    monkeypatch.setattr(qm9, "load", lambda: fake_set(200))
    chosen = options.DataOptions(task="homo")
    parts = chosen.open()
    assert {name: len(part) for name, part in parts.items()} == {"train": 153, "test": 20, "val": 27}
    assert len({int(i) for part in parts.values() for i in part.arrays["index"]}) == 200
    scale = chosen.scale(parts["train"])
    values = options.target_values(parts["train"], "homo")
    assert scale.mean == pytest.approx(values.mean()) and scale.unit == "eV"
    batch = chosen.collator(parts["val"], scale)(np.arange(27))
    restored = scale.restore(batch.targets[:, 0].numpy(), parts["val"].composition())
    assert np.allclose(restored, options.target_values(parts["val"], "homo"), atol=1e-5)
    fewer = options.DataOptions(max_molecules=50).open()
    assert sum(len(part) for part in fewer.values()) == pytest.approx(50, abs=2)


def test_prepare_says_what_is_there(monkeypatch, capsys):
    monkeypatch.setattr(qm9, "load", lambda: fake_set(200))
    found = prepare.main(["--task", "mu"])
    assert found["splits"] == {"train": 153, "test": 20, "val": 27} and found["scale"]["unit"] == "D"
    assert "train: 153 molecules" in capsys.readouterr().out


def test_damaged_arrays_are_noticed(tmp_path, monkeypatch):
    target = tmp_path / "arrays"
    target.mkdir()
    np.save(target / "a.npy", np.arange(5))
    np.save(target / "b.npy", np.ones(3))
    (target / "complete.json").write_text("{}")
    qm9.check(target)  # of an older version: noted now
    (target / "a.npy").touch()
    qm9.check(target)
    np.save(target / "b.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"b\.npy is damaged; remove the folder .*arrays"):
        qm9.check(target)
    (target / "b.npy").unlink()
    with pytest.raises(ValueError, match=r"b\.npy is damaged"):
        qm9.check(target)
