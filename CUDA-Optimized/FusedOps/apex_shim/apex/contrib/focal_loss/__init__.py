from __future__ import annotations

from torch import Tensor

from apex.submodules import give_submodules
from fusedops import ops

__all__ = ["FocalLoss", "focal_loss"]


def focal_loss(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positive_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum of the losses divided by ``num_positive_sum`` (one element)."""
    return ops.focal_loss(
        cls_output, cls_targets_at_level, num_positive_sum, num_classes=num_real_classes, alpha=alpha, gamma=gamma,
        label_smoothing=label_smoothing,
    )  # fmt: skip


class FocalLoss:
    """``FocalLoss.apply(...)`` is `focal_loss`."""

    apply = staticmethod(focal_loss)


give_submodules(__name__)
