"""Export a detector to ONNX (dynamic batch) and check the file in onnxruntime before it is used.

    ./dlx run SSD export -- --checkpoint runs/ssd_quickstart --output_dir exported

Input ``images``: uint8 N 3 S S, RGB pictures scaled to S x S as they are; normalisation, decoding and suppression are
part of the graph. Outputs: ``boxes`` float32 N D 4 (corners in shares of the picture), ``scores`` float32 N D by
falling score, ``labels`` int64 N D (1..C), ``count`` int64 N; behind the first ``count`` a row holds zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlx import config as configs
from dlx import export as exports
from dlx import inference
from dlx.boxes import Kept, iou
from dlx.serve import OnnxModel

from . import pretrained
from .detect import DetectionModel, unpad
from .options import CONFIGS

OUTPUTS = ("boxes", "scores", "labels", "count")


@dataclass
class ExportConfig:
    """Write model.onnx with its metadata and prove that it detects what the model does."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    output_dir: str = configs.field("exported", help="where model.onnx goes")
    score_threshold: float = configs.field(0.05, help="detections below are not given back", ge=0, lt=1)
    iou_threshold: float = configs.field(0.5, help="overlap from which the weaker of two goes", gt=0, lt=1)
    max_detections: int = configs.field(200, help="rows of the output", ge=1)
    batches: list[int] = configs.field([1, 3], help="batch sizes that are compared in onnxruntime", ge=1)
    atol: float = configs.field(1e-3, help="largest difference of scores and boxes allowed", gt=0)


BORDERLINE = 0.01  # overlaps that near to the threshold fall on one side or the other by rounding


class DetectionGraph(nn.Module):
    """uint8 images N 3 S S -> boxes, scores, labels, count: all that a client would have to do otherwise."""

    def __init__(self, found: pretrained.Detector, model: nn.Module, **options: Any):
        super().__init__()
        self.normalize = found.preprocessing.normalize()
        self.detection = DetectionModel(model, found.preprocessing.size, **options)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(self.detection(self.normalize(images)))


def example_images(batch: int, size: int) -> Tensor:
    """uint8 N 3 S S: rectangles of random colours over each other, which detectors see objects in."""
    generator = np.random.default_rng(batch)
    images = np.empty((batch, 3, size, size), np.uint8)
    for image in images:
        image[:] = generator.integers(0, 256, (3, 1, 1))
        for _ in range(12):
            left, top = generator.integers(0, size - 8, 2)
            width, height = generator.integers(8, size // 2, 2)
            image[:, top : top + height, left : left + width] = generator.integers(0, 256, (3, 1, 1))
    return torch.from_numpy(images)


def compare(ours: Kept, theirs: Kept, atol: float, iou_threshold: float = 0.5) -> tuple[int, float]:
    """How many detections were compared, and their largest difference in box or score.

    Each detection of either side needs its partner of the same image and label within ``atol``. Where a rounding
    decides it may lack one: a score as low as the lowest given back, one of several boxes on one object whose scores
    are equal up to ``atol``, a box that a stronger one overlaps by just about ``iou_threshold``, and what such a box
    suppresses on its side alone. Raises dlx.export.ParityError for any other detection without a partner.
    """
    worst, compared = 0.0, 0
    for index, pair in enumerate(zip(unpad(ours), unpad(theirs), strict=True)):
        floor = max([one["scores"].min() for one in pair if len(one["scores"])], default=0.0) + 2 * atol
        gaps = _gaps(*pair)
        for these, those, gap, where in ((*pair, gaps, "onnxruntime"), (*pair[::-1], gaps.T, "the model")):
            nearest = gap.min(1, initial=np.inf)
            alone = gap.min(0, initial=np.inf) > atol  # those without a partner among these
            overlaps = iou(torch.from_numpy(these["boxes"]), torch.from_numpy(those["boxes"])).numpy()
            overlaps = np.where(these["labels"][:, None] == those["labels"], overlaps, 0)
            lead = those["scores"] - these["scores"][:, None]
            excused = (abs(lead) <= atol) & (overlaps > 0.5)
            excused |= (lead > atol) & (abs(overlaps - iou_threshold) < BORDERLINE)
            excused |= (lead >= -atol) & (overlaps > iou_threshold - BORDERLINE) & alone
            looked_at = these["scores"] >= floor
            fits = looked_at & (nearest <= atol)
            worst, compared = max([worst, *nearest[fits].tolist()]), compared + int(fits.sum())
            wrong = np.flatnonzero(looked_at & (nearest > atol) & ~excused.any(1))
            if len(wrong):
                box, score, label = (these[key][wrong[0]] for key in ("boxes", "scores", "labels"))
                raise exports.ParityError(
                    f"image {index}: {where} has no detection of label {label}, score {score:.4f}, "
                    f"box {box.round(4).tolist()} (nearest differs by {nearest[wrong[0]]:.3g}, atol {atol:g})"
                )
    return compared, worst


def _gaps(these: dict[str, np.ndarray], those: dict[str, np.ndarray]) -> np.ndarray:
    """The largest difference of box and score between any two detections; infinite for other labels."""
    gaps = abs(these["boxes"][:, None] - those["boxes"]).max(2, initial=0.0)
    gaps = np.maximum(gaps, abs(these["scores"][:, None] - those["scores"]))
    return np.where(these["labels"][:, None] == those["labels"], gaps, np.inf)


def export(
    found: pretrained.Detector,
    path: Path,
    batches: tuple[int, ...] = (1, 3),
    atol: float = 1e-3,
    **options: Any,
) -> tuple[int, float]:
    """Write the folded model to ``path``; returns how many detections were compared and their largest difference.

    ``options`` are those of ``detect.Detect``. Raises dlx.export.ParityError when onnxruntime finds something else than
    the unfolded model; no failure leaves a file.
    """
    size = found.preprocessing.size
    found.model.eval()
    graph = DetectionGraph(found, inference.fold(found.model), **options).eval()
    exports.to_onnx(
        graph,
        example_images(2, size),
        path,
        input_names=["images"],
        output_names=list(OUTPUTS),
        metadata=found.describe() | {"detection": graph.detection.detect.settings()},
    )
    reference = DetectionGraph(found, found.model, **options).eval()
    compared, worst = 0, 0.0
    try:
        session = OnnxModel(path)
        for batch in batches:
            images = example_images(batch, size)
            with torch.no_grad():
                ours = Kept(*reference(images))
            values = session(images.numpy())
            theirs = Kept(*(torch.from_numpy(values[name]) for name in OUTPUTS))
            for name, one, other in zip(OUTPUTS, ours, theirs, strict=True):
                if one.shape != other.shape or one.dtype != other.dtype:
                    shapes = f"{other.dtype} {list(other.shape)}, the model gives {one.dtype} {list(one.shape)}"
                    raise exports.ParityError(f"{path}: output {name} at batch {batch}: {shapes}")
            count, gap = compare(ours, theirs, atol, reference.detection.detect.iou_threshold)
            compared, worst = compared + count, max(worst, gap)
    except BaseException:  # also a graph that onnxruntime refuses, and Ctrl-C: what is unchecked must not stay
        path.unlink(missing_ok=True)
        raise
    return compared, worst


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    found = pretrained.load(config.checkpoint, arch=config.arch)
    path = Path(config.output_dir) / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {key: getattr(config, key) for key in ("score_threshold", "iou_threshold", "max_detections")}
    compared, difference = export(found, path, tuple(config.batches), config.atol, **options)
    print(f"{path}: {found.arch}, {path.stat().st_size / 2**20:.1f} MiB")
    print(f"{compared} detections compared with onnxruntime's, largest difference {difference:.1e}")
    return {"path": str(path), "compared": compared, "difference": difference}


if __name__ == "__main__":
    main()
