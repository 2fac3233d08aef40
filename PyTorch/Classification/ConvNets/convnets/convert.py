"""From the published state-dict layouts to this package's: NVIDIA, torchvision, timm, efficientnet-pytorch.

``to_canonical(state_dict, arch)`` recognises the layout by its keys. Wrapper prefixes (``module.``, ``_orig_mod.``)
are taken off the front of a key only. Squeeze-and-excitation weights published as 1x1 convolutions become the linear
layers they equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from dlx.weights import strip_prefixes

from .efficientnet import STAGES, EfficientNet
from .registry import architecture
from .resnet import ResNet

Rename = Callable[[str], str]


def _rules(*pairs: tuple[str, str]) -> Rename:
    """Apply the first rule whose pattern matches at the start of the key."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in pairs]

    def rename(key: str) -> str:
        for pattern, replacement in compiled:
            if pattern.match(key):
                return pattern.sub(replacement, key, count=1)
        return key

    return rename


def _resnet(key: str) -> str:
    """NVIDIA ``layers.0.1.squeeze.expand`` and timm ``layer1.1.se.fc2`` -> ``layer1.1.se.expand``."""
    key = re.sub(r"^layers\.(\d)\.", lambda match: f"layer{int(match[1]) + 1}.", key)
    key = re.sub(r"^(layer\d\.\d+)\.squeeze\.", r"\1.se.", key)
    key = key.replace(".se.fc1.", ".se.squeeze.").replace(".se.fc2.", ".se.expand.")
    return key


def _stage(match: re.Match, offset: int = 0) -> str:
    return f"layers.{int(match[1]) + offset}.block{match[2]}."


def _torchvision_efficientnet(key: str) -> str:
    """``features.2.0.block.1.0.weight``: stage 1, block 0, second part (depthwise where there is an expansion)."""
    match = re.match(r"features\.([1-7])\.(\d+)\.block\.(\d)\.(.+)$", key)
    if match:
        parts = ("depsep", "se", "proj") if match[1] == "1" else ("expand", "depsep", "se", "proj")
        part, rest = parts[int(match[3])], match[4]
        if part == "se":
            rest = rest.replace("fc1.", "squeeze.").replace("fc2.", "expand.")
        else:
            rest = re.sub(r"^0\.", "conv.", rest)
            rest = re.sub(r"^1\.", "bn.", rest)
        return f"{_stage(match, -1)}{part}.{rest}"
    key = re.sub(r"^features\.0\.", "stem.", key)
    key = re.sub(r"^features\.8\.", "features.", key)
    key = re.sub(r"^(stem|features)\.0\.", r"\1.conv.", key)
    key = re.sub(r"^(stem|features)\.1\.", r"\1.bn.", key)
    return key.replace("classifier.1.", "classifier.fc.")


def _timm_efficientnet(key: str) -> str:
    """``blocks.1.0.conv_pw.weight``; the first stage has no expansion and numbers its norms from the depthwise one."""
    match = re.match(r"blocks\.(\d)\.(\d+)\.(.+)$", key)
    if match:
        if match[1] == "0":
            names = {"conv_dw": "depsep.conv", "bn1": "depsep.bn", "conv_pw": "proj.conv", "bn2": "proj.bn"}
        else:
            names = {
                "conv_pw": "expand.conv", "bn1": "expand.bn", "conv_dw": "depsep.conv", "bn2": "depsep.bn",
                "conv_pwl": "proj.conv", "bn3": "proj.bn",
            }  # fmt: skip
        names |= {"se.conv_reduce": "se.squeeze", "se.conv_expand": "se.expand"}
        part, _, leaf = match[3].rpartition(".")
        return f"{_stage(match)}{names.get(part, part)}.{leaf}"
    return _rules(
        (r"conv_stem\.", "stem.conv."),
        (r"bn1\.", "stem.bn."),
        (r"conv_head\.", "features.conv."),
        (r"bn2\.", "features.bn."),
        (r"classifier\.", "classifier.fc."),
    )(key)


def _flat_efficientnet(repeats: list[int]) -> Rename:
    """efficientnet-pytorch counts all blocks in one list: ``_blocks.3._expand_conv.weight``."""
    places = [(stage, block) for stage, count in enumerate(repeats) for block in range(count)]
    names = {
        "_expand_conv": "expand.conv", "_bn0": "expand.bn", "_depthwise_conv": "depsep.conv", "_bn1": "depsep.bn",
        "_se_reduce": "se.squeeze", "_se_expand": "se.expand", "_project_conv": "proj.conv", "_bn2": "proj.bn",
    }  # fmt: skip
    outer = _rules(
        (r"_conv_stem\.", "stem.conv."),
        (r"_bn0\.", "stem.bn."),
        (r"_conv_head\.", "features.conv."),
        (r"_bn1\.", "features.bn."),
        (r"_fc\.", "classifier.fc."),
    )

    def rename(key: str) -> str:
        match = re.match(r"_blocks\.(\d+)\.(\w+)\.(.+)$", key)
        if not match or int(match[1]) >= len(places):
            return outer(key)
        stage, block = places[int(match[1])]
        return f"layers.{stage}.block{block}.{names.get(match[2], match[2])}.{match[3]}"

    return rename


def _renamer(keys: set[str], arch: str) -> Rename:
    entry = architecture(arch)
    if entry.family is ResNet:
        return _resnet
    if entry.family is EfficientNet:
        if "features.0.0.weight" in keys:
            return _torchvision_efficientnet
        if "conv_stem.weight" in keys:
            return _timm_efficientnet
        if "_conv_stem.weight" in keys:
            return _flat_efficientnet([math.ceil(stage[2] * entry.config.depth) for stage in STAGES])
    return lambda key: key


def published_eps(state_dict: Mapping[str, Tensor], arch: str) -> float | None:
    """The batch-norm epsilon that weights of this layout were trained with, where it is not the architecture's.

    torchvision's and timm's EfficientNet b0-b4 have 1e-5, all others (and NVIDIA's) the 1e-3 of the paper's code.
    """
    keys = set(strip_prefixes(state_dict))
    foreign = "features.0.0.weight" in keys or "conv_stem.weight" in keys
    return 1e-5 if foreign and re.fullmatch(r"efficientnet_b[0-4]", arch) else None


def to_canonical(state_dict: Mapping[str, Tensor], arch: str) -> dict[str, Tensor]:
    """The same tensors under this package's names. Unknown keys stay as they are, for the strict load to report."""
    stripped = strip_prefixes(state_dict)
    rename = _renamer(set(stripped), arch)
    converted: dict[str, Tensor] = {}
    for key, value in stripped.items():
        name = rename(key)
        if re.search(r"\.se\.(squeeze|expand)\.weight$", name) and value.dim() == 4:
            value = value.flatten(1)
        converted[name] = value
    return converted
