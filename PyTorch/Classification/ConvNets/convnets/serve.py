"""Write a Triton model repository: the exported graph, and a configuration generated from that graph.

./dlx run ConvNets serve -- --checkpoint runs/quickstart --output_dir model_repository
tritonserver --model-repository model_repository
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlx import config as configs
from dlx import serve

from . import pretrained
from .export import export
from .options import CONFIGS


@dataclass
class ServeConfig:
    """Export a classifier and lay it out for Triton."""

    checkpoint: str = configs.field(
        help="a run's folder, a checkpoint, a weights file, or a name of `./dlx weights list`"
    )
    arch: str | None = configs.field(None, help="needed for a bare weights file only")
    name: str | None = configs.field(None, help="the model's name in the repository; its architecture by default")
    max_batch_size: int = configs.field(64, help="largest batch the server may form", ge=1)
    instance_kind: Literal["auto", "cpu", "gpu"] = configs.field("auto", help="where the server runs it")
    output_dir: str = configs.field("model_repository", help="the repository")


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(ServeConfig, args, configs_dir=CONFIGS, prog="serve")
    found = pretrained.load(config.checkpoint, arch=config.arch)
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    graph = output / f".{found.arch}.onnx"
    try:
        export(found, graph)
        folder = serve.model_repository(
            graph,
            output,
            config.name or found.arch,
            max_batch_size=config.max_batch_size,
            labels=found.classes,
            instance_kind=config.instance_kind,
        )
    finally:
        graph.unlink(missing_ok=True)
    print(f"{folder}: ready for `tritonserver --model-repository {output}`")
    return {"folder": str(folder)}


if __name__ == "__main__":
    main()
