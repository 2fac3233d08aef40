"""The kernels as PyTorch operators: opaque to torch.compile, with shapes for tracing and gradients registered.

Blocks are lists of 8 numbers per |m| (``frame_tables.Block``); ``spec`` lists (degree, channels) of a fiber,
``columns`` where each channel's first component lies in a packed row, ``row_maps`` the rows of each degree's components
in the (rows, P) matrix of frames, -1 where there is none; P is the number of edges, padded with zeros. ``frame_math``
has the same operations in plain PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from . import conv_kernels, frame_kernels, norm_kernels, segment_kernels


@custom_op("se3_transformer::to_frame", mutates_args=())
def to_frame(
    x: Tensor, index: Tensor | None, order: Tensor | None, start: Tensor | None, rotations: Tensor, columns: Tensor,
    row_maps: Tensor, spec: list[int], rows: int, padded: int,
) -> Tensor:  # fmt: skip
    """Packed rows x (R, W), gathered by ``index`` (E,) if given, turned into the frames of the edges: (rows, padded).

    ``order``, ``start``: the edges by source and where each source's begin, for the gradient of a gather.
    """
    return frame_kernels.to_frame(x.contiguous(), index, rotations, columns, row_maps, spec, rows, padded)


@to_frame.register_fake
def _(x, index, order, start, rotations, columns, row_maps, spec, rows, padded):
    return x.new_empty(rows, padded)


def _to_frame_setup(ctx, inputs, output) -> None:
    x, index, order, start, rotations, columns, row_maps, spec, _, _ = inputs
    ctx.save_for_backward(order, start, rotations, columns, row_maps)
    ctx.spec, ctx.width, ctx.gathers = spec, x.shape[1], index is not None


def _to_frame_backward(ctx, grad):
    order, start, rotations, columns, row_maps = ctx.saved_tensors
    dx = from_frame(grad, rotations, columns, row_maps, ctx.spec, ctx.width)
    if ctx.gathers:
        dx = segment_gather(dx, order, start)
    return (dx, *(None,) * 9)


to_frame.register_autograd(_to_frame_backward, setup_context=_to_frame_setup)


@custom_op("se3_transformer::segment_gather", mutates_args=())
def segment_gather(x: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """out[n] = sum of x[order[i]] for start[n] <= i < start[n + 1]; part of a backward pass, without gradient."""
    return segment_kernels.segment_sum(x.contiguous(), order, start)


@segment_gather.register_fake
def _(x, order, start):
    return x.new_empty(start.shape[0] - 1, x.shape[1])


@custom_op("se3_transformer::from_frame", mutates_args=())
def from_frame(y: Tensor, rotations: Tensor, columns: Tensor, row_maps: Tensor, spec: list[int], width: int) -> Tensor:
    """Components (rows, P) turned back from the frames and packed: (E, width), of the first E columns."""
    return frame_kernels.from_frame(y.contiguous(), rotations, columns, row_maps, spec, width)


@from_frame.register_fake
def _(y, rotations, columns, row_maps, spec, width):
    return y.new_empty(rotations.shape[0], width)


def _from_frame_setup(ctx, inputs, output) -> None:
    y, rotations, columns, row_maps, spec, _ = inputs
    ctx.save_for_backward(rotations, columns, row_maps)
    ctx.spec, ctx.shape = spec, y.shape


def _from_frame_backward(ctx, grad):
    rotations, columns, row_maps = ctx.saved_tensors
    return to_frame(grad, None, None, None, rotations, columns, row_maps, ctx.spec, *ctx.shape), *(None,) * 5


from_frame.register_autograd(_from_frame_backward, setup_context=_from_frame_setup)


def _padded(x: Tensor, dimension: int) -> Tensor:
    """Contiguous, with zeros up to a multiple of 16 edges, which is what graphs have from `frame_tables` on.

    Other numbers of edges are slow, and Triton 3.6 was seen to compile them wrongly: gradients of x and h in 16 bits,
    of pairs of components with more outputs than a tile, changed from run to run on an H200.
    """
    missing = -x.shape[dimension] % 16
    return F.pad(x, (0, missing) if dimension == 1 else (0, 0, 0, missing)) if missing else x.contiguous()


@custom_op("se3_transformer::conv", mutates_args=())
def conv(x: Tensor, h: Tensor, w: Tensor, blocks: list[int], rows: int) -> Tensor:
    """The kernels in the frames: x (rows in, E), radial profiles h (E, H), weights w (weight rows, H) -> (rows, E)."""
    edges = x.shape[1]
    x, h = _padded(x, 1), _padded(h, 0)
    return conv_kernels.conv_forward(x, h, w.contiguous(), tuple(blocks), rows)[:, :edges].contiguous()


@conv.register_fake
def _(x, h, w, blocks, rows):
    return x.new_empty(rows, x.shape[1])


@custom_op("se3_transformer::conv_backward", mutates_args=())
def conv_backward(dy: Tensor, x: Tensor, h: Tensor, w: Tensor, blocks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, h and w."""
    edges, w = len(h), w.contiguous()
    dy, x, h = _padded(dy, 1), _padded(x, 1), _padded(h, 0)
    dx, dh = conv_kernels.conv_backward_input(dy, x, h, w, tuple(blocks))
    dw = conv_kernels.conv_backward_weight(dy, x, h, w.shape[0], tuple(blocks))
    return dx[:, :edges].contiguous(), dh[:edges].contiguous(), dw.to(w.dtype)


@conv_backward.register_fake
def _(dy, x, h, w, blocks):
    return torch.empty_like(x), torch.empty_like(h), torch.empty_like(w)


def _conv_setup(ctx, inputs, output) -> None:
    x, h, w, blocks, _ = inputs
    ctx.save_for_backward(x, h, w)
    ctx.blocks = blocks


def _conv_backward(ctx, grad):
    return *conv_backward(grad, *ctx.saved_tensors, ctx.blocks), None, None


conv.register_autograd(_conv_backward, setup_context=_conv_setup)


@custom_op("se3_transformer::mix_rows", mutates_args=())
def mix_rows(
    w: Tensor, index: Tensor, coefficients: Tensor, index_back: Tensor, coefficients_back: Tensor, dtype: torch.dtype
) -> Tensor:
    """out[r] = sum over k of coefficients[r, k] * w[index[r, k]]; the ``_back`` tables are those of the transpose."""
    return frame_kernels.mix_rows(w.contiguous(), index, coefficients, dtype)


@mix_rows.register_fake
def _(w, index, coefficients, index_back, coefficients_back, dtype):
    return w.new_empty(index.shape[0], w.shape[1], dtype=dtype)


def _mix_rows_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.dtype = inputs[0].dtype


def _mix_rows_backward(ctx, grad):
    index, coefficients, index_back, coefficients_back = ctx.saved_tensors
    return mix_rows(grad, index_back, coefficients_back, index, coefficients, ctx.dtype), *(None,) * 5


mix_rows.register_autograd(_mix_rows_backward, setup_context=_mix_rows_setup)


@custom_op("se3_transformer::segment_sum", mutates_args=())
def segment_sum(x: Tensor, start: Tensor, index: Tensor) -> Tensor:
    """x (E, W) -> (N, W): the sum over the edges into each node; ``index`` (E,) is each edge's node, ascending."""
    return segment_kernels.segment_sum(x.contiguous(), None, start)


@segment_sum.register_fake
def _(x, start, index):
    return x.new_empty(start.shape[0] - 1, x.shape[1])


def _segment_sum_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _segment_sum_backward(ctx, grad):
    (index,) = ctx.saved_tensors
    return grad[index], None, None


segment_sum.register_autograd(_segment_sum_backward, setup_context=_segment_sum_setup)


@custom_op("se3_transformer::attention", mutates_args=())
def _attention(
    q: Tensor, kv: Tensor, start: Tensor, heads: int, value_size: int, key_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    return segment_kernels.attention_forward(q.contiguous(), kv.contiguous(), start, heads, value_size, key_size, scale)


@_attention.register_fake
def _(q, kv, start, heads, value_size, key_size, scale):
    return q.new_empty(q.shape[0], heads * value_size), q.new_empty(q.shape[0], heads, dtype=torch.float32)


@custom_op("se3_transformer::attention_backward", mutates_args=())
def _attention_backward_op(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, start: Tensor, heads: int, value_size: int,
    key_size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arguments = (heads, value_size, key_size, scale)
    return segment_kernels.attention_backward(
        dout.contiguous(), out, lse, q.contiguous(), kv.contiguous(), start, *arguments
    )


@_attention_backward_op.register_fake
def _(dout, out, lse, q, kv, start, heads, value_size, key_size, scale):
    return torch.empty_like(q), torch.empty_like(kv)


def _attention_setup(ctx, inputs, output) -> None:
    q, kv, start, *ctx.sizes = inputs
    ctx.save_for_backward(*output, q, kv, start)


def _attention_backward(ctx, dout, _):
    return *_attention_backward_op(dout, *ctx.saved_tensors, *ctx.sizes), *(None,) * 5


_attention.register_autograd(_attention_backward, setup_context=_attention_setup)


def attention(
    q: Tensor, kv: Tensor, start: Tensor, index: Tensor, heads: int, value_size: int, key_size: int, scale: float
) -> Tensor:
    """Queries q (N, heads * key_size), and per edge [values | keys], each with heads outermost, kv (E, heads *
    (value_size + key_size)) -> softmax over the edges into each node times the values: (N, heads * value_size)."""
    return _attention(q, kv, start, heads, value_size, key_size, scale)[0]


@custom_op("se3_transformer::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, clamp: float) -> Tensor:
    """``x / |x| * relu(layer_norm(|x|))`` for x (N, C, 2 d + 1), statistics over C, lengths at least ``clamp``."""
    return norm_kernels.norm_forward(x.contiguous(), weight.contiguous(), bias.contiguous(), eps, clamp)


@norm.register_fake
def _(x, weight, bias, eps, clamp):
    return x.new_empty(x.shape)


@custom_op("se3_transformer::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, clamp: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    arguments = (dy.contiguous(), x.contiguous(), weight.contiguous(), bias.contiguous())
    dx, dweight, dbias = norm_kernels.norm_backward(*arguments, eps, clamp)
    # Two rows of one tensor would be outputs that share memory, which an operator must not have.
    return dx, dweight.to(weight.dtype, copy=True), dbias.to(bias.dtype, copy=True)


@norm_backward.register_fake
def _(dy, x, weight, bias, eps, clamp):
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(bias)


def _norm_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.constants = inputs[3:]


def _norm_backward(ctx, grad):
    return *norm_backward(grad, *ctx.saved_tensors, *ctx.constants), None, None


norm.register_autograd(_norm_backward, setup_context=_norm_setup)
