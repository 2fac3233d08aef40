from __future__ import annotations

from torch import Tensor

from apex.submodules import give_submodules
from fusedops import ops

__all__ = ["index_mul_2d"]


def index_mul_2d(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
    """in1[idx1] * in2."""
    return ops.index_mul_2d(in1, in2, idx1)


give_submodules(__name__)
