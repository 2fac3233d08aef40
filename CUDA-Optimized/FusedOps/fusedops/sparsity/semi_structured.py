"""The bridge from masked weights to torch's product with a 2:4 sparse matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fusedops.sparsity.masks import is_2to4

__all__ = ["to_sparse_semi_structured"]

DTYPES = (torch.float16, torch.bfloat16, torch.int8)


def to_sparse_semi_structured(model: nn.Module, wanted: Callable[[str, nn.Linear], bool] | None = None) -> list[str]:
    """Store the weights of Linear layers in torch's semi-structured form, for inference; -> the names of those
    converted.

    ``wanted(name, layer)``: which layers; None: all whose weight is 2:4, in a 16-bit dtype, and of a shape that
    torch's kernels take (rows a multiple of 32, columns of 64). ValueError for a layer that is wanted but does not
    fit, and for a model that is not on a CUDA device of compute capability 8.0 or newer.
    """
    converted = []
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or (wanted is not None and not wanted(name, layer)):
            continue
        reason = _obstacle(layer)
        if reason and wanted is not None:
            raise ValueError(f"layer {name}: {reason}")
        if reason:
            continue
        weight = layer.weight.detach()
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 0):
            raise ValueError(
                f"layer {name}: the sparse product needs a CUDA device of compute capability 8.0, not {weight.device}"
            )
        layer.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(weight), requires_grad=False)
        converted.append(name)
    return converted


def _obstacle(layer: nn.Linear) -> str:
    weight = layer.weight
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}; the sparse product takes 16-bit weights"
    if weight.shape[0] % 32 or weight.shape[1] % 64:
        return f"its shape {tuple(weight.shape)} is no multiple of (32, 64)"
    if not is_2to4(weight.detach()):
        return "its weight is not 2:4: more than two of four values are not zero"
    return ""
