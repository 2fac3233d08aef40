"""Indices and lengths out of range: kernels read nothing outside of their tensors and give NaN; plain forms on a CPU
raise.

Tensors are cut out of larger ones full of a telltale number, so that reading outside of them would show.
"""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.ops import (
    cross_entropy,
    focal_loss,
    index_mul_2d,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rotary_table,
    transducer,
    transducer_joint,
    transducer_loss,
)
from fusedops.ops.indexing import index_mul_2d_plain
from fusedops.ops.rotary import rope_plain
from fusedops.ops.xentropy import cross_entropy_plain

TELLTALE = 1e6


def cut(tensor):
    """The tensor in the midst of a larger one."""
    around = torch.full((3 * tensor.numel(),), TELLTALE, device=tensor.device, dtype=tensor.dtype)
    middle = around[tensor.numel() : 2 * tensor.numel()].view(tensor.shape)
    middle.copy_(tensor)
    return middle


def plain_on_cpu(device):
    if device.type != "cpu":
        pytest.skip("on a GPU the plain forms cannot look either")
    return fusedops.use("plain")


@pytest.mark.parametrize("index_type", [torch.int64, torch.int32])
def test_index(device, triton_backend, index_type):
    a, b = (cut(torch.randn(n, 6, device=device)).requires_grad_() for n in (4, 5))
    index = torch.tensor([3, -1, 0, 4, 1], device=device, dtype=index_type)
    bad = torch.tensor([False, True, False, True, False], device=device)
    for y in (index_mul_2d(a, b, index), index_mul_2d_plain(a, b, index)):
        assert y[bad].isnan().all() and torch.equal(y[~bad], a[[3, 0, 1]] * b[~bad])
        da, db = torch.autograd.grad(y, (a, b), torch.ones_like(y), retain_graph=True)
        expected = torch.zeros_like(a).index_add(0, torch.tensor([3, 0, 1], device=device), b[~bad])
        torch.testing.assert_close(torch.where(da.isnan(), 0.0, da)[[0, 1, 3]], expected[[0, 1, 3]])
        assert torch.equal(db[~bad], a[[3, 0, 1]]) and db[bad].isnan().all()


def test_index_on_a_cpu(device):
    a, b = torch.randn(4, 6, device=device), torch.randn(2, 6, device=device)
    for index, found in (([0, 4], r"index\[1\] is 4, not within 0 and 3"), ([-1, 0], r"index\[0\] is -1")):
        with plain_on_cpu(device), pytest.raises(ValueError, match=found):
            index_mul_2d(a, b, torch.tensor(index, device=device))


@pytest.mark.parametrize("full", [False, True])
def test_rope_positions(device, triton_backend, full):
    tables = [t.repeat(1, 2) if full else t for t in rotary_table(4, 6, device=device)]
    cos, sin = (cut(t) for t in tables)
    q = torch.randn(1, 5, 2, 8, device=device, requires_grad=True)
    positions = torch.tensor([[3, 4, -1, 0, 1 << 40]], device=device)
    bad = torch.tensor([False, True, True, False, True], device=device)
    arguments = (cos, sin, None, None, positions, None, 0, 6)
    for y in (rope(q, None, cos, sin, positions=positions, rotary_dim=6)[0], rope_plain(q, None, *arguments)[0]):
        assert y[:, bad, :, :6].isnan().all()
        assert torch.equal(y[..., 6:], q[..., 6:])  # those are not rotated
        good = rope(q[:, ~bad], None, cos, sin, positions=positions[:, ~bad], rotary_dim=6)[0]
        torch.testing.assert_close(y[:, ~bad], good)
        (dq,) = torch.autograd.grad(y, q, torch.ones_like(y))
        assert dq[:, bad, :, :6].isnan().all() and dq[:, ~bad].isfinite().all()


def test_rope_sequences_longer_than_the_tables(device, triton_backend):
    cos, sin = (cut(t) for t in rotary_table(3, 8, device=device))
    q = torch.randn(7, 2, 8, device=device)
    starts = torch.tensor([0, 2, 7], device=device)
    y = rope(q, None, cos, sin, layout="thd", cu_seqlens=starts)[0]
    assert y[:5].isfinite().all() and y[5:].isnan().all()


@pytest.mark.parametrize(
    "options, found",
    [
        ({"positions": [0, 3, 1]}, r"positions\[0, 1\] is 3, not within 0 and 2"),
        ({"positions": [0, -2, 1]}, r"positions\[0, 1\] is -2"),
        ({"cu_seqlens": [0, 2]}, "must ascend from 0 to the 3 tokens"),
        ({"cu_seqlens": [1, 3]}, "must ascend from 0"),
        ({"cu_seqlens": [0, 2, 1, 3]}, "must ascend from 0"),
        ({"cu_seqlens": [0, 3]}, "hold 2 positions, a sequence of cu_seqlens has 3"),
    ],
)
def test_rope_on_a_cpu(device, options, found):
    packed = "cu_seqlens" in options
    q = torch.randn(3, 2, 8, device=device)
    tables = rotary_table(2 if "hold" in found else 3, 8, device=device)
    options = {name: torch.tensor(value, device=device) for name, value in options.items()}
    with plain_on_cpu(device), pytest.raises(ValueError, match=found):
        rope(q if packed else q[None], None, *tables, layout="thd" if packed else "bshd", **options)


def joint_inputs(device):
    f, g = (cut(torch.randn(2, n, 6, device=device)).requires_grad_() for n in (3, 2))
    return f, g


def test_joint_lengths_are_limited(device, triton_backend):
    f, g = joint_inputs(device)
    too_much, right = torch.tensor([9, -4], device=device), torch.tensor([3, 0], device=device)
    symbols = torch.tensor([2, 2], device=device)
    y, expected = (transducer_joint(f, g, n, symbols, relu=True) for n in (too_much, right))
    assert torch.equal(y, expected)
    for mine, its in zip(*(torch.autograd.grad(t.sum(), (f, g)) for t in (y, expected)), strict=True):
        assert torch.equal(mine, its)
    y, expected = (transducer_joint(f, g, right, n) for n in (symbols + 70, symbols))
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "ends, rows, nan",
    [
        ([6, 8], 8, []),
        ([6, 9], 9, [1]),  # the second item has 2 pairs
        ([5, 7], 7, [0]),
        ([6, 8], 7, [1]),  # fewer rows than pairs
        ([6, 8], 30, [1]),
        ([-3, 8], 8, [0, 1]),
        ([60, 62], 8, [0, 1]),
    ],
)
def test_packed_joint_offsets(device, triton_backend, ends, rows, nan):
    f, g = joint_inputs(device)
    f_len, g_len = torch.tensor([3, 1], device=device), torch.tensor([2, 2], device=device)
    options = {"batch_offset": torch.tensor(ends, device=device), "packed_batch": rows}
    y = transducer_joint(f, g, f_len, g_len, **options)
    start = min(max(ends[0], 0), rows)
    for item, part in enumerate((y[:start], y[start:])):
        assert part.isnan().all() if item in nan else part.isfinite().all()
    if 0 not in nan:
        assert torch.equal(y[:6], (f[0, :, None] + g[0, None]).reshape(6, 6))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y, (f, g), torch.ones_like(y)))


def loss_inputs(device, packed):
    f_len, y_len = torch.tensor([3, 2], device=device), torch.tensor([1, 2], device=device)
    label = torch.tensor([[1, 77], [3, 2]], device=device)  # 77 is beyond the item's labels, so of no account
    x = cut(torch.randn(*((12,) if packed else (2, 3, 3)), 5, device=device)).requires_grad_()
    options = {"batch_offset": torch.tensor([6, 12], device=device), "max_f_len": 3} if packed else {}
    return x, label, f_len, y_len, options


SPOILT = {
    "f_len too long": (lambda label, f, y, ends: f.__setitem__(0, 4)),
    "f_len 0": (lambda label, f, y, ends: f.__setitem__(0, 0)),
    "y_len too long": (lambda label, f, y, ends: y.__setitem__(0, 3)),
    "y_len negative": (lambda label, f, y, ends: y.__setitem__(0, -1)),
    "label too large": (lambda label, f, y, ends: label.__setitem__((0, 0), 5)),
    "label negative": (lambda label, f, y, ends: label.__setitem__((0, 0), -7)),
    "offset": (lambda label, f, y, ends: ends.__setitem__(0, 5)),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SPOILT)
def test_loss(device, triton_backend, packed, name):
    """The item in question has a loss of NaN; of the dense form the other one is as it was."""
    if name == "offset" and not packed:
        return
    x, label, f_len, y_len, options = loss_inputs(device, packed)
    expected = transducer_loss(x, label, f_len, y_len, 0, **options)
    assert expected.isfinite().all()
    SPOILT[name](label, f_len, y_len, options.get("batch_offset"))
    ends = options.get("batch_offset")
    plain = transducer.loss_plain(x, label, f_len, y_len, 0, ends, 3)
    losses = transducer_loss(x, label, f_len, y_len, 0, **options)
    assert losses[0].isnan() and plain[0].isnan()
    if name != "offset":
        torch.testing.assert_close(losses[1], expected[1])
        torch.testing.assert_close(plain[1], expected[1])
    (dx,) = torch.autograd.grad(losses.sum(), x)
    touched = (dx.isnan() | (dx != 0)).any(-1)
    assert (dx.isnan().any() or name in ("f_len 0", "y_len negative")) and touched.any()


@pytest.mark.parametrize(
    "name, found",
    [
        ("f_len too long", r"f_len\[0\] is 4, not within 1 and 3"),
        ("f_len 0", r"f_len\[0\] is 0"),
        ("y_len too long", r"y_len\[0\] is 3, not within 0 and 2"),
        ("label too large", r"label\[0, 0\] is 5, not within 0 and 4"),
        ("label negative", r"label\[0, 0\] is -7"),
        ("offset", r"batch_offset must be \[6, 12\], the last one the number of rows, not \[5, 12\] with 12 rows"),
    ],
)
def test_loss_on_a_cpu(device, name, found):
    x, label, f_len, y_len, options = loss_inputs(device, True)
    with plain_on_cpu(device):
        assert transducer_loss(x, label, f_len, y_len, 0, **options).isfinite().all()
        SPOILT[name](label, f_len, y_len, options["batch_offset"])
        with pytest.raises(ValueError, match=found):
            transducer_loss(x, label, f_len, y_len, 0, **options)


def test_joint_on_a_cpu(device):
    f, g = joint_inputs(device)
    f_len, g_len = torch.tensor([3, 1], device=device), torch.tensor([2, 2], device=device)
    with plain_on_cpu(device):
        with pytest.raises(ValueError, match=r"f_len\[0\] is 4, not within 0 and 3"):
            transducer_joint(f, g, f_len + 1, g_len)
        with pytest.raises(ValueError, match=r"g_len\[0\] is 3, not within 0 and 2"):
            transducer_joint(f, g, f_len, g_len + 1)
        with pytest.raises(ValueError, match=r"batch_offset must be \[6, 8\], .* not \[6, 8\] with 9 rows"):
            transducer_joint(f, g, f_len, g_len, batch_offset=torch.tensor([6, 8]), packed_batch=9)


@pytest.mark.parametrize("smoothing, z_loss, softcap", [(0.0, 0.0, 0.0), (0.1, 1e-2, 5.0)])
def test_targets_of_cross_entropy(device, triton_backend, monkeypatch, smoothing, z_loss, softcap):
    x = cut(torch.randn(5, 7, device=device)).requires_grad_()
    target = torch.tensor([6, 7, -1, -100, 0], device=device)
    bad = torch.tensor([False, True, True, False, False], device=device)
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap or None}
    losses = cross_entropy(x, target, reduction="none", **options)
    monkeypatch.setattr("fusedops.ops.ranges.can_look", lambda *_: False)  # as on a GPU
    plain = cross_entropy_plain(x, target, -100, smoothing, z_loss, softcap)
    assert torch.equal(losses.isnan(), bad) and torch.equal(plain.isnan(), bad) and losses[3] == plain[3] == 0
    torch.testing.assert_close(losses[~bad], plain[~bad])


def test_targets_on_a_cpu(device):
    x, weight = torch.randn(2, 7, device=device), torch.randn(7, 7, device=device)
    target = torch.tensor([-100, 7], device=device)
    with plain_on_cpu(device):
        for loss in (lambda: cross_entropy(x, target), lambda: linear_cross_entropy(x, weight, target)):
            with pytest.raises(ValueError, match=r"target\[1\] is 7, not within 0 and 6"):
                loss()
        with pytest.raises(ValueError, match=r"target\[0\] is -100, not within -2 and 6"):
            focal_loss(x, target)


@pytest.mark.parametrize(
    "call, found",
    [
        (lambda x, i: index_mul_2d(x, x, i.float()), "index must be int64 or int32, not torch.float32"),
        (lambda x, i: rope(x[None, :, None], None, x, x, positions=i.float()), "positions must be integers"),
        (
            lambda x, i: linear_cross_entropy(x, x.bfloat16(), i),
            "one floating-point type, not .*32, .*bfloat16",
        ),
        (lambda x, i: linear_cross_entropy(x, x, i.to(torch.uint8)), "int64 or int32, not torch.uint8"),
        (lambda x, i: rms_norm(i, 4), "input must be of a floating-point type, not torch.int64"),
        (lambda x, i: layer_norm(x, 4, i), "weight must be of a floating-point type, not torch.int64"),
        (lambda x, i: layer_norm(x, 4, out_dtype=torch.int32), "out_dtype must be a floating-point type"),
    ],
)
def test_types(backend, device, call, found):
    with pytest.raises(ValueError, match=found):
        call(torch.randn(4, 4, device=device), torch.arange(4, device=device))
