"""torch.hub entries: the names and calls that users of NVIDIA's hub know, and models with weights that can be had.

Every model has ``preprocessing`` (from a picture to an input) and ``classes``. The nvidia_ entries take ``pretrained``,
``pretrained_from_file`` (a file of NVIDIA's, torchvision's or our own), ``state_dict_key_map_fn`` (renames keys before
ours do) and model parameters such as ``num_classes``. Models are on the CPU whatever device their weights were saved
from.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlx import fetch, paths, vision, weights
from dlx.files import atomic_write, sha256

from . import pretrained as loading
from . import registry
from .folder import imagenet_labels

NGC = "https://api.ngc.nvidia.com/v2/models/nvidia/{model}/versions/{version}/files/{file}"
# Where NVIDIA published its weights. Their hashes are not published: see _nvidia_file.
NVIDIA = {
    "resnet50": ("resnet50_pyt_amp", "20.06.0", "nvidia_resnet50_200821.pth.tar"),
    "resnext101_32x4d": ("resnext101_32x4d_pyt_amp", "20.06.0", "nvidia_resnext101-32x4d_200821.pth.tar"),
    "se_resnext101_32x4d": ("seresnext101_32x4d_pyt_amp", "20.06.0", "nvidia_se-resnext101-32x4d_200821.pth.tar"),
    "efficientnet_b0": ("efficientnet_b0_pyt_amp", "20.12.0", "nvidia-efficientnet-b0_210412.pth"),
    "efficientnet_b4": ("efficientnet_b4_pyt_amp", "20.12.0", "nvidia-efficientnet-b4_210412.pth"),
    "efficientnet_widese_b0": ("efficientnet_widese_b0_pyt_amp", "20.12.0", "nvidia-efficientnet-widese-b0_210412.pth"),
    "efficientnet_widese_b4": ("efficientnet_widese_b4_pyt_amp", "20.12.0", "nvidia-efficientnet-widese-b4_210412.pth"),
}


def _nvidia_file(arch: str) -> Path:
    """NVIDIA's file in the cache, fetched once.

    No hash of these files is published, so the first download (or a file put in its place) is trusted and its hash
    kept beside it: a later change or damage is noticed. They are read without unpickling objects, and every tensor
    must fit.
    """
    if arch not in NVIDIA:
        raise ValueError(f"NVIDIA published no weights of {arch}; there are {', '.join(NVIDIA)}")
    model, version, name = NVIDIA[arch]
    path = paths.weight_dir() / "nvidia" / name
    note = path.with_name(path.name + ".sha256")
    if path.is_file() and note.is_file() and sha256(path) == note.read_text().strip():
        return path
    if path.is_file() and not note.is_file():  # put there by hand
        atomic_write(note, sha256(path) + "\n")
        return path
    url = NGC.format(model=model, version=version, file=name)
    warnings.warn(f"{url}: its publisher gives no hash; the first download is trusted", stacklevel=3)
    expected = note.read_text().strip() if note.is_file() else ""
    try:
        fetch.download([url], path, sha256=expected)
    except fetch.FetchError as error:
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # if empty
        advice = f"put the file there yourself, or pass pretrained_from_file=PATH/{name}"
        raise type(error)(f"{error}\n  {advice}") from error
    atomic_write(note, sha256(path) + "\n")
    return path


def _check_options(entry: str, arch: str, parameters: dict[str, Any]) -> None:
    """TypeError that names the entry and what it takes, if a parameter is not of this architecture."""
    taken = [*inspect.signature(registry.architecture(arch).family).parameters][1:]
    for name in parameters:
        if name not in taken:
            near = difflib.get_close_matches(name, taken, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            common = [key for key in inspect.signature(globals()[entry]).parameters if key != "model_params"]
            raise TypeError(f"{entry}() has no option {name!r}; {hint}It takes {', '.join([*common, *taken])}")


def _describe(model: nn.Module, arch: str, num_classes: int, parameters: dict[str, Any]) -> nn.Module:
    """Give the model ``preprocessing`` and ``classes`` as one from a file of ours has them."""
    model.preprocessing = loading.default_preprocessing(arch, channels=parameters.get("in_channels", 3))
    names = imagenet_labels()
    model.classes = names if num_classes == len(names) else [f"class_{index}" for index in range(num_classes)]
    return model


def _model(
    entry: str,
    arch: str,
    pretrained: bool,
    pretrained_from_file: str | None,
    state_dict_key_map_fn: Callable[[str], str] | None,
    parameters: dict[str, Any],
) -> nn.Module:
    """A model in training mode with fresh, NVIDIA's or the given file's weights."""
    parameters = dict(parameters)
    parameters.pop("trt", None)  # chose a form of squeeze-and-excitation for TensorRT; one form serves both today
    _check_options(entry, arch, parameters)
    num_classes = parameters.pop("num_classes", 1000)
    model = _describe(registry.build(arch, num_classes, **parameters), arch, num_classes, parameters)
    if pretrained_from_file is None and not pretrained:
        return model
    path = pretrained_from_file if pretrained_from_file is not None else _nvidia_file(arch)
    state_dict = weights.load_state_dict(path)
    if state_dict_key_map_fn is not None:
        state_dict = {state_dict_key_map_fn(key): value for key, value in state_dict.items()}
    loading.load_published(model, state_dict, arch)
    return model


def nvidia_resnet50(pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params):
    """ResNet-50 v1.5 (25.6 M parameters, 224 pixels)."""
    return _model("nvidia_resnet50", "resnet50", pretrained, pretrained_from_file, state_dict_key_map_fn, model_params)


def nvidia_resnext101_32x4d(pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params):
    """ResNeXt-101 32x4d (44.2 M parameters, 224 pixels)."""
    return _model(
        "nvidia_resnext101_32x4d",
        "resnext101_32x4d",
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def nvidia_resneXt(pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params):
    """The same as nvidia_resnext101_32x4d, under its older name."""
    return _model(
        "nvidia_resneXt", "resnext101_32x4d", pretrained, pretrained_from_file, state_dict_key_map_fn, model_params
    )


def nvidia_se_resnext101_32x4d(pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params):
    """SE-ResNeXt-101 32x4d (49.0 M parameters, 224 pixels)."""
    return _model(
        "nvidia_se_resnext101_32x4d",
        "se_resnext101_32x4d",
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def nvidia_efficientnet_b0(pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params):
    """EfficientNet-b0 (5.3 M parameters, 224 pixels)."""
    return _model(
        "nvidia_efficientnet_b0",
        "efficientnet_b0",
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def nvidia_efficientnet_b4(pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params):
    """EfficientNet-b4 (19.3 M parameters, 380 pixels)."""
    return _model(
        "nvidia_efficientnet_b4",
        "efficientnet_b4",
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def nvidia_efficientnet_widese_b0(
    pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params
):
    """EfficientNet-b0 with wider squeeze-and-excitation (8.4 M parameters, 224 pixels)."""
    return _model(
        "nvidia_efficientnet_widese_b0",
        "efficientnet_widese_b0",
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def nvidia_efficientnet_widese_b4(
    pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params
):
    """EfficientNet-b4 with wider squeeze-and-excitation (34.9 M parameters, 380 pixels)."""
    return _model(
        "nvidia_efficientnet_widese_b4",
        "efficientnet_widese_b4",
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def nvidia_efficientnet(
    type="efficientnet-b0", pretrained=True, pretrained_from_file=None, state_dict_key_map_fn=None, **model_params
):
    """Any EfficientNet by NVIDIA's name for it: efficientnet-b0 ... -b7, efficientnet-widese-b0, -widese-b4."""
    return _model(
        "nvidia_efficientnet",
        type.replace("-", "_"),
        pretrained,
        pretrained_from_file,
        state_dict_key_map_fn,
        model_params,
    )


def _from_card(entry: str, name: str, pretrained: bool, parameters: dict[str, Any]) -> nn.Module:
    raw = weights.card(name).raw
    arch = raw["arch"]
    _check_options(entry, arch, parameters)
    if pretrained:
        if parameters:
            raise ValueError(f"{entry}: {', '.join(parameters)} not with pretrained=True, whose file decides")
        return convnet(name)
    published = vision.Preprocessing.from_dict(raw["preprocessing"])
    classes = raw.get("class_names") or imagenet_labels()
    parameters = {"num_classes": len(classes), "in_channels": published.channels} | parameters
    num_classes = parameters.pop("num_classes")
    model = _describe(registry.build(arch, num_classes, **parameters), arch, num_classes, parameters)
    if parameters["in_channels"] == published.channels:
        model.preprocessing = published
    if num_classes == len(classes):
        model.classes = classes
    return model


def mobilenet_v2(pretrained=True, **model_params):
    """MobileNetV2 (3.5 M parameters, 224 pixels) with torchvision's ImageNet weights.

    ``model.preprocessing(picture)`` makes an input, ``model.classes`` names the outputs.
    """
    return _from_card("mobilenet_v2", "mobilenet_v2.imagenet", pretrained, model_params)


def efficientnet_lite0(pretrained=True, **model_params):
    """EfficientNet-Lite0 (4.7 M parameters, 224 pixels) with Google's ImageNet weights.

    ``model.preprocessing(picture)`` makes an input, ``model.classes`` names the outputs.
    """
    return _from_card("efficientnet_lite0", "efficientnet_lite0.imagenet", pretrained, model_params)


def fashion_mnist_resnet14(pretrained=True, **model_params):
    """Our Fashion-MNIST classifier: ResNet-14 for 28-pixel grey pictures, weights in this repository.

    ``model.preprocessing(picture)`` makes an input, ``model.classes`` names the outputs.
    """
    return _from_card("fashion_mnist_resnet14", "resnet14_small.fashion_mnist", pretrained, model_params)


def convnet(source, arch=None, pretrained=True):
    """A classifier trained with this repository: a run's folder, a checkpoint or a weights file (with ``arch``).

    ``pretrained=False`` gives the same architecture, classes and preprocessing with fresh weights, in training mode.
    """
    found = loading.load(source, arch=arch)
    if not pretrained:
        found.model = loading.build_from(found.describe())
    found.model.preprocessing, found.model.classes = found.preprocessing, found.classes
    return found.model


class ProcessingUtils:
    """Input preparation and result printing with the calls of NVIDIA's hub."""

    def __init__(self, preprocessing: vision.Preprocessing | None = None, classes: list[str] | None = None):
        self.preprocessing = preprocessing or vision.Preprocessing()
        self.classes = classes

    def prepare_input_from_uri(self, uri: str, cuda: bool = False) -> Tensor:
        """A picture from a path or an http(s) address as a batch 1 3 224 224. ``cuda`` moves it to the GPU."""
        source: Any = uri
        if re.match(r"https?://", str(uri)):
            with tempfile.TemporaryDirectory() as folder:
                source = fetch.download([uri], Path(folder) / "picture", sha256="").read_bytes()
        batch = self.preprocessing(source)[None]
        if cuda and not torch.cuda.is_available():
            raise ValueError("cuda=True, but there is no GPU here")
        return batch.cuda() if cuda else batch

    def pick_n_best(self, predictions: Tensor, n: int = 5) -> list[list[tuple[str, str]]]:
        """For each row of *probabilities* the ``n`` best as (class, "12.3%"); also printed."""
        if predictions.dim() != 2:
            raise ValueError(f"predictions must be N x classes, got shape {tuple(predictions.shape)}")
        classes = self.get_imgnet_classes()
        if predictions.shape[1] != len(classes):
            raise ValueError(f"{predictions.shape[1]} probabilities, {len(classes)} class names")
        top = predictions.float().topk(min(n, predictions.shape[1]), dim=1)
        results = []
        for index, (values, places) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
            row = [(classes[place], f"{100 * value:.1f}%") for value, place in zip(values, places, strict=True)]
            results.append(row)
            print(f"sample {index}: {json.dumps(row, ensure_ascii=False)}")
        return results

    def get_imgnet_classes(self) -> list[str]:
        """The 1000 class names, from this repository (nothing is downloaded)."""
        return self.classes or imagenet_labels()


def nvidia_convnets_processing_utils(preprocessing=None, classes=None):
    """An object with prepare_input_from_uri, pick_n_best and get_imgnet_classes."""
    return ProcessingUtils(preprocessing, classes)
