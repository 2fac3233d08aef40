"""``multi_tensor_applier(op, noop_flag, tensor_lists, *args)`` with the operations of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from apex.submodules import give_submodules

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """The operations are always there."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)

give_submodules(__name__)
