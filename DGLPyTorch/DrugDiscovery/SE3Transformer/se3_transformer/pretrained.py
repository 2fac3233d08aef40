"""Models with weights: from a card of the registry, a run's folder, a checkpoint, or a file of NVIDIA's package.

What a model needs to be used (its options, its targets with units and scale, its kind of graph) travels with its
weights, in the card or the checkpoint's metadata. A file of the reference package has none of it, so the caller says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlx import checkpoint as checkpoints
from dlx import weights

from . import chemistry, qm9
from .convert import to_canonical
from .molecules import Collator, Molecules, TargetScale, flatten
from .options import build_model

KEYS = ("model_options", "targets", "graph")


@dataclass
class Predictor:
    """A model in evaluation mode with everything needed to use it."""

    model: nn.Module
    model_options: dict[str, Any]
    targets: list[TargetScale]
    graph: str
    radius: float
    source: str
    split_seed: int = 0

    def describe(self) -> dict[str, Any]:
        """The metadata that a checkpoint or a card carries."""
        return {
            "model_options": self.model_options,
            "targets": [target.to_json() for target in self.targets],
            "graph": self.graph,
            "radius": self.radius,
            "split_seed": self.split_seed,
        }

    @torch.inference_mode()
    def predict(self, found: list[chemistry.Molecule], batch_size: int = 256) -> np.ndarray:
        """(molecules, targets) float64 in the targets' units."""
        if not found:
            raise ValueError("no molecules to predict for")
        device = next(self.model.parameters()).device
        nothing = np.zeros(0)
        pieces = [qm9.molecule_arrays(molecule, nothing) for molecule in found]
        molecules = Molecules(flatten(pieces))
        collate, composition = Collator(molecules, self.graph, None, device, self.radius), molecules.composition()
        rows = []
        for start in range(0, len(found), batch_size):
            indices = np.arange(start, min(start + batch_size, len(found)))
            batch = collate(indices)
            outputs = self.model(batch.graph, batch.node_feats, batch.edge_feats).view(len(indices), len(self.targets))
            rows.append(outputs.double().cpu().numpy())
        columns = np.concatenate(rows).T
        return np.stack(
            [target.restore(column, composition) for target, column in zip(self.targets, columns, strict=True)], 1
        )


def from_metadata(metadata: Mapping[str, Any], state_dict: Mapping[str, Tensor], source: str) -> Predictor:
    """A predictor of these weights. ValueError names what the metadata lacks or which tensors do not fit."""
    missing = [key for key in KEYS if key not in metadata]
    if missing:
        raise ValueError(f"{source}: not weights of an SE(3)-Transformer: {', '.join(missing)} missing")
    targets = [TargetScale.from_json(target) for target in metadata["targets"]]
    model = build_model(dict(metadata["model_options"]), len(targets))
    weights.load_into(model, to_canonical(model, state_dict))
    radius = float(metadata.get("radius", 5.0))
    seed = int(metadata.get("split_seed", 0))
    return Predictor(model.eval(), dict(metadata["model_options"]), targets, metadata["graph"], radius, source, seed)


def load(
    source: str | os.PathLike[str], *, device: str | torch.device = "cpu", averaged: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Predictor:  # fmt: skip
    """A predictor from a card's name, a run's or checkpoint's folder, or a weights file with ``metadata``.

    ``averaged`` prefers EMA weights. ValueError when the source is none of these or does not fit.
    """
    path = Path(source)
    if path.is_dir():
        found = _from_checkpoint(path, averaged)
    elif str(source) in weights.cards():
        card = weights.card(str(source))
        found = from_metadata(card.raw, weights.load_state_dict(weights.resolve(card.name)), card.name)
    elif path.is_file():
        if metadata is None:
            raise ValueError(
                f"{path}: a bare weights file does not say what it is; use a run's folder or a card's name"
            )
        found = from_metadata(metadata, weights.load_state_dict(path), str(path))
    else:
        known = ", ".join(sorted(weights.cards())) or "none"
        raise ValueError(f"{source}: neither a folder, a file, nor the name of published weights (known: {known})")
    found.model.to(device)
    return found


def _from_checkpoint(path: Path, averaged: bool) -> Predictor:
    if not (path / "meta.json").is_file():
        store = checkpoints.Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        chosen = store.best() or store.latest()
        if chosen is None:
            raise ValueError(f"{path}: no checkpoint in this folder")
        path = chosen
    loaded = checkpoints.load(path)
    name = "ema" if averaged and "ema" in loaded.model else "model"
    return from_metadata(loaded.metadata, loaded.model[name], str(path))
