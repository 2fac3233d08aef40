"""A trained GMM-HMM: lexicon, tree, transitions, mixtures and the way from MFCC to its features; saved as two files.

model.json holds the tree and the settings, model.safetensors the arrays; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dlx.files import atomic_path, atomic_write

from . import alignment, features
from .features import FeatureConfig
from .gmm import Mixtures
from .lexicon import Lexicon
from .transitions import TransitionModel
from .tree import ContextTree

FORMAT = 1


@dataclass
class Frontend:
    """From normalised MFCC (T, D) to what the mixtures see: differences added, or spliced and projected by `matrix`."""

    matrix: np.ndarray | None = None  # (out, (2 context + 1) D)
    context: int = 3

    def __call__(self, item: np.ndarray) -> np.ndarray:
        if self.matrix is None:
            return features.add_deltas(item)
        return features.splice(item, self.context, self.context) @ self.matrix.T.astype(np.float32)


@dataclass
class HmmModel:
    """Everything that alignment and graphs need, and the mixtures."""

    lexicon: Lexicon
    tree: ContextTree
    transitions: TransitionModel
    mixtures: Mixtures
    frontend: Frontend
    features: FeatureConfig
    cmvn: str = "speaker"
    mean: np.ndarray | None = None  # of the training's MFCC, for an utterance of an unknown speaker

    def graphs(self, texts: Sequence[Sequence[str]]) -> list[alignment.TextGraph]:
        return [alignment.text_graph(words, self.lexicon, self.tree, self.transitions) for words in texts]

    def align(
        self, items: Sequence[np.ndarray], graphs: Sequence[alignment.TextGraph], scale: float = 1.0
    ) -> list[alignment.Alignment | None]:
        """Forced alignments of utterances whose features have gone through the front end."""
        return alignment.align(
            graphs,
            [len(item) for item in items],
            lambda index, pdfs: self.mixtures.log_likelihoods(items[index], pdfs),
            self.transitions,
            scale,
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        self.lexicon.save(folder)
        arrays = {f"gmm.{name}": np.ascontiguousarray(v) for name, v in self.mixtures.to_arrays().items()}
        arrays |= {"triples": self.transitions.triples, "stay": self.transitions.stay}
        if self.frontend.matrix is not None:
            arrays["frontend"] = np.ascontiguousarray(self.frontend.matrix)
        if self.mean is not None:
            arrays["mean"] = np.asarray(self.mean, np.float64)
        with atomic_path(folder / "model.safetensors") as temporary:
            save_file(arrays, temporary)
        values: dict[str, Any] = {
            "format": FORMAT,
            "tree": self.tree.to_dict(),
            "context": self.frontend.context,
            "features": self.features.to_dict(),
            "cmvn": self.cmvn,
        }
        atomic_write(folder / "model.json", json.dumps(values) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HmmModel:
        """ValueError for a folder that holds no such model."""
        folder = Path(folder)
        if not (folder / "model.json").is_file():
            raise ValueError(f"{folder}: holds no model.json, so it is no GMM-HMM")
        values = json.loads((folder / "model.json").read_text())
        if values.get("format") != FORMAT:
            raise ValueError(f"{folder / 'model.json'}: format {values.get('format')!r}, expected {FORMAT}")
        arrays = load_file(folder / "model.safetensors")
        return cls(
            Lexicon.load(folder),
            ContextTree.from_dict(values["tree"]),
            TransitionModel(arrays["triples"], arrays["stay"]),
            Mixtures(*(arrays[f"gmm.{name}"] for name in ("offsets", "weights", "means", "variances"))),
            Frontend(arrays.get("frontend"), values["context"]),
            FeatureConfig.from_dict(values["features"]),
            values["cmvn"],
            arrays.get("mean"),
        )
