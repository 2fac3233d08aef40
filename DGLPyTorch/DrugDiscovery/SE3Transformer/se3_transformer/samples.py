"""Pictures of an evaluation for a run's report: predictions over true values, and the errors' distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dlx.files import atomic_path

from .molecules import TargetScale


def draw(result: dict[str, Any], scale: TargetScale, folder: Path, split: str) -> list[dict[str, Any]]:
    """Write both pictures; entries of the report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    values, predictions = result["values"], result["predictions"]
    axis = f"{scale.name} [{scale.unit}]"

    parity = Figure(figsize=(5, 5), layout="constrained")
    axes = parity.subplots()
    low, high = (float(bound) for bound in (min(values.min(), predictions.min()), max(values.max(), predictions.max())))
    axes.hexbin(values, predictions, gridsize=70, bins="log", mincnt=1, extent=(low, high, low, high), cmap="viridis")
    axes.plot([low, high], [low, high], color="red", linewidth=0.8)
    axes.set(xlabel=f"true {axis}", ylabel=f"predicted {axis}", aspect="equal")

    histogram = Figure(figsize=(5, 3.6), layout="constrained")
    axes = histogram.subplots()
    errors = predictions - values
    reach = float(np.quantile(np.abs(errors), 0.995)) or 1.0
    axes.hist(np.clip(errors, -reach, reach), bins=81, color="tab:blue")
    axes.axvline(0, color="red", linewidth=0.8)
    axes.set(xlabel=f"error of {axis}", ylabel="molecules")

    entries = []
    captions = {
        "parity": f"{split}: predicted over true, {result['molecules']:,} molecules",
        "errors": f"{split}: mean absolute error {result['mae']:.4g} {scale.unit}, the outermost bins hold the rest",
    }
    for name, figure in (("parity", parity), ("errors", histogram)):
        with atomic_path(folder / f"{split}_{name}.png") as path:
            figure.savefig(path, format="png", dpi=110)
        entries.append({"image": f"{folder.name}/{split}_{name}.png", "caption": captions[name]})
    return entries
