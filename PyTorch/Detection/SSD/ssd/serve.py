"""Write a Triton model repository: the exported graph, and a configuration generated from that graph.

./dlx run SSD serve -- --checkpoint runs/ssd_quickstart --output_dir model_repository
tritonserver --model-repository model_repository

A client sends uint8 RGB pictures scaled to S x S and receives boxes, scores, labels and count; see ``export``.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlx import config as configs
from dlx import serve
from dlx.files import atomic_write

from . import pretrained
from .export import export
from .options import CONFIGS


@dataclass
class ServeConfig:
    """Export a detector and lay it out for Triton."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    name: str | None = configs.field(None, help="the model's name in the repository; its architecture by default")
    score_threshold: float = configs.field(0.05, help="detections below are not given back", ge=0, lt=1)
    max_batch_size: int = configs.field(64, help="largest batch the server may form", ge=1)
    instance_kind: Literal["auto", "cpu", "gpu"] = configs.field("auto", help="where the server runs it")
    output_dir: str = configs.field("model_repository", help="the repository")


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ServeConfig, args, configs_dir=CONFIGS, prog="serve")
    found = pretrained.load(config.checkpoint, arch=config.arch)
    output = Path(config.output_dir)
    with tempfile.TemporaryDirectory() as scratch:
        graph = Path(scratch) / "model.onnx"
        export(found, graph, score_threshold=config.score_threshold)
        folder = serve.model_repository(
            graph,
            output,
            config.name or found.arch,
            max_batch_size=config.max_batch_size,
            instance_kind=config.instance_kind,
        )
    # Not Triton's own kind of label file: no output is as long as the list of classes.
    atomic_write(folder / "classes.txt", "".join(f"{name}\n" for name in found.classes))
    print(f"{folder}: ready for `tritonserver --model-repository {output}`")
    return {"folder": str(folder)}


if __name__ == "__main__":
    main()
