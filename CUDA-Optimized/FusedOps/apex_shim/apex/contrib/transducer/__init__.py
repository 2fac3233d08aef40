from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex.submodules import give_submodules
from fusedops import ops

__all__ = ["TransducerJoint", "TransducerLoss"]


class TransducerJoint(nn.Module):
    """f[b, t] + g[b, u]. ``opt`` and ``fwd_tile_size`` are accepted and have no effect."""

    def __init__(
        self,
        pack_output: bool = False,
        relu: bool = False,
        dropout: bool = False,
        opt: int = 1,
        fwd_tile_size: int = 4,
        dropout_prob: float = 0,
        probe_mask: bool = False,
    ) -> None:
        super().__init__()
        if probe_mask:
            raise ValueError("probe_mask: the mask of relu and dropout is not kept")
        self.pack_output, self.relu, self.dropout, self.dropout_prob = pack_output, relu, dropout, dropout_prob

    def forward(
        self,
        f: Tensor,
        g: Tensor,
        f_len: Tensor,
        g_len: Tensor,
        batch_offset: Tensor | None = None,
        packed_batch: int = 0,
    ) -> Tensor:
        if self.pack_output and (batch_offset is None or packed_batch == 0):
            raise ValueError("Please specify batch_offset and packed_batch when packing is enabled")
        return ops.transducer_joint(
            f, g, f_len, g_len, relu=self.relu, dropout=self.dropout_prob if self.dropout and self.training else 0.0,
            batch_offset=batch_offset if self.pack_output else None,
            packed_batch=packed_batch if self.pack_output else None,
        )  # fmt: skip


class TransducerLoss(nn.Module):
    """RNN-T loss, in the dtype of its input as in Apex. ``fuse_softmax_backward`` and ``opt`` have no effect: the
    softmax is fused.
    """

    def __init__(self, fuse_softmax_backward: bool = True, opt: int = 1, packed_input: bool = False) -> None:
        super().__init__()
        self.packed_input = packed_input

    def forward(
        self,
        x: Tensor,
        label: Tensor,
        f_len: Tensor,
        y_len: Tensor,
        blank_idx: int,
        batch_offset: Tensor | None = None,
        max_f_len: int | None = None,
        debug_list: list[Any] | None = None,
    ) -> Tensor:
        if self.packed_input and (batch_offset is None or max_f_len is None):
            raise ValueError("Please specify batch_offset and max_f_len when packing is enabled")
        if debug_list:
            raise ValueError("debug_list: alpha and beta are not given")
        loss = ops.transducer_loss(
            x, label, f_len, y_len, blank_idx, batch_offset=batch_offset if self.packed_input else None,
            max_f_len=max_f_len if self.packed_input else None,
        )  # fmt: skip
        return loss if x.dtype == torch.float64 else loss.to(x.dtype)


give_submodules(__name__)
