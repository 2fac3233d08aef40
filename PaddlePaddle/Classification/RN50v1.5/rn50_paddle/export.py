"""Export a classifier for `paddle.inference` and ONNX, and check both against the model.

    ./dlx run rn50_paddle export -- --checkpoint runs/paddle-quickstart --output_dir runs/paddle-exported

Writes OUTPUT/paddle (model.json, model.pdiparams, classifier.json) and OUTPUT/model.onnx. Where a number differs from
the model's, the export fails and leaves nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from dlx import config as configs

from . import fold, predictor, pretrained, quantized_onnx
from .options import CONFIGS

BATCHES = (1, 3)
TOLERANCE = 1e-4  # of the largest logit


@dataclass
class ExportConfig:
    """Write a model for deployment."""

    checkpoint: str = configs.field(help="a run's folder, a checkpoint or a weights file")
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    formats: list[str] = configs.field(["paddle", "onnx"], help="what to write", choices=("paddle", "onnx"))
    output_dir: str = configs.field("runs/paddle-exported", help="where it goes")


def compare(name: str, expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference over the largest logit; ValueError above TOLERANCE."""
    if expected.shape != found.shape:
        raise ValueError(f"{name}: logits of shape {found.shape}, the model gives {expected.shape}")
    worst = float(np.abs(expected - found).max() / max(1.0, np.abs(expected).max()))
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{name}: logits differ from the model's by {worst:.3g} of the largest, {TOLERANCE:g} is allowed"
        )
    return worst


def export(found: pretrained.Classifier, formats: list[str], output: Path) -> dict[str, float]:
    """Write and check; the relative difference by format. Norms are folded into the convolutions."""
    shape = found.preprocessing
    generator = np.random.default_rng(0)
    examples = [generator.normal(size=(n, shape.channels, shape.crop, shape.crop)).astype(np.float32) for n in BATCHES]
    with paddle.no_grad():
        expected = [found.model(paddle.to_tensor(example)).numpy() for example in examples]
    differences: dict[str, float] = {}
    model = fold.fold(found.model, found.arch)
    for kind in formats:
        target = output / ("paddle" if kind == "paddle" else "model.onnx")
        try:
            if kind == "paddle":
                predictor.save(model, found.describe() | {"data_format": model.data_format}, target)
                run = predictor.Predictor(target)
            else:
                quantized_onnx.float_onnx(model, shape.channels, shape.crop, target)
                session = quantized_onnx.session(target)

                def run(images: np.ndarray, session: Any = session) -> np.ndarray:
                    return session.run(None, {session.get_inputs()[0].name: images})[0]

            pairs = zip(examples, expected, strict=True)
            differences[kind] = max(compare(str(target), logits, run(images)) for images, logits in pairs)
        except ValueError:
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            raise
        print(f"{target}: differs from the model by {differences[kind]:.2g} of the largest logit")
    return differences


def main(args: list[str] | None = None) -> dict[str, float]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    return export(pretrained.load(config.checkpoint, config.arch), config.formats, Path(config.output_dir))


if __name__ == "__main__":
    main()
