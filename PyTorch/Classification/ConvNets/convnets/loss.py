"""Cross entropy with label smoothing (Szegedy et al. 2016, section 7) and mixup (Zhang et al. 2018).

N batch, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def classification_loss(
    logits_NK: Tensor, labels_N: Tensor, smoothing: float = 0.0, mix: Tensor | None = None
) -> Tensor:
    """Mean loss over the batch, in float32.

    With ``mix`` (a scalar tensor in [0, 1]) sample i has the target ``mix * y_i + (1 - mix) * y_(i-1)``, the partner
    that ``mixup`` blended it with.
    """
    logits_NK = logits_NK.float()
    loss = F.cross_entropy(logits_NK, labels_N, label_smoothing=smoothing)
    if mix is None:
        return loss
    return mix * loss + (1.0 - mix) * F.cross_entropy(logits_NK, labels_N.roll(1), label_smoothing=smoothing)


def mixup(images: Tensor, mix: Tensor) -> Tensor:
    """Blend each image with its predecessor in the (shuffled) batch: ``mix * x_i + (1 - mix) * x_(i-1)``."""
    return torch.lerp(images.roll(1, 0), images, mix.to(images.dtype))
