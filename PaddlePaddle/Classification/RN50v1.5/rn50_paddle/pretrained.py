"""Classifiers from checkpoints and weights files: the model, its classes and how it wants its pictures."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dlx.vision import Preprocessing

from . import checkpoint, convert
from .model import ResNet, architecture, build


@dataclass
class Classifier:
    """A model in evaluation mode and what belongs to it."""

    model: ResNet
    arch: str
    classes: list[str]
    preprocessing: Preprocessing
    source: str

    def describe(self) -> dict[str, Any]:
        return describe(self.arch, self.classes, self.preprocessing, self.model.data_format)


def describe(arch: str, classes: list[str], preprocessing: Preprocessing, data_format: str) -> dict[str, Any]:
    """What a checkpoint says of its model."""
    return {"arch": arch, "classes": classes, "preprocessing": preprocessing.to_dict(), "data_format": data_format}


def default_resize(size: int) -> int:
    """Short side before the evaluation crop."""
    return size + 32 if size >= 64 else size


def normalise(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (N, C, H, W) -> float32, normalised."""
    shape = [1, preprocessing.channels, 1, 1]
    mean = paddle.to_tensor(preprocessing.mean, "float32").reshape(shape) * 255
    std = paddle.to_tensor(preprocessing.std, "float32").reshape(shape) * 255
    return (images.astype("float32") - mean) / std


def normalised_array(pictures: list[Any], preprocessing: Preprocessing) -> np.ndarray:
    """float32 (N, C, crop, crop) of pictures (paths, bytes, PIL images or arrays), without Paddle."""
    arrays = [np.asarray(preprocessing.crop_image(picture), np.float32) for picture in pictures]
    batch = np.stack([array.reshape(*array.shape[:2], preprocessing.channels) for array in arrays])
    mean, std = (np.asarray(values, np.float32) * 255 for values in (preprocessing.mean, preprocessing.std))
    return np.ascontiguousarray(((batch - mean) / std).transpose(0, 3, 1, 2))


def read_weights(source: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a run, a checkpoint, a .safetensors, .npz or .pdparams file."""
    path = Path(source)
    if path.is_dir():
        return checkpoint.load(checkpoint.find(path)).model
    if not path.is_file():
        raise ValueError(f"{source}: no such run, checkpoint or weights file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as content:
                return {key: content[key] for key in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, SafetensorError) as error:
        raise ValueError(f"{source}: damaged, or not a {path.suffix} file: {error}") from None
    if path.suffix == ".pdparams":
        return convert.read_pdparams(path)
    raise ValueError(f"{source}: weights are .safetensors, .npz or .pdparams files")


def start_from(model: ResNet, arch: str, source: str) -> None:
    """Set a model's weights from elsewhere. A head for another number of classes is left as it is."""
    own = convert.arrays_of(model)
    shapes = {key: tuple(value.shape) for key, value in own.items()}
    weights = convert.to_canonical(read_weights(source), arch, shapes)
    if "fc.weight" in weights and weights["fc.weight"].shape != own["fc.weight"].shape:
        weights |= {key: own[key] for key in ("fc.weight", "fc.bias")}
        print(f"{source}: its head is for another number of classes; the new one starts fresh")
    convert.load_into(model, weights, source)


def load(source: str | Path, arch: str | None = None) -> Classifier:
    """A classifier of a run, a checkpoint, or (with `arch`) a bare weights file of an ImageNet-like model."""
    path = Path(source)
    if path.is_dir():
        loaded = checkpoint.load(checkpoint.find(path))
        described = loaded.meta["model"]
        arch, classes = described["arch"], described["classes"]
        preprocessing = Preprocessing.from_dict(described["preprocessing"])
        weights, data_format, name = loaded.model, described["data_format"], str(loaded.path)
    else:
        if not path.is_file():
            raise ValueError(f"{source}: no such run, checkpoint or weights file")
        if arch is None:
            raise ValueError(f"{source}: say with --arch what these weights are for")
        arrays = read_weights(path)
        shapes = {key: tuple(v.shape) for key, v in build(arch).state_dict().items() if not key.startswith("fc.")}
        weights = convert.to_canonical(arrays, arch, shapes | _head_shapes(arrays))
        needed = [key for key in ("conv1.weight", "fc.weight", "fc.bias") if key not in weights]
        if needed:
            raise ValueError(f"{source}: not the weights of a whole {arch}: missing {', '.join(needed)}")
        classes = [f"class_{number}" for number in range(len(weights["fc.bias"]))]
        channels, size = weights["conv1.weight"].shape[1], architecture(arch).image_size
        statistics = {} if channels == 3 else {"mean": (0.5,), "std": (0.5,)}
        preprocessing = Preprocessing(default_resize(size), size, channels=channels, **statistics)
        data_format, name = "NCHW", str(path)
    model = build(arch, len(classes), in_channels=preprocessing.channels, data_format=data_format)
    convert.load_into(model, weights, name)
    model.eval()
    return Classifier(model, arch, classes, preprocessing, name)


def _head_shapes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """The linear layer's shapes under this package's names, for files that are numbered."""
    found = {}
    for key, value in arrays.items():
        if key.startswith("linear_") and key.endswith((".w_0", ".b_0")):
            found["fc.weight" if key.endswith("w_0") else "fc.bias"] = tuple(value.shape)
    return found
