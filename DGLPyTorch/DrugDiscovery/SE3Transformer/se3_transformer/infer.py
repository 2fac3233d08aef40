"""Predict properties of molecules: prints them with units, writes a JSON file and a picture of every molecule.

./dlx run SE3Transformer infer -- --checkpoint runs/se3_quickstart --smiles "CCO C[NH3+]"
./dlx run SE3Transformer infer -- --checkpoint runs/se3_quickstart --file molecules.sdf
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlx import config as configs
from dlx import dist
from dlx.files import atomic_write

from . import chemistry, pretrained
from .options import CONFIGS


@dataclass
class InferConfig:
    """Predict for SMILES (with a conformer by RDKit) or for the geometries of a file."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint, or a name of `./dlx weights list`")
    smiles: str | None = configs.field(None, help="one or more SMILES of H, C, N, O, F, with spaces between them")
    file: str | None = configs.field(
        None, help="an .sdf or .mol file with 3-D positions and hydrogens, or an .xyz file"
    )
    seed: int = configs.field(0, help="of the conformer", ge=0)
    batch_size: int = configs.field(256, help="molecules at a time", ge=1)
    tolerant: bool = configs.field(False, help="report molecules that cannot be used and go on")
    pictures: bool = configs.field(True, help="draw every molecule with its predictions")
    output_dir: str = configs.field("runs/infer", help="predictions.json and the pictures")
    device: str = configs.field("auto", help="auto, cpu, cuda or cuda:N")


def read(config: InferConfig, skipped: list[tuple[str, str]]) -> list[chemistry.Molecule]:
    """All molecules asked for. What cannot be read raises, or is noted in ``skipped``."""
    found = []
    for smiles in (config.smiles or "").split():
        try:
            found.append(chemistry.from_smiles(smiles, config.seed))
        except ValueError as error:
            if not config.tolerant:
                raise
            skipped.append((smiles, str(error)))
    if config.file is not None:
        found += chemistry.read_molecules(config.file, skipped if config.tolerant else None)
    return found


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(InferConfig, args, configs_dir=CONFIGS, prog="infer")
    if not config.smiles and config.file is None:
        raise ValueError("nothing to predict: give --smiles or --file")
    skipped: list[tuple[str, str]] = []
    molecules = read(config, skipped)
    for _, reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    if not molecules:
        raise ValueError(f"none of {len(skipped)} molecules could be read; {skipped[0][1]}")
    output = Path(config.output_dir)
    with dist.init(config.device) as world:
        world.require_alone("infer")
        predictor = pretrained.load(config.checkpoint, device=world.device)
        values = predictor.predict(molecules, config.batch_size)
    results = []
    for number, (molecule, row) in enumerate(zip(molecules, values, strict=True), 1):
        lines = [
            f"{target.name} {value:.4g} {target.unit}" for target, value in zip(predictor.targets, row, strict=True)
        ]
        print(molecule.name, *lines, sep="\n  ")
        named = {
            target.name: {"value": float(value), "unit": target.unit}
            for target, value in zip(predictor.targets, row, strict=True)
        }
        result: dict[str, Any] = {"molecule": molecule.name, "atoms": len(molecule.numbers), "predictions": named}
        if config.pictures:
            picture = output / f"molecule_{number:04d}.png"
            atomic_write(picture, chemistry.draw(molecule, [molecule.name, *lines]))
            result["picture"] = str(picture)
        results.append(result)
    content = {"checkpoint": predictor.source, "graph": predictor.graph, "predictions": results, "skipped": skipped}
    atomic_write(output / "predictions.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(results)} predicted, {len(skipped)} skipped; {output / 'predictions.json'}")
    return content


if __name__ == "__main__":
    main()
