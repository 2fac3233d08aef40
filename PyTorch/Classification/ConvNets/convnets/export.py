"""Export a classifier to ONNX (dynamic batch) and check the file in onnxruntime before it is used.

    ./dlx run ConvNets export -- --checkpoint runs/quickstart --output_dir exported

Input ``images``: float32 N C S S, normalised as the stored preprocessing says. Output ``logits``: float32 N K.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlx import config as configs
from dlx import export as exports
from dlx import inference

from . import pretrained
from .options import CONFIGS
from .quantizers import QuantizedClassifier


@dataclass
class ExportConfig:
    """Write model.onnx with its metadata and prove that it computes what the model does."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    output_dir: str = configs.field("exported", help="where model.onnx goes")
    batches: list[int] = configs.field([1, 3], help="batch sizes that are compared in onnxruntime", ge=1)
    atol: float = configs.field(1e-4, help="largest difference allowed, relative to the largest logit", gt=0)


def export(found: pretrained.Classifier, path: Path, batches: tuple[int, ...] = (1, 3), atol: float = 1e-4) -> float:
    """Write the folded model to ``path``; returns the largest relative difference to the unfolded one.

    Raises dlx.export.ParityError when onnxruntime disagrees; no failure leaves a file.
    """
    if isinstance(found.model, QuantizedClassifier):
        raise ValueError(f"{found.source} is quantised; the folder of its run holds the file, model_int8.onnx")
    shape = found.preprocessing
    size = (shape.channels, shape.crop, shape.crop)
    found.model.eval()

    def example(batch: int) -> torch.Tensor:
        return torch.randn(batch, *size, generator=torch.Generator().manual_seed(batch))

    with torch.no_grad():
        scale = max(1.0, found.model(example(2)).abs().max().item())
    exports.to_onnx(
        inference.fold(found.model),
        example(2),
        path,
        input_names=["images"],
        output_names=["logits"],
        metadata=found.describe(),
    )
    try:
        difference = exports.check_onnx(path, found.model, example, batches=batches, atol=atol * scale, rtol=0.0)
    except BaseException:  # also a graph that onnxruntime refuses, and Ctrl-C: what is unchecked must not stay
        path.unlink(missing_ok=True)
        raise
    return difference / scale


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    found = pretrained.load(config.checkpoint, arch=config.arch)
    path = Path(config.output_dir) / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    difference = export(found, path, tuple(config.batches), config.atol)
    print(f"{path}: {found.arch}, {path.stat().st_size / 2**20:.1f} MiB, largest relative difference {difference:.1e}")
    return {"path": str(path), "difference": difference}


if __name__ == "__main__":
    main()
