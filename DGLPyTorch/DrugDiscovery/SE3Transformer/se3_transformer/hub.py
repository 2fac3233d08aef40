"""torch.hub entries: the transformer itself, and a predictor of molecules' properties with weights.

predictor = torch.hub.load(REPOSITORY, "se3_transformer_predictor", source="local")
print(predictor.smiles(["CCO", "c1ccccc1"]))  # one row a molecule, in the units of predictor.targets
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from . import chemistry, options
from . import pretrained as loading
from .model import SE3TransformerPooled

PUBLISHED = "se3_transformer.qm9_homo"


class HubPredictor(loading.Predictor):
    """A predictor that also takes SMILES."""

    def smiles(self, molecules: str | Sequence[str], seed: int = 0) -> np.ndarray:
        """(molecules, targets) float64 in the targets' units; RDKit makes the geometries, `seed` chooses which.

        ValueError names a molecule that cannot be read or has elements that QM9 lacks.
        """
        given = [molecules] if isinstance(molecules, str) else list(molecules)
        return self.predict([chemistry.from_smiles(molecule, seed=seed) for molecule in given])


def se3_transformer(num_targets: int = 1, **model_options) -> SE3TransformerPooled:
    """The published configuration (9.3 M parameters; 7 layers, degrees 0 to 3, 32 channels) with fresh weights.

    ``model_options``: those of `se3_transformer.options.ModelOptions`, ValueError for others. Takes a graph, node
    features and edge features and gives (graphs, num_targets). Needs no network and writes no file.
    """
    return options.build_model(model_options, num_targets)


def se3_transformer_predictor(checkpoint=None, device: str | torch.device = "cpu") -> HubPredictor:
    """A trained model: ``checkpoint`` is a run's folder, a checkpoint or a published name; by default the published
    model of the HOMO energy. ``predictor.smiles([...])`` and ``predictor.predict(molecules)`` give values in the units
    of ``predictor.targets``; ``predictor.model`` is the network.
    """
    found = loading.load(PUBLISHED if checkpoint is None else checkpoint, device=device)
    found.__class__ = HubPredictor
    return found
