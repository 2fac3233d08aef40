"""Export a trained model to ONNX, checked in onnxruntime before it is used, or its weights to PyTorch's layout.

    ./dlx run rn50_mxnet export -- --checkpoint runs/quickstart --output_dir exported
    ./dlx run rn50_mxnet export -- --checkpoint runs/quickstart --format pytorch --output_dir exported

ONNX: input ``data``, float32 N C S S, normalised as the stored preprocessing says; output: logits, float32 N K.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mxnet as mx
import numpy as np
import onnx
import onnxruntime

from dlx import config as configs
from dlx.files import atomic_path

from . import checkpoint, convert
from .options import CHECKPOINT_HELP, CONFIGS


@dataclass
class ExportConfig:
    """Write the model for use without MXNet and prove that it computes the same."""

    checkpoint: str = configs.field(help=CHECKPOINT_HELP)
    arch: str | None = configs.field(None, help="of a bare weights file")
    format: Literal["onnx", "pytorch"] = configs.field("onnx", help="a graph, or weights for ConvNets")
    batch: int | None = configs.field(None, help="a fixed batch size; any by default", ge=1)
    atol: float = configs.field(1e-4, help="largest difference allowed, relative to the largest logit", gt=0)
    output_dir: str = configs.field("exported", help="where the files go")


def to_onnx(found: checkpoint.Classifier, path: Path, batch: int | None = None, atol: float = 1e-4) -> float:
    """Write ``path`` for a fixed ``batch``, or with None for any; the difference relative to the largest logit.

    ValueError where onnxruntime disagrees; then no file is left.
    """
    shape = found.preprocessing
    size = (shape.channels, shape.crop, shape.crop)
    network = found.rebuild()
    network.hybridize()
    network(mx.nd.zeros((1, *size)))
    with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
        stem = Path(folder) / "model"
        network.export(str(stem))
        mx.onnx.export_model(
            f"{stem}-symbol.json", f"{stem}-0000.params", [(batch or 1, *size)], np.float32, str(temporary),
            dynamic=batch is None, dynamic_input_shapes=[("batch", *size)] if batch is None else None,
        )  # fmt: skip
        model = onnx.load(str(temporary))
        # MXNet lists the weights among the inputs, which keeps onnxruntime from folding them into anything.
        weights = {value.name for value in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in weights]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in found.describe().items()}
        onnx.helper.set_model_props(model, values)
        onnx.checker.check_model(model)
        onnx.save(model, str(temporary))
        return max(compare(found, temporary, count, atol) for count in ([batch] if batch else [1, 3]))


def compare(found: checkpoint.Classifier, path: Path, batch: int, atol: float) -> float:
    """The largest difference of the logits between ``path`` in onnxruntime and MXNet, relative to the largest logit."""
    shape = found.preprocessing
    images = np.random.default_rng(batch).standard_normal((batch, shape.channels, shape.crop, shape.crop))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {session.get_inputs()[0].name: images.astype(np.float32)})
    ours = found.network(mx.nd.array(images)).asnumpy()
    if ours.shape != theirs.shape:
        raise ValueError(f"{path}: gives {theirs.shape} at batch {batch}, the model {ours.shape}")
    difference = float(np.abs(ours - theirs).max() / max(1.0, np.abs(ours).max()))
    if not difference <= atol:
        raise ValueError(f"{path}: differs by {difference:.3g} of the largest logit at batch {batch} (atol {atol:g})")
    return difference


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ExportConfig, args, configs_dir=CONFIGS, prog="export")
    found = checkpoint.load(config.checkpoint, config.arch)
    if config.format == "pytorch":
        path = convert.to_pytorch(found, config.output_dir)
        print(f"{path}: weights of {convert.CONVNETS[found.arch]} in PyTorch's layout")
        return {"path": str(path)}
    path = Path(config.output_dir) / "model.onnx"
    difference = to_onnx(found, path, config.batch, config.atol)
    print(f"{path}: {found.arch}, {path.stat().st_size / 2**20:.1f} MiB, largest relative difference {difference:.1e}")
    return {"path": str(path), "difference": difference}


if __name__ == "__main__":
    main()
