"""LSTM steps within a loop over time, with the gradients of their weights taken once for all steps.

Autograd alone would compute the gradient of a recurrent weight at every step and add them up: for F steps F small
products and F passes over the weight. Here the loop multiplies with a detached weight, and the gradients of all steps'
gates, which autograd collects anyway, give the weight's in one product of F * B rows.

F steps, B batch, I inputs of a product, O its outputs, H width of an LSTM (O = 4 H, in the order input, forget, cell,
output of torch.nn.LSTMCell).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Deferred(torch.autograd.Function):
    """``offsets`` as they are; their gradient and what the loop has multiplied give the gradient of ``weight``."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen, ctx.dtype = seen, weight.dtype
        return offsets.view_as(offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        seen = torch.stack(ctx.seen).flatten(0, 1)
        ctx.seen.clear()  # of no use after this: the memory is wanted back before the graph goes
        return gradient, (gradient.flatten(0, 1).to(seen.dtype).T @ seen).to(ctx.dtype), None


class Product:
    """``offset_t + x_t @ weight.T`` for steps t = 0, 1, ... in this order, once through. ``weight`` is (O, I).

    ``offsets``: what does not depend on the loop, (F, B, O). The products are computed in ``dtype``. Only one backward
    pass through a loop is possible.
    """

    def __init__(self, offsets: Tensor, weight: Tensor, dtype: torch.dtype):
        self.seen: list[Tensor] = []
        self.records = torch.is_grad_enabled() and weight.requires_grad
        if self.records:
            offsets = _Deferred.apply(offsets, weight, self.seen)
        self.offsets = offsets.unbind(0)
        self.weight = weight.detach().to(dtype).T

    def parts(self, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The offset (B, O) and the product (B, O) of a step with ``x`` (B, I)."""
        if self.records:
            self.seen.append(x.detach())
        return self.offsets[step], x @ self.weight

    def __call__(self, step: int, x: Tensor) -> Tensor:
        """Their sum (B, O)."""
        if self.records:
            self.seen.append(x.detach())
        return torch.addmm(self.offsets[step], x, self.weight)


def lstm_cell(offset: Tensor, product: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden state (B, H) and new cell state (B, H) from the two summands of the gates (B, 4 H) and the old cell.

    Computed in the cell state's type, whatever that of the gates.
    """
    if cell.is_cuda and not torch.compiler.is_compiling():  # one kernel: what torch.nn.LSTMCell calls, too
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(offset.to(cell.dtype), product.to(cell.dtype), cell)
        return hidden, cell
    enter, forget, value, leave = (offset + product).to(cell.dtype).chunk(4, 1)
    cell = torch.addcmul(forget.sigmoid() * cell, enter.sigmoid(), value.tanh())
    return leave.sigmoid() * cell.tanh(), cell
