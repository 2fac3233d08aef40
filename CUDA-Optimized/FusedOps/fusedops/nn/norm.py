"""LayerNorm and RMSNorm as torch.nn has them, on the fused operators; weights load both ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ops import norm as ops

__all__ = ["LayerNorm", "RMSNorm"]


class _Options:
    """What both modules have beyond torch's: see `fusedops.ops.norm.layer_norm`."""

    zero_centred = False

    def _set(self, memory_efficient: bool, zero_centred: bool, out_dtype: torch.dtype | None) -> None:
        self.memory_efficient, self.zero_centred, self.out_dtype = memory_efficient, zero_centred, out_dtype
        self._looked_for_zeros = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centred and self.weight is not None:
            nn.init.zeros_(self.weight)

    def _arguments(self) -> dict:
        if self.memory_efficient and not self._looked_for_zeros and not torch.compiler.is_compiling():
            self._looked_for_zeros = True
            self._refuse_zeros()
        options = ("memory_efficient", "zero_centred", "out_dtype")
        return {name: getattr(self, name) for name in options}

    def _refuse_zeros(self) -> None:
        """Once a module: a weight that starts at 0 would give NaN gradients, so it is better said at once."""
        if self.weight is None or self.weight.device.type == "meta":
            return
        zeros = int((self.weight.detach() == (-1 if self.zero_centred else 0)).sum())
        if zeros:
            raise ValueError(
                f"{zeros} of {self.weight.numel()} weights scale by 0, so memory_efficient=True cannot recover the "
                "input from the output; use memory_efficient=False for this module"
            )


class LayerNorm(_Options, nn.LayerNorm):
    """torch.nn.LayerNorm with the options of `fusedops.ops.layer_norm`; forward(x) or forward(x, residual) -> (y, sum).

    ValueError at the first call if memory_efficient and a weight is 0.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
        zero_centred: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self._set(memory_efficient, zero_centred, out_dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        arguments = (self.normalized_shape, self.weight, self.bias, self.eps)
        if residual is None:
            return ops.layer_norm(x, *arguments, **self._arguments())
        return ops.add_layer_norm(x, residual, *arguments, **self._arguments())


class RMSNorm(_Options, nn.RMSNorm):
    """torch.nn.RMSNorm with the options of `fusedops.ops.rms_norm`; forward(x) or forward(x, residual) -> (y, sum).

    ValueError at the first call if memory_efficient and a weight is 0.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
        zero_centred: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self._set(memory_efficient, zero_centred, out_dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        arguments = (self.normalized_shape, self.weight, self.eps)
        if residual is None:
            return ops.rms_norm(x, *arguments, **self._arguments())
        return ops.add_rms_norm(x, residual, *arguments, **self._arguments())
