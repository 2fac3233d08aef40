"""Logits of the same weights in another framework: forward.npz, which test_models.py compares ours with.

    python make_forward.py weights FOLDER      in MXNet's environment: weights drawn by name, as the test draws them
    python make_forward.py logits FOLDER       in that of PyTorch/Classification/ConvNets, its package on PYTHONPATH

ResNets and ResNeXt go through ConvNets' own `export`, which loads the tensors strictly, and onnxruntime; so this also
shows that the files are of its layout. Xception, which it does not have, is written down below with torch's functions
from figure 5 of the paper.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

NAMES = {"resnet8_small": (1, 28), "resnet18": (3, 224), "resnet50": (3, 224), "resnext101_32x4d": (3, 224)}
XCEPTION = {"xception": (3, 149)}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that depend on nothing but a parameter's name and shape, of a size that keeps deep networks finite."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if len(shape) > 1:
        return (rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)
    if name.endswith(("running_var", "weight")):
        return rng.uniform(0.5, 1.0, shape).astype(np.float32)
    return (rng.standard_normal(shape) * 0.1).astype(np.float32)


def images(channels: int, size: int) -> np.ndarray:
    """Two pictures, normalised."""
    return np.random.default_rng(size).standard_normal((2, channels, size, size)).astype(np.float32)


def write_weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    from rn50_mxnet import blocks, registry

    for arch, (channels, _) in (NAMES | XCEPTION).items():
        shapes = {k: p.shape for k, p in blocks.named_parameters(registry.build(arch, 10, channels)).items()}
        save_file({name: draw(name, shape) for name, shape in shapes.items()}, folder / f"{arch}.safetensors")


def xception(w: dict, x):
    """Logits, from the paper's figure 5, with a norm after each (separable) convolution."""
    import torch.nn.functional as F

    def norm(name, x):
        values = (w[f"{name}.{kind}"] for kind in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *values, False, 0.0, 1e-5)

    def separable(name, x):
        depthwise = w[f"{name}.depthwise.weight"]
        x = F.conv2d(x, depthwise, padding=1, groups=len(depthwise))
        return F.conv2d(x, w[f"{name}.pointwise.weight"])

    x = F.relu(norm("bn1", F.conv2d(x, w["conv1.weight"], stride=2)))
    x = F.relu(norm("bn2", F.conv2d(x, w["conv2.weight"])))
    for index in range(12):
        name = f"blocks.{index}"
        downsampling = index in (0, 1, 2, 11)
        y = x if index == 0 else F.relu(x)
        for layer in range(2 if downsampling else 3):
            y = F.relu(y) if layer else y
            y = norm(f"{name}.body.{2 * layer + 1}", separable(f"{name}.body.{2 * layer}", y))
        if downsampling:
            y = F.max_pool2d(y, 3, 2, 1)
            x = norm(f"{name}.shortcut.1", F.conv2d(x, w[f"{name}.shortcut.0.weight"], stride=2))
        x = x + y
    x = F.relu(norm("bn3", separable("conv3", x)))
    x = F.relu(norm("bn4", separable("conv4", x)))
    return F.linear(x.mean((2, 3)), w["fc.weight"], w["fc.bias"])


def write_logits(folder: Path) -> None:
    import onnxruntime
    import torch
    from safetensors.torch import load_file

    found = {}
    for arch, (channels, size) in NAMES.items():
        output = folder / arch
        command = [sys.executable, "-m", "convnets.export", "--checkpoint", str(folder / f"{arch}.safetensors")]
        subprocess.run([*command, "--arch", arch, "--output_dir", str(output)], check=True)
        session = onnxruntime.InferenceSession(str(output / "model.onnx"), providers=["CPUExecutionProvider"])
        found[arch] = session.run(None, {"images": images(channels, size)})[0]
    for arch, (channels, size) in XCEPTION.items():
        with torch.no_grad():
            weights = {k: v.double() for k, v in load_file(folder / f"{arch}.safetensors").items()}
            found[arch] = xception(weights, torch.from_numpy(images(channels, size)).double()).numpy()
    np.savez(Path(__file__).with_name("forward.npz"), **{k: v.astype(np.float32) for k, v in found.items()})
    print({name: (value.shape, float(np.abs(value).max())) for name, value in found.items()})


if __name__ == "__main__":
    {"weights": write_weights, "logits": write_logits}[sys.argv[1]](Path(sys.argv[2]))
