"""Make forward.json: logits of other libraries' models under weights that anybody can recompute.

    python tests/golden/make_forward.py            needs torchvision and timm; takes minutes on a CPU

Every tensor is filled from a generator seeded with its canonical name, so a test can give our model the same weights
without the other library. All arithmetic is float64.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PEERS = {
    **{f"resnet{depth}": ("torchvision", f"resnet{depth}") for depth in (18, 34, 50, 101, 152)},
    "resnext101_32x4d": ("timm", "resnext101_32x4d"),
    "se_resnext101_32x4d": ("timm", "seresnext101_32x4d"),
    **{f"efficientnet_b{index}": ("torchvision", f"efficientnet_b{index}") for index in range(8)},
    "efficientnet_lite0": ("timm", "tf_efficientnet_lite0"),
    "mobilenet_v2": ("torchvision", "mobilenet_v2"),
}
SIZE = 96
KEPT = 16


def tensor_for(name: str, shape: tuple[int, ...]) -> Tensor:
    """float64 values that depend on the canonical name alone: a weight of unit gain, or a plausible norm."""
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.int64)
    normal = np.random.Generator(np.random.Philox(zlib.crc32(name.encode()))).standard_normal(shape)
    if name.endswith("running_var"):
        values = 1.0 + 0.2 * np.abs(normal)
    elif len(shape) > 1:
        values = normal * math.sqrt(2.0 / math.prod(shape[1:]))
    elif name.endswith("weight"):
        values = 1.0 + 0.1 * normal
    else:
        values = 0.1 * normal
    return torch.from_numpy(np.ascontiguousarray(values))


def example(size: int = SIZE) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(1)).standard_normal((2, 3, size, size)))


@torch.no_grad()
def main() -> None:
    import timm
    import torchvision

    from convnets.convert import to_canonical

    golden = {}
    for arch, (library, name) in PEERS.items():
        module = {"torchvision": torchvision, "timm": timm}[library]
        model = (torchvision.models.get_model if library == "torchvision" else timm.create_model)(name).double().eval()
        own = model.state_dict()
        # A tensor that holds its own key's number tells which canonical name each key goes to.
        keys = list(own)
        marked = {key: torch.full(tuple(own[key].shape), float(index)) for index, key in enumerate(keys)}
        for canonical, value in to_canonical(marked, arch).items():
            key = keys[int(value.flatten()[0])]
            shape = tuple(value.shape)
            own[key] = tensor_for(canonical, shape).reshape(own[key].shape)
        model.load_state_dict(own)
        logits = model(example())
        golden[arch] = {
            "library": library, "model": name, "version": module.__version__, "torch": torch.__version__,
            "batch_norm_eps": next(m.eps for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)),
            "logits": logits[:, :KEPT].tolist(), "norm": logits.norm().item(),
        }  # fmt: skip
        print(arch, golden[arch]["norm"], flush=True)
    path = Path(__file__).with_name("forward.json")
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
