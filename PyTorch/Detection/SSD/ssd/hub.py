"""torch.hub entries: the names and calls that users of NVIDIA's hub know, on CPU or GPU.

model = torch.hub.load(REPOSITORY, "nvidia_ssd", source="local", checkpoint="runs/ssd_quickstart")
utils = torch.hub.load(REPOSITORY, "nvidia_ssd_processing_utils", source="local")
pictures = ["street.jpg"]
tensor = utils.prepare_tensor([utils.prepare_input(picture) for picture in pictures])
for result in utils.decode_results(model(tensor)):
    boxes, classes, confidences = utils.pick_best(result, 0.4)
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlx import fetch, paths, weights
from dlx.vision import decode_image

from . import pretrained as loading
from . import registry
from .anchors import default_boxes
from .detect import Detect, unpad
from .model import SSD
from .preprocessing import Preprocessing

NGC = "https://api.ngc.nvidia.com/v2/models/nvidia/ssd_pyt_ckpt_amp/versions/20.06.0/files/nvidia_ssdpyt_amp_200703.pt"
ARCH = "ssd300_resnet50"
MATH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Result = tuple[np.ndarray, np.ndarray, np.ndarray]


def _to_model(model: SSD, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Images go where the model is, in its precision: known snippets move the one or the other."""
    weight = next(model.parameters())
    return (inputs[0].to(weight.device, weight.dtype), *inputs[1:])


def published_file(force_reload: bool = False) -> Path:
    """NVIDIA's file in the cache, fetched once; see `dlx.weights.first_download` for what stands in for its hash."""
    return weights.first_download(NGC, paths.weight_dir() / "nvidia" / NGC.rpartition("/")[2], force=force_reload)


def _finish(found: loading.Detector, device: str | torch.device, model_math: str) -> SSD:
    """The detector's model as users call it; everything else that it needs becomes its attributes."""
    if model_math not in MATH:
        raise ValueError(f"model_math {model_math!r} is none of {', '.join(MATH)}")
    model = found.model
    model.preprocessing, model.classes, model.category_ids = found.preprocessing, found.classes, found.category_ids
    model.register_forward_pre_hook(_to_model)
    return model.to(device, MATH[model_math])


def nvidia_ssd(
    pretrained=True, model_math="fp32", force_reload=False, checkpoint=None, device="cpu", num_classes=80, arch=ARCH
):
    """SSD300 with a ResNet-50 backbone (22.9 M parameters, 300 pixels): NVIDIA's COCO weights, or your own.

    ``checkpoint``: a run's folder, a checkpoint, a weights file (ours or NVIDIA's) or a published name. Otherwise
    ``pretrained=True`` fetches NVIDIA's file once, and ``pretrained=False`` gives fresh weights for ``num_classes`` in
    training mode, without network or files. ``device``: where to, the CPU by default whatever the weights come from.
    Images N 3 300 300 -> (offsets N 8732 4, logits N 8732 classes + 1); ``nvidia_ssd_processing_utils`` reads them.
    """
    if checkpoint is None and not pretrained:
        classes, category_ids = loading.name_classes(num_classes)
        model = registry.build(arch, num_classes)
        found = loading.Detector(model, arch, classes, category_ids, Preprocessing(), "fresh weights")
        return _finish(found, device, model_math)
    if num_classes != 80:
        raise ValueError(f"num_classes={num_classes} is for pretrained=False; the file of weights decides")
    path = published_file(force_reload) if checkpoint is None else checkpoint
    bare = Path(path).is_file()
    return _finish(loading.load(path, arch=arch if bare else None), device, model_math)


def ssd300(checkpoint, device="cpu", arch=None):
    """A detector trained with this repository: a run's folder, a checkpoint, a published name, or a file and ``arch``.

    ``model.classes`` names its labels, ``model.category_ids`` are those of its data, ``model.preprocessing`` its input.
    """
    return _finish(loading.load(checkpoint, arch=arch), device, "fp32")


class ProcessingUtils:
    """Pictures in, detections out, with the calls of NVIDIA's hub; on the CPU or wherever ``device`` says."""

    def __init__(self, detector: SSD | None = None, crop: str = "whole"):
        given = detector.preprocessing if detector is not None else Preprocessing()
        self.preprocessing = Preprocessing.from_dict(given.to_dict() | {"crop": crop})
        self.classes = list(detector.classes) if detector is not None else loading.name_classes(80)[0]
        self.detect: dict[int, Detect] = {}

    def prepare_input(self, source: Any) -> np.ndarray:
        """float32 (300, 300, 3), normalised, from a path, an http(s) address, bytes, a PIL image or an array."""
        return self.preprocessing(self._picture(source)).permute(1, 2, 0).numpy()

    def prepare_tensor(
        self, inputs: np.ndarray | Sequence[np.ndarray], fp16: bool = False, device: str | torch.device = "cpu"
    ) -> Tensor:
        """A batch N 3 300 300 of what ``prepare_input`` gave, once or a list of it."""
        arrays = [inputs] if isinstance(inputs, np.ndarray) and inputs.ndim == 3 else list(inputs)
        size = self.preprocessing.size
        for index, array in enumerate(arrays):
            if np.shape(array) != (size, size, 3):
                raise ValueError(f"input {index} has shape {np.shape(array)}, expected {(size, size, 3)}")
        batch = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
        return batch.to(device, torch.float16 if fp16 else torch.float32)

    def decode_results(self, predictions: tuple[Tensor, Tensor]) -> list[Result]:
        """For each image (boxes k 4 as corners in shares of the input, labels k from 1 on, confidences k), best first.

        ``predictions``: offsets N A 4 and logits N A C+1, as the model gives them.
        """
        offsets, logits = (tensor.detach() for tensor in predictions)
        count = offsets.shape[1]
        if count not in self.detect:
            self.detect[count] = Detect(self._anchors(count))
        found = unpad(self.detect[count].to(offsets.device)(offsets, logits))
        return [(one["boxes"], one["labels"], one["scores"]) for one in found]

    def pick_best(self, detections: Result, threshold: float = 0.3) -> list[np.ndarray]:
        """Boxes, labels and confidences of the detections whose confidence is above ``threshold``."""
        boxes, labels, confidences = detections
        sure = np.flatnonzero(np.asarray(confidences) > threshold)
        return [np.asarray(array)[sure] for array in (boxes, labels, confidences)]

    def to_pixels(self, boxes: np.ndarray, source: Any) -> np.ndarray:
        """Boxes of ``decode_results`` as corners in pixels of the picture that ``prepare_input`` was given."""
        return self.preprocessing.frame(self._picture(source).size).to_pixels(boxes)

    def get_coco_object_dictionary(self) -> list[str]:
        """Names of the classes; that of label i is at i - 1. They are part of the package: nothing is downloaded."""
        return list(self.classes)

    def _anchors(self, count: int) -> Tensor:
        anchors = default_boxes(self.preprocessing.size)
        if len(anchors) != count:
            size = self.preprocessing.size
            raise ValueError(f"predictions of {count} default boxes; an input of {size} pixels has {len(anchors)}")
        return anchors

    @staticmethod
    def _picture(source: Any) -> Any:
        if isinstance(source, str) and re.match(r"https?://", source):
            with tempfile.TemporaryDirectory() as folder:
                source = fetch.download([source], Path(folder) / "picture", sha256="").read_bytes()
        return decode_image(source)


def nvidia_ssd_processing_utils(detector=None, crop="whole"):
    """An object with prepare_input, prepare_tensor, decode_results, pick_best and get_coco_object_dictionary.

    ``detector``, a model of one of the entries, decides on classes and input size; by default they are COCO's and 300.
    The whole picture is used; ``crop="centre"`` takes its middle square as NVIDIA's helper did. ``to_pixels`` maps
    boxes back.
    """
    return ProcessingUtils(detector, crop)
