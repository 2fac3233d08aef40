"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) of queries and keys in one launch.

The pairs are those of GPT-NeoX: element i of the first half of the rotated dimensions turns with element i of the
second half. Dimensions beyond the rotated ones are copied. Angles and arithmetic are float32.

Legend: B batch, S sequence, H heads, D width of a head, R rotated dimensions (even, at most D), T tokens in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend_for
from .ranges import can_look, check_range
from .registration import Operator

__all__ = ["rope", "rope_2d", "rope_plain", "rotary_table"]

LAYOUTS = {"bshd": 4, "sbhd": 4, "thd": 3}


def rotary_table(
    length: int, dimensions: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin (length, dimensions / 2), float32, of position / base^(2 i / dimensions); made once and kept."""
    if dimensions < 2 or dimensions % 2:
        raise ValueError(f"dimensions must be even and positive, got {dimensions}")
    exponents = torch.arange(0, dimensions, 2, device=device, dtype=torch.float64) / dimensions
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] / base ** exponents[None]
    return angles.cos().float(), angles.sin().float()


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "bshd",
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q and k (None if there is none) rotated by their positions' angles; same shapes and memory orders.

    q (B, S, H, D), k (B, S, H', D) for "bshd"; (S, B, H, D) for "sbhd"; (T, H, D) for "thd", sequences one after the
    other, which begin at `cu_seqlens` (0, ..., T; integers). cos, sin (positions, R / 2), or, with `rotary_dim` = R,
    (positions, R) with an angle for each half. `positions` (B, S) or (S,), integers that index the tables, for cached
    decoding; by default a token's place in its sequence. ValueError for shapes that do not fit, and in the plain form
    on a CPU for positions that the tables do not hold; else the rotated elements of such tokens are NaN.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if (layout == "thd") != (cu_seqlens is not None):
        raise ValueError("cu_seqlens goes with layout 'thd', and only with it")
    _check(q, k, LAYOUTS[layout])
    for name, tensor in (("positions", positions), ("cu_seqlens", cu_seqlens)):
        if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise ValueError(f"{name} must be integers, not {tensor.dtype}")
    if cos.shape != sin.shape or cos.dim() != 2:
        raise ValueError(f"cos and sin must be (positions, R / 2 or R), not {tuple(cos.shape)} and {tuple(sin.shape)}")
    width = q.shape[-1]
    rotated = rotary_dim or 2 * cos.shape[1]
    if rotated > width or rotated % 2 or cos.shape[1] not in (rotated, rotated // 2):
        raise ValueError(f"tables of {cos.shape[1]} columns do not fit {rotated} rotated of {width} elements")
    q, k = (None if t is None else _as_bshd(t, layout) for t in (q, k))
    if positions is None and cu_seqlens is None and q.shape[1] > cos.shape[0]:
        raise ValueError(f"the tables hold {cos.shape[0]} positions, the sequences have {q.shape[1]}")
    if positions is not None:
        if positions.shape not in ((q.shape[1],), tuple(q.shape[:2])):
            raise ValueError(f"positions must be {tuple(q.shape[:2])} or ({q.shape[1]},), not {tuple(positions.shape)}")
        positions = positions.expand(q.shape[:2])
    results = _rotate(q, k, cos, sin, None, None, positions, cu_seqlens, 0, rotated)
    return tuple(None if t is None else _from_bshd(t, layout) for t in results)


def rope_2d(
    q: Tensor, k: Tensor | None, cos_down: Tensor, sin_down: Tensor, cos_across: Tensor, sin_across: Tensor, width: int
) -> tuple[Tensor, Tensor | None]:
    """q, k (B, S, H, D) of S = height * `width` places of a picture in row order: the first half of D turns with the
    row, by cos_down and sin_down (height, D / 4 or D / 2), the second with the column, by the (width, ...) tables."""
    _check(q, k, 4)
    head = q.shape[-1]
    if head % 4 or width < 1 or q.shape[1] % width:
        raise ValueError(f"need D in fours and S in rows of {width}, not D = {head}, S = {q.shape[1]}")
    columns = cos_down.shape[-1]
    for name, table, rows in (("down", cos_down, q.shape[1] // width), ("across", cos_across, width)):
        if (
            table.dim() != 2
            or table.shape[0] < rows
            or columns not in (head // 4, head // 2)
            or table.shape[1] != columns
        ):
            raise ValueError(f"table {name} must be ({rows}, {head // 4} or {head // 2}), not {tuple(table.shape)}")
    if sin_down.shape != cos_down.shape or sin_across.shape != cos_across.shape:
        raise ValueError("tables of sines and cosines must have the same shapes")
    return _rotate(_unit(q), None if k is None else _unit(k), cos_down, sin_down, cos_across, sin_across, None, None,
                   width, head)  # fmt: skip


def rope_plain(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cos_across: Tensor | None, sin_across: Tensor | None,
    positions: Tensor | None, starts: Tensor | None, width: int, rotated: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The plain form on (B, S, H, D); the arguments are the operator's."""
    place = torch.arange(q.shape[1], device=q.device)
    if starts is not None:
        place = place - starts.long()[torch.searchsorted(starts.long(), place, right=True) - 1]
    place = place.expand(q.shape[:2]) if positions is None else positions
    if cos_across is None:
        known = ((place >= 0) & (place < cos.shape[0]))[..., None]
        place = place.clamp(0, cos.shape[0] - 1).long()
        tables = [tuple(torch.where(known, table[place], float("nan")) for table in (cos, sin))]
    else:
        tables = [(cos[place // width], sin[place // width]), (cos_across[place % width], sin_across[place % width])]
    part = rotated // len(tables)

    def turn(x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        pieces = []
        for index, (c, s) in enumerate(tables):
            piece = wide[..., index * part : (index + 1) * part]
            c, s = (t.to(wide.dtype)[:, :, None].repeat(1, 1, 1, part // t.shape[-1]) for t in (c, s))
            first, second = piece.chunk(2, -1)
            pieces.append(piece * c + torch.cat([-second, first], -1) * s)
        return torch.cat([*(piece.to(x.dtype) for piece in pieces), x[..., rotated:]], -1)

    return turn(q), None if k is None else turn(k)


def _rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cos_across: Tensor | None, sin_across: Tensor | None,
    positions: Tensor | None, starts: Tensor | None, width: int, rotated: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    arguments = (q, k, cos, sin, cos_across, sin_across, positions, starts, width, rotated)
    if backend_for(q, k, cos, op="rope") == "plain" or not q.numel():
        _check_values(positions, starts, q.shape[1], cos.shape[0])
        return rope_plain(*arguments)
    q_out, k_out = rope_forward(*arguments)
    return q_out, None if k is None else k_out


def _check(q: Tensor, k: Tensor | None, dimensions: int) -> None:
    if q.dim() != dimensions or (k is not None and (k.dim() != dimensions or k.shape[-1] != q.shape[-1])):
        shapes = f"q {tuple(q.shape)}" + ("" if k is None else f", k {tuple(k.shape)}")
        raise ValueError(f"q and k must have {dimensions} dimensions here and heads of one width, not {shapes}")
    if k is not None and k.shape[: dimensions - 2] != q.shape[: dimensions - 2]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must have the same tokens")


def _check_values(positions: Tensor | None, starts: Tensor | None, tokens: int, table: int) -> None:
    """ValueError for positions beyond the tables or starts that make no sense, where the values can be read."""
    if positions is not None:
        check_range("positions", positions, 0, table - 1)
    if starts is None or not can_look(starts):
        return
    lengths = starts.diff()
    if not starts.numel() or starts[0] != 0 or starts[-1] != tokens or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must ascend from 0 to the {tokens} tokens, not {starts.tolist()}")
    if positions is None and lengths.numel() and lengths.max() > table:
        raise ValueError(f"the tables hold {table} positions, a sequence of cu_seqlens has {lengths.max().item()}")


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _as_bshd(x: Tensor, layout: str) -> Tensor:
    x = _unit(x)
    return x.transpose(0, 1) if layout == "sbhd" else x.unsqueeze(0) if layout == "thd" else x


def _from_bshd(x: Tensor, layout: str) -> Tensor:
    return x.transpose(0, 1).contiguous() if layout == "sbhd" else x.squeeze(0) if layout == "thd" else x


def _outputs(q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty results, dense, with dimensions in memory as those of the inputs."""

    def like(x: Tensor) -> Tensor:
        if x.stride(0) < x.stride(1):  # sequences outermost
            return x.new_empty((x.shape[1], x.shape[0], *x.shape[2:])).transpose(0, 1)
        return x.new_empty(x.shape)

    return like(q), q.new_empty(0) if k is None else like(k)


def _launch(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cos_across: Tensor | None,
    sin_across: Tensor | None,
    positions: Tensor | None,
    starts: Tensor | None,
    width: int,
    rotated: int,
) -> tuple[Tensor, Tensor]:
    return _launch_either(q, k, cos, sin, cos_across, sin_across, positions, starts, width, rotated, False)


def _fake(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cos_across: Tensor | None, sin_across: Tensor | None,
    positions: Tensor | None, starts: Tensor | None, width: int, rotated: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(q, k)


def _launch_transposed(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cos_across: Tensor | None,
    sin_across: Tensor | None,
    positions: Tensor | None,
    starts: Tensor | None,
    width: int,
    rotated: int,
) -> tuple[Tensor, Tensor]:
    q, k = _unit(q), None if k is None else _unit(k)
    return _launch_either(q, k, cos, sin, cos_across, sin_across, positions, starts, width, rotated, True)


def _launch_either(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cos_across: Tensor | None, sin_across: Tensor | None,
    positions: Tensor | None, starts: Tensor | None, width: int, rotated: int, backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from . import rotary_kernels

    q_out, k_out = _outputs(q, k)
    tables = [None if table is None else _unit(table) for table in (cos, sin, cos_across, sin_across)]
    if tables[0].stride(0) != tables[1].stride(0):
        tables = [None if table is None else table.contiguous() for table in tables]
    rotary_kernels.rotate(
        q, k, *tables, positions, starts, width, rotated, backward, q_out, None if k is None else k_out
    )
    return q_out, k_out


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, *tables_and_positions, ctx.width, ctx.rotated = inputs
    ctx.save_for_backward(*tables_and_positions)
    ctx.has_k = k is not None


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple:
    results = rope_backward(dq, dk if ctx.has_k else None, *ctx.saved_tensors, ctx.width, ctx.rotated)
    return results[0], results[1] if ctx.has_k else None, *(None,) * 8


rope_backward = Operator("rope_backward", _launch_transposed, _fake)
rope_forward = Operator("rope", _launch, _fake).differentiable(_setup, _backward)
