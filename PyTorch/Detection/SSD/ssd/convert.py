"""From the published state-dict layouts to this package's: NVIDIA's SSD300, and ResNet classifiers for the backbone.

NVIDIA's heads are two convolutions per map, ``loc`` and ``conf``, whose channels count the boxes of a cell fastest
(channel ``value * boxes + box``). Here one convolution holds both and a box's values are neighbours (``box * values +
value``), so heads are interleaved and everything else is renamed. The model's outputs are the same numbers, box by box;
only the list of default boxes is in another order (there the box of a cell is counted before row and column).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from dlx.weights import strip_prefixes

from .anchors import PER_CELL
from .model import SSD

PREFIXES = ("module.", "1.", "_orig_mod.")  # NVIDIA's published file has "module.1." in front
RENAMES = (
    (r"^feature_extractor\.feature_extractor\.0\.", "backbone.conv1."),
    (r"^feature_extractor\.feature_extractor\.1\.", "backbone.bn1."),
    (r"^feature_extractor\.feature_extractor\.4\.", "backbone.layer1."),
    (r"^feature_extractor\.feature_extractor\.5\.", "backbone.layer2."),
    (r"^feature_extractor\.feature_extractor\.6\.", "backbone.layer3."),
    (r"^additional_blocks\.(\d)\.0\.", r"extra.\1.conv1."),
    (r"^additional_blocks\.(\d)\.1\.", r"extra.\1.bn1."),
    (r"^additional_blocks\.(\d)\.3\.", r"extra.\1.conv2."),
    (r"^additional_blocks\.(\d)\.4\.", r"extra.\1.bn2."),
)


def _merge_heads(offsets: Tensor, scores: Tensor, boxes: int) -> Tensor:
    """Two tensors (values * boxes, ...) as one (boxes * all values, ...)."""
    parts = [tensor.unflatten(0, (-1, boxes)) for tensor in (offsets, scores)]
    return torch.cat(parts).transpose(0, 1).flatten(0, 1)


def to_canonical(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model under this package's names. Unknown keys stay, for the strict load to report."""
    converted: dict[str, Tensor] = {}
    state_dict = strip_prefixes(state_dict, PREFIXES)
    for name, value in state_dict.items():
        head = re.match(r"(loc|conf)\.(\d)\.(weight|bias)$", name)
        partner = {"loc": "conf", "conf": "loc"}[head[1]] + name[len(head[1]) :] if head else None
        if not head or int(head[2]) >= len(PER_CELL) or partner not in state_dict:
            for pattern, replacement in RENAMES:
                name = re.sub(pattern, replacement, name)
            converted[name] = value
        elif head[1] == "loc":
            merged = _merge_heads(value, state_dict[partner], PER_CELL[int(head[2])])
            converted[f"heads.{head[2]}.{head[3]}"] = merged
    return converted


def _mobilenet_name(name: str) -> str:
    """torchvision's name of a tensor of MobileNetV2 in `mobilenet.MobileNetBackbone`."""
    part = re.match(r"features\.(\d+)\.(?:conv\.)?([\d.]+)\.(\w+)$", name)
    if part is None:
        return name
    layer, place, tensor = int(part[1]), part[2], part[3]
    if layer == 0:
        return f"{ {'0': 'stem', '1': 'bn0'}[place] }.{tensor}"
    if layer == 18:
        return f"{ {'0': 'last', '1': 'bn_last'}[place] }.{tensor}"
    places = {"0.0": "widen", "0.1": "bn1", "1.0": "filter", "1.1": "bn2", "2": "narrow", "3": "bn3"}
    if layer == 1:  # it does not widen
        places = {"0.0": "filter", "0.1": "bn2", "1": "narrow", "2": "bn3"}
    return f"blocks.{layer - 1}.{places[place]}.{tensor}"


def backbone_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a backbone takes of a classifier: a ResNet in torchvision's or NVIDIA's layout (``layers.0`` is ``layer1``),
    or torchvision's MobileNetV2."""
    if "features.0.0.weight" in state_dict:
        kept = {name: value for name, value in state_dict.items() if not name.startswith("classifier.")}
        return {_mobilenet_name(name): value for name, value in kept.items()}
    renamed = {
        re.sub(r"^layers\.(\d)\.", lambda match: f"layer{int(match[1]) + 1}.", name): value
        for name, value in strip_prefixes(state_dict, PREFIXES).items()
    }
    return {name: value for name, value in renamed.items() if not name.startswith(("layer4.", "fc."))}


def transfer(model: SSD, state_dict: Mapping[str, Tensor]) -> None:
    """Start from a detector of other classes: everything but its class scores is copied into ``model``.

    Raises ValueError when another architecture's tensors are given.
    """
    given = to_canonical(state_dict)
    rest = {name: value for name, value in model.state_dict().items() if not name.startswith("heads.")}
    wrong = [name for name, value in rest.items() if name not in given or given[name].shape != value.shape]
    wrong = [name for name in wrong if not name.endswith("num_batches_tracked")]
    if wrong:
        raise ValueError(f"the weights are of another architecture: {len(wrong)} tensors do not fit, first {wrong[0]}")
    model.load_state_dict({name: given[name] for name in rest if name in given}, strict=False)
    for index, head in enumerate(model.heads):
        for kind in ("weight", "bias"):
            theirs = given[f"heads.{index}.{kind}"].unflatten(0, (head.boxes, -1))
            head.parts(getattr(head, kind).detach())[0].copy_(theirs[:, :4])
