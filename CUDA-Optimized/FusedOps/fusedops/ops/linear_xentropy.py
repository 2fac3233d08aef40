"""A linear layer and its cross entropy in one, over chunks of rows, so that the logits are never all in memory.

For each chunk: logits by a matrix product, losses and the logits' gradient in place by one kernel, then that gradient's
products with weight and input. All of it happens in the forward pass, with the gradient of the reduced loss known to be
1 / count or 1; the backward pass multiplies by what comes from above, which costs one load where that is 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import backend_for
from . import xentropy
from .autocast import cast_for_product
from .registration import Operator, is_direct
from .weight_gradient import add_product_

__all__ = ["default_chunk", "linear_cross_entropy", "linear_cross_entropy_plain"]

CHUNK_BYTES = 1 << 28  # of logits in a chunk
CHUNK_STEP = 256  # chunks are multiples of this many rows


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
    accumulate: torch.dtype | None = torch.float32,
) -> Tensor:
    """cross_entropy(x @ weight.T + bias, target) as a float32 scalar, without the logits (rows, classes) in memory.

    x (..., features), weight (classes, features), bias (classes,), target (...) class indices; options as those of
    `cross_entropy`; reduction "mean" or "sum". `chunk_rows` rows are handled at a time (None: by `default_chunk`).
    The weight's gradient is summed over chunks in the type `accumulate`, or, with None, in the weight's own, which
    halves its memory for 16-bit weights and rounds once a chunk. Under autocast x, weight and bias are cast to its
    type, as for torch's linear. Backward can run once. ValueError for wrong shapes.
    """
    if x.shape[:-1] != target.shape or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
        raise ValueError(f"need x (..., features), weight (classes, features), target (...), not {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), not {tuple(bias.shape)}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    xentropy.check_options(reduction, label_smoothing, softcap, ("mean", "sum"))
    x, weight, bias = cast_for_product(x, weight, bias)
    if not x.is_floating_point() or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        types = ", ".join(str(t.dtype) for t in (x, weight, bias) if t is not None)
        raise ValueError(f"x, weight and bias must be of one floating-point type, not {types}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be int64 or int32, not {target.dtype}")
    flat, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    if backend_for(x, weight, bias, op="linear_cross_entropy") == "plain":
        return linear_cross_entropy_plain(flat, weight, targets, bias, reduction, *options)
    chunk = chunk_rows or default_chunk(weight.shape[0], x.element_size())
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    wanted = [gradients and t is not None and t.requires_grad for t in (x, weight, bias)]
    settings = (reduction == "mean", chunk, accumulate or weight.dtype, *wanted)
    return linear_forward(flat, weight, bias, targets.contiguous(), *options, *settings)[0]


def linear_cross_entropy_plain(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, ignore_index: int,
    smoothing: float, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    """The plain form, with all logits."""
    logits = F.linear(x, weight, bias)
    losses = xentropy.cross_entropy_plain(logits, target, ignore_index, smoothing, z_loss, softcap)
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def default_chunk(classes: int, element_size: int) -> int:
    """Rows in a chunk: a multiple of 256 whose logits take at most 256 MiB, if that allows any."""
    rows = CHUNK_BYTES // (classes * element_size)
    return max(CHUNK_STEP, rows // CHUNK_STEP * CHUNK_STEP)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    chunk: int,
    accumulate: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import xentropy_kernels

    rows = x.shape[0]
    losses, lse = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    count = (target != ignore_index).sum() if mean else None
    backward = x_wanted or weight_wanted or bias_wanted
    _, dx, dweight, dbias = _outputs(x, weight, bias, x_wanted, weight_wanted, bias_wanted)
    total = torch.zeros(weight.shape, dtype=accumulate, device=x.device) if weight_wanted else None
    bias_total = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if bias_wanted else None
    buffer = x.new_empty((min(chunk, rows), weight.shape[0]))
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        logits = buffer[: part.stop - start]
        if bias is None:
            torch.mm(x[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[part], weight.t(), out=logits)
        gradient = logits if backward else None
        options = (ignore_index, smoothing, z_loss, softcap)
        xentropy_kernels.loss(logits, target[part], losses[part], lse[part], gradient, count, *options)
        if x_wanted:
            torch.mm(logits, weight, out=dx[part])
        if total is not None:
            add_product_(total, logits.t(), x[part])
        if bias_total is not None:
            bias_total += logits.sum(0, dtype=torch.float32)
    if total is not None:
        dweight.copy_(total) if total.dtype != dweight.dtype else dweight.set_(total)
    if bias_total is not None:
        dbias.copy_(bias_total)
    loss = losses.sum() if count is None else losses.sum() / (count != 0)
    return loss, dx, dweight, dbias


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_wanted: bool, weight_wanted: bool, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        return x.new_empty(tensor.shape, dtype=tensor.dtype) if wanted else x.new_empty(0)

    loss = x.new_empty((), dtype=torch.float32)
    return loss, like(x, x_wanted), like(weight, weight_wanted), like(bias, bias_wanted)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, smoothing: float, z_loss: float,
    softcap: float, mean: bool, chunk: int, accumulate: torch.dtype, x_wanted: bool, weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(x, weight, bias, x_wanted, weight_wanted, bias_wanted)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, *gradients = output
    # Outputs of no use outside, so that saving them as they are makes no reference cycle.
    ctx.gradients = gradients
    ctx.wanted = inputs[-3:]
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple:
    if upstream is None:
        return (None,) * 14
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise RuntimeError("linear_cross_entropy: the gradients were used up by an earlier backward pass")
    scaled = [_scaled(g, upstream) if wanted else None for g, wanted in zip(gradients, ctx.wanted, strict=True)]
    return *scaled, *(None,) * 11


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if not is_direct(gradient, factor):
        return gradient * factor.to(gradient.dtype)
    from . import xentropy_kernels

    if gradient.numel():
        flat = gradient.view(gradient.shape[0], -1) if gradient.dim() > 1 else gradient.view(1, -1)
        xentropy_kernels.scale_(flat, factor)
    return gradient


linear_forward = Operator("linear_cross_entropy", _launch, _fake).differentiable(_setup, _backward)
