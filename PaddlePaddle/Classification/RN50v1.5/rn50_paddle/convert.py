"""Weights from elsewhere under this package's names: torchvision, paddle.vision, NVIDIA's Paddle example.

NVIDIA's layouts are written down from its description, since no published file of it was at hand: structured names
(`stem.conv.weight`, `blocks.3.conv0.conv.weight`, `blocks.3.short.bn._mean`) and the flat names of a static program
(`conv2d_12.w_0`, `batch_norm_12.w_1`, `linear_0.b_0`), which are numbered as the layers were made.

`.pdparams` files are pickles. `read_pdparams` reads them with an unpickler that makes arrays and nothing else.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .model import architecture

Weights = Mapping[str, np.ndarray]

_ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "tuple"): tuple,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Knows the few names that a file of arrays needs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if re.fullmatch(r"numpy\.(_?core)\.multiarray", module) and name in ("_reconstruct", "scalar"):
            return getattr(np._core.multiarray, name)
        if re.fullmatch(r"numpy\.(_?core)\.numeric", module) and name == "_frombuffer":
            return np._core.numeric._frombuffer
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which a file of arrays has no need of")


def read_pdparams(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a `.pdparams` file by name. ValueError for anything that is not only arrays."""
    try:
        with open(path, "rb") as stream:
            content = _ArrayUnpickler(stream).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of Paddle parameters: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not parameters by name")
    arrays = {}
    for key, value in content.items():
        if key == "StructuredToParameterName@@":
            continue
        # Paddle's dynamic mode stores a tensor as (its own name, values).
        value = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{path}: {key} is a {type(value).__name__}, not an array")
        arrays[str(key)] = value
    return arrays


def from_torchvision(weights: Weights) -> dict[str, np.ndarray]:
    """torchvision's state dict (as arrays); PyTorch keeps linear weights transposed."""
    found = {}
    for key, value in weights.items():
        if key.endswith("num_batches_tracked"):
            continue
        name = key.replace("running_mean", "_mean").replace("running_var", "_variance")
        found[name] = np.ascontiguousarray(value.T) if name == "fc.weight" else np.asarray(value)
    return found


def to_torchvision(weights: Weights) -> dict[str, np.ndarray]:
    """The way back."""
    return {
        key.replace("_mean", "running_mean").replace("_variance", "running_var"): (
            np.ascontiguousarray(value.T) if key == "fc.weight" else value
        )
        for key, value in weights.items()
    }


def _blocks(arch: str) -> list[tuple[str, int, bool]]:
    """Of every block in order: prefix, number of convolutions, whether its shortcut is a projection."""
    entry = architecture(arch)
    convolutions = 3 if entry.block == "bottleneck" else 2
    first_projects = entry.block == "bottleneck" or entry.stem_width != entry.width
    return [
        (f"layer{stage + 1}.{position}", convolutions, position == 0 and (stage > 0 or first_projects))
        for stage, depth in enumerate(entry.depths)
        for position in range(depth)
    ]


def from_nvidia_structured(weights: Weights, arch: str) -> dict[str, np.ndarray]:
    """`stem.*`, `blocks.N.conv0.*`, `blocks.N.short.*`, `fc.*`; the stem may be a list (`stem.0.*`)."""
    names = [prefix for prefix, _, _ in _blocks(arch)]
    found = {}
    for key, value in weights.items():
        stem = re.fullmatch(r"stem(?:\.\d+)?\.(conv|bn)\.(.+)", key)
        inner = re.fullmatch(r"blocks\.(\d+)\.(conv\d|short)\.(conv|bn)\.(.+)", key)
        if stem:
            name = f"{stem[1]}1.{stem[2]}"
        elif inner and int(inner[1]) < len(names):
            prefix, part = names[int(inner[1])], inner[2]
            if part == "short":
                name = f"{prefix}.downsample.{'0' if inner[3] == 'conv' else '1'}.{inner[4]}"
            else:
                name = f"{prefix}.{inner[3]}{int(part[-1]) + 1}.{inner[4]}"
        else:
            name = key
        found[name] = value
    return found


def _layer_order(arch: str, shortcut_first: bool) -> list[tuple[str, str]]:
    """(convolution, norm) names in the order in which a program makes them."""
    order = [("conv1", "bn1")]
    for prefix, count, projects in _blocks(arch):
        block = [(f"{prefix}.conv{n}", f"{prefix}.bn{n}") for n in range(1, count + 1)]
        shortcut = [(f"{prefix}.downsample.0", f"{prefix}.downsample.1")] if projects else []
        order += shortcut + block if shortcut_first else block + shortcut
    return order


def from_nvidia_static(weights: Weights, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Flat names of a static program. Whether a block's shortcut was made before or after its convolutions is found
    out from the shapes of the model that takes the weights."""
    kinds: dict[str, list[int]] = {}
    for key in weights:
        match = re.fullmatch(r"(conv2d|batch_norm(?:2d)?|linear)_(\d+)\.[wb]_\d", key)
        if match is None:
            raise ValueError(f"{key!r} is no name of a static program's parameter")
        kinds.setdefault(match[1], []).append(int(match[2]))
    numbers = {kind: sorted(set(values)) for kind, values in kinds.items()}
    norm = next((kind for kind in numbers if kind.startswith("batch_norm")), "batch_norm")
    expected = len(_layer_order(arch, False))
    counts = [len(numbers.get(kind, [])) for kind in ("conv2d", norm, "linear")]
    if counts != [expected, expected, 1]:
        raise ValueError(f"{arch} has {expected} convolutions and norms and 1 linear layer, the weights have {counts}")
    leaves = {"w_0": "weight", "b_0": "bias", "w_1": "_mean", "w_2": "_variance"}
    for shortcut_first in (False, True):
        found = {}
        for position, (conv_name, norm_name) in enumerate(_layer_order(arch, shortcut_first)):
            found[f"{conv_name}.weight"] = weights.get(f"conv2d_{numbers['conv2d'][position]}.w_0")
            for leaf, ours in leaves.items():
                found[f"{norm_name}.{ours}"] = weights.get(f"{norm}_{numbers[norm][position]}.{leaf}")
        linear = numbers["linear"][0]
        found |= {f"fc.{leaves[leaf]}": weights.get(f"linear_{linear}.{leaf}") for leaf in ("w_0", "b_0")}
        if all(value is not None and tuple(value.shape) == shapes.get(name) for name, value in found.items()):
            return found
    raise ValueError(f"the weights' shapes are not those of {arch} in either order of its shortcuts")


def to_canonical(weights: Weights, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The same arrays under this package's names; the layout is recognised by its keys. `shapes`: of the model."""
    if any(re.match(r"(conv2d|batch_norm(2d)?)_\d+\.w_0$", key) for key in weights):
        return from_nvidia_static(weights, arch, shapes)
    if any(key.startswith("blocks.") for key in weights):
        return from_nvidia_structured(weights, arch)
    if any(key.endswith("running_mean") for key in weights):
        return from_torchvision(weights)
    return dict(weights)


def load_into(model: Any, weights: Weights, source: str = "weights") -> None:
    """Set every parameter and statistic of a Paddle model; ValueError names what is missing, extra or misshapen."""
    own = model.state_dict()
    faults = [f"missing {key}" for key in own if key not in weights]
    faults += [f"unexpected {key}" for key in weights if key not in own]
    faults += [
        f"{key} has shape {list(weights[key].shape)}, the model {list(own[key].shape)}"
        for key in own
        if key in weights and list(weights[key].shape) != list(own[key].shape)
    ]
    if faults:
        raise ValueError(f"{source}: {'; '.join(faults[:5])}" + (f" and {len(faults) - 5} more" * (len(faults) > 5)))
    for key, value in own.items():
        value.set_value(np.asarray(weights[key]).astype(value.numpy().dtype))


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    """A model's parameters and statistics as arrays."""
    return {key: value.numpy() for key, value in model.state_dict().items()}
