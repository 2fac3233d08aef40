"""The recurrent neural network transducer (Graves 2012, https://arxiv.org/abs/1211.3711): joint and loss.

Legend: B items, T frames, U symbols of the prediction network (labels + 1), H features, V classes. Packed tensors hold
the valid (frame, symbol) pairs of each item one after the other, item b up to row batch_offset[b] =
sum of f_len * g_len up to and with b.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import backend_for
from .autocast import promoted
from .ranges import can_look, check_range
from .registration import Operator

__all__ = ["joint_plain", "loss_plain", "transducer_joint", "transducer_loss"]


def transducer_joint(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    *,
    relu: bool = False,
    dropout: float = 0.0,
    batch_offset: Tensor | None = None,
    packed_batch: int | None = None,
    padding: float = -1.0,
) -> Tensor:
    """f[b, t] + g[b, u], with relu and dropout if asked for, of f (B, T, H), g (B, U, H) and their lengths (B,).

    (B, T, U, H) with `padding` where t or u is beyond the item's length; or, given `batch_offset` (B,) and the number
    of rows `packed_batch`, packed (rows, H). ValueError for shapes that do not fit, and in the plain form on a CPU for
    lengths or offsets that make no sense; else lengths are limited to T and U, and the packed rows of an item whose
    lengths contradict the offsets are NaN.
    """
    f, g = promoted(f, g)
    if f.dim() != 3 or g.dim() != 3 or f.shape[0] != g.shape[0] or f.shape[2] != g.shape[2] or f.dtype != g.dtype:
        mine, its = f"{f.dtype} {tuple(f.shape)}", f"{g.dtype} {tuple(g.shape)}"
        raise ValueError(f"need f (B, T, H) and g (B, U, H) of one type, not {mine} and {its}")
    if f_len.shape != f.shape[:1] or g_len.shape != f.shape[:1] or not 0 <= dropout < 1:
        lengths = f"{tuple(f_len.shape)} and {tuple(g_len.shape)}"
        raise ValueError(f"need lengths ({f.shape[0]},) and dropout in [0, 1), not {lengths} and {dropout}")
    if (batch_offset is None) != (packed_batch is None):
        raise ValueError("batch_offset and packed_batch go together")
    rows = -1 if packed_batch is None else packed_batch
    if backend_for(f, g, op="transducer_joint") == "plain" or not f.numel() or not g.numel():
        check_range("f_len", f_len, 0, f.shape[1])
        check_range("g_len", g_len, 0, g.shape[1])
        _check_offsets(batch_offset, f_len * g_len, rows)
        return joint_plain(f, g, f_len, g_len, relu, dropout, batch_offset, padding)
    # On the device, so that a captured graph draws anew at each replay.
    seed = torch.randint(0, 2**31 - 1, (1,), device=f.device) if dropout else f_len
    tensors = (f.contiguous(), g.contiguous(), f_len, g_len, batch_offset, seed)
    return joint_forward(*tensors, relu, float(dropout), float(padding), rows)


def joint_plain(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, relu: bool, dropout: float, ends: Tensor | None, padding: float
) -> Tensor:
    """The plain form. Its dropout draws other numbers."""
    h = f[:, :, None] + g[:, None]
    h = torch.relu(h) if relu else h
    h = F.dropout(h, dropout) if dropout else h
    inside = (torch.arange(f.shape[1], device=f.device) < f_len[:, None])[:, :, None]
    inside = inside & (torch.arange(g.shape[1], device=f.device) < g_len[:, None])[:, None]
    return h[inside] if ends is not None else torch.where(inside[..., None], h, padding)


def transducer_loss(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    blank: int,
    *,
    batch_offset: Tensor | None = None,
    max_f_len: int | None = None,
) -> Tensor:
    """-log P(label) of each item, float32 (B,), from logits x (B, T, U, V), labels (B, U - 1), and the numbers of
    frames f_len and of labels y_len (B,). With `batch_offset` (B,), ends by f_len * (y_len + 1), and T = `max_f_len`,
    x is packed (rows, V). The log-softmax and its derivative are part of it. ValueError for shapes that do not fit, and
    in the plain form on a CPU for lengths, labels or offsets that make no sense; else the item's loss and gradient are
    NaN.
    """
    packed = batch_offset is not None
    if packed != (max_f_len is not None) or x.dim() != (2 if packed else 4):
        raise ValueError(f"need x (B, T, U, V), or (rows, V) with batch_offset and max_f_len, not {tuple(x.shape)}")
    items = label.shape[0]
    if label.dim() != 2 or f_len.shape != (items,) or y_len.shape != (items,) or not 0 <= blank < x.shape[-1]:
        shapes = f"label {tuple(label.shape)}, f_len {tuple(f_len.shape)}, y_len {tuple(y_len.shape)}, blank {blank}"
        raise ValueError(f"need label (B, U - 1), lengths (B,) and a blank among {x.shape[-1]} classes, not {shapes}")
    if not packed and (x.shape[0], x.shape[2]) != (items, label.shape[1] + 1):
        raise ValueError(f"x {tuple(x.shape)} and label {tuple(label.shape)} do not fit")
    frames = max_f_len if packed else x.shape[1]
    if backend_for(x, op="transducer_loss") == "plain" or not x.numel():
        check_range("f_len", f_len, 1, frames)
        check_range("y_len", y_len, 0, label.shape[1])
        if can_look(label, y_len):
            used = torch.arange(label.shape[1]) < y_len[:, None]
            check_range("label", torch.where(used, label, 0), 0, x.shape[-1] - 1)
        _check_offsets(batch_offset, f_len * (y_len + 1), x.shape[0] if packed else -1)
        return loss_plain(x, label, f_len, y_len, blank, batch_offset, frames)
    return loss_forward(x.contiguous(), label.contiguous(), f_len, y_len, batch_offset, frames, blank)[0]


def loss_plain(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int, ends: Tensor | None, frames: int
) -> Tensor:
    """The plain form: the forward sums, a frame at a time."""
    wide = x if x.dtype == torch.float64 else x.float()
    scores = wide.log_softmax(-1)
    symbols = label.shape[1] + 1
    sound = (f_len >= 1) & (f_len <= frames) & (y_len >= 0) & (y_len < symbols)
    used = torch.arange(symbols - 1, device=x.device) < y_len[:, None]
    sound = sound & ~(used & ((label < 0) | (label >= x.shape[-1]))).any(1)
    f_len, y_len = f_len.clamp(1, frames), y_len.clamp(0, symbols - 1)
    if ends is not None:
        t, u = (torch.arange(n, device=x.device) for n in (frames, symbols))
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sound = sound & (starts >= 0) & (ends <= x.shape[0]) & (ends - starts == f_len * (y_len + 1))
        rows = starts[:, None, None] + t[None, :, None] * (y_len + 1)[:, None, None] + u[None, None]
        scores = scores[rows.clamp(0, x.shape[0] - 1).long()]
    by_blank = scores[..., blank]
    index = F.pad(label, (0, 1)).clamp(0, x.shape[-1] - 1)[:, None, :, None].expand(-1, frames, -1, 1)
    by_label = scores.gather(3, index.long())[..., 0]
    along = F.pad(by_label[:, :, :-1], (1, 0)).cumsum(2)
    row = torch.full_like(by_blank[:, 0], -1e30)
    row[:, 0] = 0
    ends_at = []
    for t in range(frames):
        row = along[:, t] + torch.logcumsumexp(row - along[:, t], 1)
        row = row + by_blank[:, t]
        ends_at.append(row)
    final = torch.stack(ends_at, 1)
    losses = -final[torch.arange(label.shape[0], device=x.device), f_len.long() - 1, y_len.long()]
    return losses * torch.where(sound, 1.0, float("nan")).to(losses.dtype)


def _check_offsets(ends: Tensor | None, counts: Tensor, rows: int) -> None:
    """ValueError unless the offsets are the running sums of the items' counts, and the last one is the number of
    ``rows``, where the values can be read.
    """
    if ends is None or not can_look(ends, counts):
        return
    if ends.shape != counts.shape or not torch.equal(ends.long(), counts.cumsum(0)) or int(counts.sum()) != rows:
        raise ValueError(
            f"batch_offset must be {counts.cumsum(0).tolist()}, the last one the number of rows, "
            f"not {ends.tolist()} with {rows} rows"
        )


def _joint_out(f: Tensor, g: Tensor, rows: int) -> Tensor:
    dense = (f.shape[0], f.shape[1], g.shape[1], f.shape[2])
    return f.new_empty(dense if rows < 0 else (rows, f.shape[2]))


def _launch_joint(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    ends: Tensor | None,
    seed: Tensor,
    relu: bool,
    dropout: float,
    padding: float,
    rows: int,
) -> Tensor:
    from . import transducer_kernels

    y = _joint_out(f, g, rows)
    transducer_kernels.joint(f, g, f_len, g_len, ends, seed, relu, dropout, padding, y)
    return y


def _fake_joint(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, ends: Tensor | None, seed: Tensor, relu: bool, dropout: float,
    padding: float, rows: int,
) -> Tensor:  # fmt: skip
    return _joint_out(f, g, rows)


def _launch_joint_backward(
    dy: Tensor,
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    ends: Tensor | None,
    seed: Tensor,
    relu: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    from . import transducer_kernels

    df, dg = f.new_empty(f.shape), g.new_empty(g.shape)
    transducer_kernels.joint_backward(dy.contiguous(), f, g, f_len, g_len, ends, seed, relu, dropout, df, dg)
    return df, dg


def _fake_joint_backward(
    dy: Tensor, f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, ends: Tensor | None, seed: Tensor, relu: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return f.new_empty(f.shape), g.new_empty(g.shape)


def _setup_joint(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.relu, ctx.dropout, _, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_joint(ctx: Any, dy: Tensor) -> tuple:
    return *joint_backward(dy, *ctx.saved_tensors, ctx.relu, ctx.dropout), *(None,) * 8


def _loss_out(x: Tensor, label: Tensor, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    losses = x.new_empty(label.shape[0], dtype=torch.float32)
    lse = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return losses, lse, x.new_empty((4, label.shape[0], frames, label.shape[1] + 1), dtype=torch.float32)


def _launch_loss(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, frames: int, blank: int
) -> tuple[Tensor, Tensor, Tensor]:
    from . import transducer_kernels

    outputs = _loss_out(x, label, frames)
    transducer_kernels.loss(x, label, f_len, y_len, ends, frames, blank, *outputs)
    return outputs


def _fake_loss(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, frames: int, blank: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _loss_out(x, label, frames)


def _launch_loss_backward(
    factor: Tensor,
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    ends: Tensor | None,
    losses: Tensor,
    lse: Tensor,
    lattice: Tensor,
    blank: int,
) -> Tensor:
    from . import transducer_kernels

    dx = x.new_empty(x.shape)
    arguments = (label, f_len, y_len, ends, lattice.shape[2], blank, losses, lse, lattice)
    transducer_kernels.loss_backward(factor.contiguous(), x, *arguments, dx)
    return dx


def _fake_loss_backward(
    factor: Tensor, x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, losses: Tensor,
    lse: Tensor, lattice: Tensor, blank: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def _setup_loss(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, _, ctx.blank = inputs
    losses, lse, lattice = output
    ctx.save_for_backward(*tensors, losses, lse, lattice)
    ctx.mark_non_differentiable(lse, lattice)
    ctx.set_materialize_grads(False)


def _backward_loss(ctx: Any, factor: Tensor | None, *_: None) -> tuple:
    nothing = (None,) * 6
    if factor is None:
        return None, *nothing
    return loss_backward(factor, *ctx.saved_tensors, ctx.blank), *nothing


joint_backward = Operator("transducer_joint_backward", _launch_joint_backward, _fake_joint_backward)
joint_forward = Operator("transducer_joint", _launch_joint, _fake_joint).differentiable(_setup_joint, _backward_joint)
loss_backward = Operator("transducer_loss_backward", _launch_loss_backward, _fake_loss_backward)
loss_forward = Operator("transducer_loss", _launch_loss, _fake_loss).differentiable(_setup_loss, _backward_loss)
