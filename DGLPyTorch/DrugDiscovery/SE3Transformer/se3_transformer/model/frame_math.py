"""The operations of ``fast_ops`` in plain PyTorch: their reference, and the way of edge frames without a GPU.

Arguments as there; gradients come from autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _degrees(spec: list[int], columns: Tensor, row_maps: Tensor):
    """Per degree: its dimension, its columns, the rows of its components, where its matrix begins."""
    first_channel = first_row = 0
    for degree, channels in zip(spec[::2], spec[1::2], strict=True):
        dim = 2 * degree + 1
        rows = row_maps[first_row : first_row + dim].tolist()
        offset = sum((2 * lower + 1) ** 2 for lower in range(degree))
        yield dim, columns[first_channel : first_channel + channels].long(), rows, offset
        first_channel += channels
        first_row += dim


def to_frame(
    x: Tensor, index: Tensor | None, order: Tensor | None, start: Tensor | None, rotations: Tensor, columns: Tensor,
    row_maps: Tensor, spec: list[int], rows: int, padded: int,
) -> Tensor:  # fmt: skip
    """(R, W) -> (rows, padded)."""
    source = x if index is None else x[index.long()]
    pieces: dict[int, Tensor] = {}
    for dim, place, row_map, offset in _degrees(spec, columns, row_maps):
        value = source[:, place[:, None] + torch.arange(dim, device=x.device)]
        matrix = rotations[:, offset : offset + dim * dim].view(-1, dim, dim).to(x.dtype)
        turned = (matrix @ value.mT).permute(1, 2, 0)  # (component, channel, E)
        pieces |= {row: turned[m] for m, row in enumerate(row_map) if row >= 0}
    joined = torch.cat([pieces[row] for row in sorted(pieces)])
    if len(joined) != rows:
        raise ValueError(f"the row maps name {len(joined)} rows of {rows}")
    return F.pad(joined, (0, padded - joined.shape[1]))


def from_frame(y: Tensor, rotations: Tensor, columns: Tensor, row_maps: Tensor, spec: list[int], width: int) -> Tensor:
    """(rows, P) -> (E, width)."""
    y = y[:, : len(rotations)]
    values, places = [], []
    for dim, place, row_map, offset in _degrees(spec, columns, row_maps):
        zeros = y.new_zeros(len(place), y.shape[1])
        parts = torch.stack([zeros if row < 0 else y[row : row + len(place)] for row in row_map])
        matrix = rotations[:, offset : offset + dim * dim].view(-1, dim, dim).to(y.dtype)
        values.append((matrix.mT @ parts.permute(2, 0, 1)).mT.flatten(1))
        places.append((place[:, None] + torch.arange(dim, device=y.device)).flatten())
    joined = torch.cat(values, 1)
    return joined[:, torch.cat(places).argsort()]


def conv(x: Tensor, h: Tensor, w: Tensor, blocks: list[int], rows: int) -> Tensor:
    """x (rows in, E), h (E, H), w (weight rows, H) -> (rows, E)."""
    edges, hidden = h.shape
    pieces: dict[int, Tensor] = {}
    for position in range(0, len(blocks), 8):
        m, x_plus, x_minus, inputs, y_plus, y_minus, outputs, weight = blocks[position : position + 8]
        width = 2 if m else 1
        matrix = w[weight : weight + inputs * width * outputs].view(inputs, width, outputs, hidden)
        matrix = matrix.permute(1, 0, 3, 2).reshape(width, inputs * hidden, outputs)

        def left(first: int, inputs: int = inputs) -> Tensor:
            return (x[first : first + inputs].T[:, :, None] * h[:, None, :]).reshape(edges, inputs * hidden)

        plus = left(x_plus)
        if not m:
            pieces[y_plus] = (plus @ matrix[0]).T
            continue
        minus = left(x_minus)
        pieces[y_plus] = (plus @ matrix[0] - minus @ matrix[1]).T
        pieces[y_minus] = (minus @ matrix[0] + plus @ matrix[1]).T
    joined = torch.cat([pieces[row] for row in sorted(pieces)])
    if len(joined) != rows:
        raise ValueError(f"the blocks fill {len(joined)} rows of {rows}")
    return joined


def mix_rows(
    w: Tensor, index: Tensor, coefficients: Tensor, index_back: Tensor, coefficients_back: Tensor, dtype: torch.dtype
) -> Tensor:
    """out[r] = sum over k of coefficients[r, k] * w[index[r, k]]."""
    total = sum(w[index[:, k].long()] * coefficients[:, k, None].to(w.dtype) for k in range(index.shape[1]))
    return total.to(dtype)


def segment_sum(x: Tensor, start: Tensor, index: Tensor) -> Tensor:
    """(E, W) -> (N, W)."""
    return x.new_zeros(len(start) - 1, x.shape[1]).index_add(0, index, x)


def attention(
    q: Tensor, kv: Tensor, start: Tensor, index: Tensor, heads: int, value_size: int, key_size: int, scale: float
) -> Tensor:
    """q (N, heads * key_size), kv (E, values then keys, heads outermost) -> (N, heads * value_size)."""
    value, key = kv.split([heads * value_size, heads * key_size], 1)
    value, key = value.unflatten(1, (heads, value_size)), key.unflatten(1, (heads, key_size))
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    score = (key * q.unflatten(1, (heads, key_size))[index]).sum(-1, dtype=exact) * scale
    place = index[:, None].expand_as(score)
    largest = score.new_zeros(len(q), heads).scatter_reduce(0, place, score.detach(), "amax", include_self=False)
    weight = (score - largest[index]).exp()
    total = weight.new_zeros(len(q), heads).index_add(0, index, weight)
    weight = (weight / total[index]).to(value.dtype)
    return value.new_zeros(len(q), heads, value_size).index_add(0, index, weight[..., None] * value).flatten(1)
