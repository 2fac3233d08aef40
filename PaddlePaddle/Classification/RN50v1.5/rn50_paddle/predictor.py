"""`paddle.inference` around an exported model: oneDNN on CPUs, TensorRT where Paddle was built with it.

A folder of `export` holds model.json and model.pdiparams (`paddle.jit.save`) and classifier.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import inference

from dlx.files import atomic_path, atomic_write
from dlx.vision import Preprocessing

from .model import ResNet

DESCRIPTION = "classifier.json"
ENGINES = ("paddle", "onednn", "gpu", "tensorrt")


def save(model: ResNet, description: dict[str, Any], folder: Path) -> None:
    """Write a model for the predictor; pictures float32 (N, C, size, size), normalised, with a free N."""
    shape = Preprocessing.from_dict(description["preprocessing"])
    spec = paddle.static.InputSpec([None, shape.channels, shape.crop, shape.crop], "float32", "images")
    model.eval()
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        paddle.jit.save(paddle.jit.to_static(model, input_spec=[spec], full_graph=True), str(temporary / "model"))
        atomic_write(temporary / DESCRIPTION, json.dumps(description, indent=1) + "\n")


def engine_config(folder: Path, engine: str, batch: int = 1, precision: str = "fp32", threads: int = 0) -> Any:
    """The configuration of a predictor. `precision` fp32, fp16 or int8 is TensorRT's."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is none of {', '.join(ENGINES)}")
    program = next(
        (folder / f"model.{kind}" for kind in ("json", "pdmodel") if (folder / f"model.{kind}").is_file()), None
    )
    if program is None:
        raise ValueError(f"{folder}: holds no exported model (model.json)")
    config = inference.Config(str(program), str(folder / "model.pdiparams"))
    config.disable_glog_info()
    if engine in ("gpu", "tensorrt"):
        if not paddle.is_compiled_with_cuda():
            raise ValueError(f"engine {engine} needs a GPU build of Paddle; this one is for CPUs")
        config.enable_use_gpu(256, 0)
        if engine == "tensorrt":
            kinds = {"fp32": "Float32", "fp16": "Half", "int8": "Int8"}
            kind = getattr(inference.PrecisionType, kinds[precision])
            config.enable_tensorrt_engine(1 << 30, batch, 3, kind, False, precision == "int8")
        return config
    config.disable_gpu()
    if engine == "onednn":
        config.enable_mkldnn()
    if threads:
        config.set_cpu_math_library_num_threads(threads)
    return config


class Predictor:
    """Logits of normalised pictures: `predictor(float32 (N, C, H, W)) -> float32 (N, K)`."""

    def __init__(self, folder: str | Path, engine: str = "onednn", **options: Any):
        folder = Path(folder)
        try:
            content = json.loads((folder / DESCRIPTION).read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder}: not a folder of the verb export, {DESCRIPTION} is missing") from None
        self.classes, self.arch = content["classes"], content["arch"]
        self.preprocessing = Preprocessing.from_dict(content["preprocessing"])
        self.predictor = inference.create_predictor(engine_config(folder, engine, **options))
        self.input = self.predictor.get_input_handle(self.predictor.get_input_names()[0])
        self.output = self.predictor.get_output_handle(self.predictor.get_output_names()[0])

    def __call__(self, images: np.ndarray) -> np.ndarray:
        images = np.ascontiguousarray(images, np.float32)
        self.input.reshape(images.shape)
        self.input.copy_from_cpu(images)
        self.predictor.run()
        return self.output.copy_to_cpu()
