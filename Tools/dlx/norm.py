"""Batch normalisation with its activation and residual sum in one module.

The parameters and buffers are those of ``nn.BatchNorm2d`` (weight, bias, running_mean, running_var,
num_batches_tracked), so published weights load unchanged. On a GPU in training the work is done by the Triton
kernels of ``fused_norm``; everywhere else by plain PyTorch, which stays the reference (``set_fused(model, False)``).

N batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from . import fused_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
}


class BatchNormAct(nn.BatchNorm2d):
    """``act(batch_norm(x) + residual)`` over an NCHW tensor.

    ``residual`` may be a tensor like ``x`` or a ``Pending`` batch norm (a shortcut branch whose normalisation is
    carried out in the same pass). ``fused`` is True, False or None: None takes the kernels where they apply.
    """

    def __init__(self, num_channels: int, act: str = "relu", eps: float = 1e-5, momentum: float = 0.1):
        super().__init__(num_channels, eps=eps, momentum=momentum)
        if act not in ACTIVATIONS:
            raise ValueError(f"unknown activation {act!r}; known: {', '.join(ACTIVATIONS)}")
        self.act = act
        self.fused: bool | None = None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act}"

    def _uses_kernels(self, x: Tensor) -> bool:
        if self.fused is False or not self.training or self.act not in ("relu", "none"):
            return False
        return fused_norm.is_supported(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Batch norm alone, as ``nn.BatchNorm2d`` computes it."""
        return super().forward(x)

    def forward(self, x: Tensor, residual: Tensor | Pending | None = None) -> Tensor:
        if self._uses_kernels(x):
            return fused_norm.batch_norm_act(x, self, residual)
        y = self.normalize(x)
        if residual is not None:
            y = y + (residual.finish() if isinstance(residual, Pending) else residual)
        return ACTIVATIONS[self.act](y)

    def fork(self, x: Tensor, residual: Tensor | Pending | None = None) -> tuple[Tensor, Tensor]:
        """The output twice: for the next block's main branch and for its shortcut.

        The kernels then receive the two gradients separately and add them in registers, which saves autograd's own
        pass over three activation tensors per block.
        """
        if self._uses_kernels(x):
            return fused_norm.batch_norm_act(x, self, residual, fork=True)
        y = self(x, residual)
        return y, y

    def pooled(self, x: Tensor) -> Tensor:
        """``max_pool2d(act(batch_norm(x)), kernel_size=3, stride=2, padding=1)``, the end of a ResNet stem."""
        if self.act == "relu" and self._uses_kernels(x):
            return fused_norm.batch_norm_relu_pool(x, self)
        return F.max_pool2d(self(x), kernel_size=3, stride=2, padding=1)


class Pending:
    """A tensor whose batch norm (without activation) is still to be applied by the consumer's kernel."""

    def __init__(self, x: Tensor, norm: BatchNormAct):
        self.x, self.norm = x, norm

    def finish(self) -> Tensor:
        return self.norm.normalize(self.x)


def set_fused(model: nn.Module, fused: bool | None) -> nn.Module:
    """Select the Triton kernels (True or None: where they apply) or plain PyTorch (False) in every norm of a model."""
    for module in model.modules():
        if isinstance(module, BatchNormAct):
            module.fused = fused
    return model
