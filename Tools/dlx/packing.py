"""Weights in fewer bits for publishing: tensors of two dimensions or more as float16 or int8, vectors in float32.

In int8 each row (a slice along the first dimension) has a float32 scale, its largest magnitude over 127, stored beside
it under the tensor's name with SUFFIX. `unpack` gives float32 again, so a reader need not know how a file was written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

STORES = ("fp32", "fp16", "int8")
SUFFIX = ".row_scale"
LEVELS = 127


def pack(tensors: Mapping[str, torch.Tensor], store: str) -> dict[str, torch.Tensor]:
    """The tensors as ``store`` keeps them; integers stay. ValueError: unknown store, or weights that are not finite."""
    if store not in STORES:
        raise ValueError(f"unknown store {store!r}; known: {', '.join(STORES)}")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            packed[name] = tensor
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name}: has values that are not finite")
        tensor = tensor.float()
        if store == "fp32" or tensor.dim() < 2 or tensor.numel() == 0:
            packed[name] = tensor
        elif store == "fp16":
            packed[name] = tensor.half()
            if not bool(torch.isfinite(packed[name]).all()):
                raise ValueError(f"{name}: {tensor.abs().max().item():g} is more than float16 holds")
        else:
            rows = tensor.flatten(1)
            scale = rows.abs().amax(1) / LEVELS
            quotient = rows / torch.where(scale > 0, scale, 1.0)[:, None]
            packed[name] = quotient.round().to(torch.int8).view(tensor.shape)
            packed[name + SUFFIX] = scale
    return packed


def unpack(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `pack` was given, up to rounding: int8 tensors with scales as float32, all others as they are."""
    scales = {name.removesuffix(SUFFIX): scale for name, scale in tensors.items() if name.endswith(SUFFIX)}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX):
            continue
        scale = scales.pop(name, None)
        if scale is None:
            found[name] = tensor
        elif tensor.dtype != torch.int8 or tensor.dim() < 2 or scale.shape != tensor.shape[:1]:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} does not go with scales of shape {list(scale.shape)}"
            )
        else:
            found[name] = tensor.float() * scale.float().view(-1, *[1] * (tensor.dim() - 1))
    if scales:
        raise ValueError(f"scales without their tensors: {', '.join(sorted(scales))}")
    return found
