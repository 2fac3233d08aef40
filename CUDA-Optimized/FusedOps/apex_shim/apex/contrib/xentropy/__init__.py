from __future__ import annotations

from torch import Tensor

from apex.submodules import give_submodules
from fusedops import ops

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """``SoftmaxCrossEntropyLoss.apply(logits, labels, ...)``: the losses of the rows, [N]."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Rows whose label is ``padding_idx`` (0 unless told otherwise!) give 0. In the dtype of the logits, or
        float32 with
        ``half_to_float``; computed in float32 either way.
        """
        losses = ops.cross_entropy(
            logits, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing
        )
        return losses if half_to_float else losses.to(logits.dtype)


give_submodules(__name__)
