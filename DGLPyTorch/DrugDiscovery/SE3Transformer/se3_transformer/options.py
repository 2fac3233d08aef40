"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dlx import data as datasets
from dlx.config import field

from . import qm9
from .model import Fiber, SE3TransformerPooled
from .molecules import EDGE_DIM, NODE_DIM, Collator, Molecules, TargetScale, fit_scale, split

TASK = "DGLPyTorch/DrugDiscovery/SE3Transformer"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class ModelOptions:
    """The network; the defaults are the published configuration."""

    num_layers: int = field(7, help="attention blocks", ge=1, group="model")
    num_heads: int = field(8, help="of attention; divides num_channels / channels_div", ge=1, group="model")
    num_degrees: int = field(4, help="degrees 0 ... num_degrees - 1 of hidden features", ge=1, le=7, group="model")
    num_channels: int = field(32, help="of every hidden degree", ge=1, group="model")
    channels_div: int = field(2, help="values and keys have num_channels / channels_div", ge=1, group="model")
    pooling: Literal["max", "avg", "sum"] = field("max", help="from atoms to the molecule", group="model")
    norm: bool = field(True, help="normalise hidden features after each block", group="model")
    use_layer_norm: bool = field(True, help="layer norm in the radial profiles", group="model")
    low_memory: bool = field(False, help="compute messages in parts, again in the backward pass", group="model")

    def model_options(self) -> dict[str, Any]:
        """These options alone, for a checkpoint's metadata."""
        return {entry.name: getattr(self, entry.name) for entry in fields(ModelOptions)}


def build_model(options: dict[str, Any], num_targets: int = 1) -> SE3TransformerPooled:
    """A model of fresh weights for batches of ``molecules.Collator``. ValueError for unknown options."""
    unknown = sorted(options.keys() - {entry.name for entry in fields(ModelOptions)})
    if unknown:
        raise ValueError(f"unknown model options: {', '.join(unknown)}")
    chosen = ModelOptions(**options)
    for name in ("num_layers", "num_heads", "num_degrees", "num_channels", "channels_div"):
        value, most = getattr(chosen, name), 7 if name == "num_degrees" else None
        if value < 1 or (most and value > most):
            raise ValueError(f"{name} must be at least 1{f' and at most {most}' if most else ''}, got {value}")
    if num_targets < 1:
        raise ValueError(f"num_targets must be at least 1, got {num_targets}")
    width = chosen.num_channels // chosen.channels_div
    if width < 1 or width % chosen.num_heads:
        raise ValueError(
            f"num_channels {chosen.num_channels} / channels_div {chosen.channels_div} = {width} cannot be split into "
            f"num_heads {chosen.num_heads}"
        )
    return SE3TransformerPooled(
        fiber_in=Fiber({0: NODE_DIM}),
        fiber_out=Fiber({0: chosen.num_degrees * chosen.num_channels}),
        fiber_edge=Fiber({0: EDGE_DIM}),
        output_dim=num_targets,
        **chosen.model_options(),
    )


@dataclass
class MoleculeOptions:
    """Which molecules."""

    data: Literal["qm9"] = field("qm9", help="the data set", group="data")
    data_dir: str | None = field(None, help="folder that already holds the data set's tables", group="data")
    max_molecules: int | None = field(None, help="use only so many, drawn by the seed", ge=20, group="data")
    split_seed: int = field(0, help="of the split into train, val and test", ge=0, group="data")

    def open(self) -> dict[str, Molecules]:
        """The splits train, val and test, disjoint, in the published sizes where all molecules are used."""
        if self.data_dir is not None:
            if not Path(self.data_dir).is_dir():
                raise ValueError(f"data_dir {self.data_dir}: there is no such folder")
            prepared = datasets.prepare(qm9.DATA_SET, source=self.data_dir)
            for part in qm9.PARTS:  # QM9 may have been prepared before, from elsewhere
                given = Path(self.data_dir) / part
                if not given.is_file() or given.stat().st_size != (prepared / part).stat().st_size:
                    raise ValueError(f"data_dir {self.data_dir}: {part} is missing or is not QM9's table")
        everything = qm9.load()
        count = len(everything)
        parts = split(count, self.split_seed)
        if self.max_molecules is not None and self.max_molecules < count:
            share = self.max_molecules / count
            parts = {name: indices[: max(2, round(len(indices) * share))] for name, indices in parts.items()}
        return {name: everything.take(np.sort(indices)) for name, indices in parts.items()}

    def identity(self) -> dict[str, str]:
        """The data's hash for a run record."""
        return {self.data: datasets.identity(qm9.DATA_SET)}


@dataclass
class DataOptions(MoleculeOptions):
    """Which molecules and which property."""

    task: str = field("homo", help=f"target: {', '.join(qm9.TARGETS)}", group="data", choices=tuple(qm9.TARGETS))
    graph: Literal["bonds", "full", "radius"] = field(
        "bonds", help="edges: bonds (as the published figures), all pairs, or pairs within radius", group="data"
    )
    radius: float = field(5.0, help="of graph radius, in angstrom", gt=0, group="data")

    def scale(self, train: Molecules) -> TargetScale:
        """Mean, deviation and atom references of the target, from the training split."""
        return fit_scale(self.task, qm9.UNITS[self.task], target_values(train, self.task), train.composition())

    def collator(self, molecules: Molecules, scale: TargetScale, device: Any = "cpu") -> Collator:
        """Batches with targets in the model's scale."""
        targets = scale.normalize(target_values(molecules, self.task), molecules.composition())
        return Collator(molecules, self.graph, targets[:, None], device, self.radius)


def target_values(molecules: Molecules, task: str) -> np.ndarray:
    """(M,) float64 in the target's unit."""
    return np.asarray(molecules.arrays["targets"])[:, list(qm9.TARGETS).index(task)]
