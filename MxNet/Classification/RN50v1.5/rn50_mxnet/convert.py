"""Leave MXNet: a model's weights in the layout of PyTorch (torchvision, PyTorch/Classification/ConvNets), and back.

    ./dlx run rn50_mxnet export -- --checkpoint runs/quickstart --format pytorch --output_dir exported
    ./dlx run ConvNets infer -- --checkpoint exported/model.safetensors --arch resnet50 --image photo.jpg

Our checkpoints already name their tensors as PyTorch does, so that this is a matter of checking which architecture it
is on the other side. Only v1.5 has a namesake there; ResNet v1 differs in the place of a stride, which no weight
tells, and Xception is no part of ConvNets. Files of MXNet's own (`.params`, model zoo) are read, too.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, nn
from safetensors.numpy import save_file

from dlx.files import atomic_path, atomic_write

from . import registry
from .blocks import NORM_EPSILON, named_parameters
from .checkpoint import Classifier

CONVNETS = {
    **{f"resnet{layers}": f"resnet{layers}" for layers in (18, 34, 50, 101, 152)},
    "resnext101_32x4d": "resnext101_32x4d",
    "resnet8_small": "resnet8_small",
    # Basic blocks have one stride in either version.
    "resnet18_v1": "resnet18",
    "resnet34_v1": "resnet34",
}


def to_pytorch(found: Classifier, folder: str | os.PathLike[str]) -> Path:
    """Write model.safetensors and model.json (architecture there, classes, preprocessing); the path of the first.

    ValueError for an architecture that ConvNets does not have.
    """
    if found.arch not in CONVNETS:
        reason = "is not part of it" if found.arch == "xception" else "has its stride in another convolution"
        raise ValueError(
            f"{found.arch} has no counterpart in PyTorch/Classification/ConvNets: it {reason}; export to onnx"
        )
    path = Path(folder) / "model.safetensors"
    with atomic_path(path) as temporary:
        save_file({name: np.ascontiguousarray(value) for name, value in found.weights.items()}, temporary)
    content = found.describe() | {"arch": CONVNETS[found.arch], "source": found.source}
    atomic_write(path.with_suffix(".json"), json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def from_params(path: str | os.PathLike[str], arch: str, num_classes: int = 1000) -> dict[str, np.ndarray]:
    """Weights by PyTorch's names from a `.params` file of MXNet's ResNet model zoo (v1: resnet18_v1 ... resnet152_v1).

    ValueError where the file is no such thing.
    """
    zoo = getattr(mx.gluon.model_zoo.vision, arch, None) if arch.endswith("_v1") else None
    if zoo is None or arch not in registry.ARCHITECTURES:
        raise ValueError(f"{arch}: MXNet's model zoo shares resnet18_v1 ... resnet152_v1 with us, and no other network")
    network = zoo(classes=num_classes)
    try:
        network.load_parameters(str(path))
    except (mx.base.MXNetError, AssertionError, OSError) as error:
        raise ValueError(f"{path}: not a .params file of {arch} with {num_classes} classes: {error}") from None
    return from_zoo(network, arch, num_classes)


def from_zoo(network: HybridBlock, arch: str, num_classes: int) -> dict[str, np.ndarray]:
    """Weights of a network of MXNet's model zoo by our names.

    The zoo's bottlenecks have biases in their 1x1 convolutions, which a norm follows at once: they move its mean.
    """
    ours = registry.build(arch, num_classes)
    # Layers in the order of their definition are the same network; ours define a block's shortcut first, the zoo last.
    names = list(named_parameters(ours))
    layers = _layers(network)
    targets = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    targets.sort(key=_zoo_order)
    if len(layers) != len(targets):
        raise ValueError(f"{arch}: {len(layers)} layers in the zoo's network, {len(targets)} in ours")
    found: dict[str, np.ndarray] = {}
    bias: np.ndarray | None = None
    for target, layer in zip(targets, layers, strict=True):
        if isinstance(layer, nn.BatchNorm):
            mean = layer.running_mean.data().asnumpy() - (0 if bias is None else bias)
            # The zoo's norms have the same epsilon, else the weights would mean something else.
            if abs(layer._kwargs["eps"] - NORM_EPSILON) > 1e-12:
                raise ValueError(f"{arch}: a norm of the zoo has epsilon {layer._kwargs['eps']}, ours {NORM_EPSILON}")
            found |= {
                f"{target}.weight": layer.gamma.data().asnumpy(),
                f"{target}.bias": layer.beta.data().asnumpy(),
                f"{target}.running_mean": mean,
                f"{target}.running_var": layer.running_var.data().asnumpy(),
            }
            bias = None
            continue
        found[f"{target}.weight"] = layer.weight.data().asnumpy()
        bias = layer.bias.data().asnumpy() if layer.bias is not None else None
        if isinstance(layer, nn.Dense):
            found[f"{target}.bias"] = bias
    return found


def _layers(block: HybridBlock) -> list[HybridBlock]:
    """Convolutions, norms and the classifier, in the order of their definition."""
    found = []
    for child in block._children.values():
        found += [child] if isinstance(child, nn.Conv2D | nn.BatchNorm | nn.Dense) else _layers(child)
    return found


def _zoo_order(target: str) -> tuple[int, int, int, int]:
    """Sorts our layers as the zoo defines them: stem, blocks with the shortcut last, classifier."""
    pieces = target.split(".")
    if not pieces[0].startswith("layer"):
        return (99 if pieces[0] == "fc" else 0, 0, 0, int(pieces[0].startswith("bn")))
    stage, block = int(pieces[0][5:]), int(pieces[1])
    if pieces[2] == "downsample":
        return (stage, block, 99, int(pieces[3]))
    kind, number = pieces[2][:-1], int(pieces[2][-1])
    return (stage, block, number, int(kind == "bn"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="convert",
        description="A .params file of MXNet's model zoo as safetensors, for --checkpoint FILE --arch ARCH.",
    )
    parser.add_argument("params", help="the .params file")
    parser.add_argument("arch", help="resnet18_v1 ... resnet152_v1")
    parser.add_argument("target", type=Path, help="the .safetensors file")
    parser.add_argument("--num_classes", type=int, default=1000, help="of the classifier (default 1000)")
    options = parser.parse_args(arguments)
    weights = from_params(options.params, options.arch, options.num_classes)
    with atomic_path(options.target) as temporary:
        save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, temporary)
    print(f"{options.target}: {len(weights)} tensors of {options.arch}")


if __name__ == "__main__":
    main()
