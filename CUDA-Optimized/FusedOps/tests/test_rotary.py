"""Rotary embedding: against rotation by complex numbers in float64, in every layout."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.ops import rope, rope_2d, rotary, rotary_table


def exact_rope(x, angles):
    """x (B, S, H, D) float64 times e^{i angle}, angles (B, S, R / 2): pairs are complex numbers."""
    half = angles.shape[-1]
    pairs = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def angles_of(positions, dimensions, base=10000.0):
    exponents = torch.arange(0, dimensions, 2, dtype=torch.float64, device=positions.device) / dimensions
    return positions.double()[..., None] / base**exponents


def both(device, no_worse, q, k, angles, call):
    """Compare outputs and gradients of call(q, k) in both backends with the float64 rotation."""
    dq, dk = torch.randn_like(q), None if k is None else torch.randn_like(k)
    tensors, above = [t for t in (q, k) if t is not None], [t for t in (dq, dk) if t is not None]
    wide = [t.double().requires_grad_() for t in tensors]
    outputs = [exact_rope(t, angles) for t in wide]
    expected = [*outputs, *torch.autograd.grad(outputs, wide, [t.double() for t in above])]
    results = {}
    for backend in ("plain", "triton"):
        own = [t.clone().requires_grad_() for t in tensors]
        with fusedops.use(backend):
            outputs = [t for t in call(own[0], None if k is None else own[1]) if t is not None]
            results[backend] = [*outputs, *torch.autograd.grad(outputs, own, above)]
    for ours, plain, exact in zip(results["triton"], results["plain"], expected, strict=True):
        no_worse(ours, plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width, dimensions", [(8, 8), (10, 6), (2, 2), (24, 24)])
def test_against_complex_numbers(device, triton_backend, no_worse, dtype, width, dimensions):
    for batch, length, heads, kv_heads in ((1, 1, 1, 1), (2, 5, 3, 1), (2, 3, 5, 2)):
        cos, sin = rotary_table(length + 2, dimensions, device=device)
        q = torch.randn(batch, length, heads, width, device=device).to(dtype)
        k = torch.randn(batch, length, kv_heads, width, device=device).to(dtype)
        angles = angles_of(torch.arange(length, device=device), dimensions).expand(batch, -1, -1)
        both(device, no_worse, q, k, angles, lambda q, k: rope(q, k, cos, sin))  # noqa: B023
        both(device, no_worse, q, None, angles, lambda q, k: rope(q, k, cos, sin))  # noqa: B023


def test_positions_from_a_cache(device, triton_backend, no_worse):
    cos, sin = rotary_table(50, 8, device=device)
    q, k = torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 3, 2, 8, device=device)
    positions = torch.tensor([[7, 8, 9], [30, 0, 49]], device=device)
    both(device, no_worse, q, k, angles_of(positions, 8), lambda q, k: rope(q, k, cos, sin, positions=positions))
    shared = angles_of(positions[0], 8).expand(2, -1, -1)
    both(device, no_worse, q, k, shared, lambda q, k: rope(q, k, cos, sin, positions=positions[0]))


def test_packed_sequences(device, triton_backend, no_worse):
    cos, sin = rotary_table(8, 6, device=device)
    starts = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32, device=device)  # the second is empty
    places = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4], device=device)
    q, k = torch.randn(1, 9, 3, 8, device=device), torch.randn(1, 9, 1, 8, device=device)

    def call(q, k):
        return [t[None] for t in rope(q[0], k[0], cos, sin, layout="thd", cu_seqlens=starts)]

    both(device, no_worse, q, k, angles_of(places, 6)[None], call)


def test_sequence_first_keeps_its_order_in_memory(device, triton_backend, no_worse):
    cos, sin = rotary_table(5, 8, device=device)
    q, k = torch.randn(2, 5, 3, 8, device=device), torch.randn(2, 5, 3, 8, device=device)

    def call(q, k):
        q, k = rope(q.transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous(), cos, sin, layout="sbhd")
        assert q.is_contiguous() and q.shape == (5, 2, 3, 8)
        return q.transpose(0, 1), k.transpose(0, 1)

    both(device, no_worse, q, k, angles_of(torch.arange(5, device=device), 8).expand(2, -1, -1), call)


def test_slices_of_a_joint_projection(device, backend):
    cos, sin = rotary_table(4, 8, device=device)
    joint = torch.randn(2, 4, 3 * 16 + 1, device=device)[..., 1:].view(2, 4, 3, 2, 8)
    q, k = joint[:, :, 0], joint[:, :, 1]
    found = rope(q, k, cos, sin)
    for ours, theirs in zip(found, rope(q.contiguous(), k.contiguous(), cos, sin), strict=True):
        assert torch.equal(ours, theirs)


def test_an_angle_for_each_half(device, triton_backend):
    cos, sin = torch.randn(5, 8, device=device), torch.randn(5, 8, device=device)
    x = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    dy = torch.randn(2, 5, 3, 8, device=device)
    rotated = torch.cat([-x[..., 4:], x[..., :4]], -1)
    expected = x * cos[None, :, None] + rotated * sin[None, :, None]
    found = rope(x, None, cos, sin, rotary_dim=8)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x, dy), torch.autograd.grad(expected, x, dy))


@pytest.mark.parametrize("doubled", [False, True])
def test_places_of_a_picture(device, triton_backend, no_worse, doubled):
    height, width, head = 3, 5, 16
    down, across = rotary_table(height, head // 2, device=device), rotary_table(width, head // 2, device=device)
    tables = [torch.cat([t, t], 1) if doubled else t for t in (*down, *across)]
    rows = torch.arange(height, device=device).repeat_interleave(width)
    columns = torch.arange(width, device=device).repeat(height)
    q, k = (
        torch.randn(2, height * width, 3, head, device=device),
        torch.randn(2, height * width, 1, head, device=device),
    )
    angles = [angles_of(places, head // 2).expand(2, -1, -1) for places in (rows, columns)]

    def exact(x):
        return torch.cat([exact_rope(x[..., i * 8 : i * 8 + 8], angles[i]) for i in range(2)], -1)

    for ours, x in zip(rope_2d(q, k, *tables, width), (q, k), strict=True):
        no_worse(ours, ours, exact(x.double()))
        with fusedops.use("plain"):
            plain = rope_2d(x, None, *tables, width)[0]
        no_worse(plain, plain, exact(x.double()))
    x = q.clone().requires_grad_()
    dy = torch.randn_like(q)
    wide = q.double().requires_grad_()
    expected = torch.autograd.grad(exact(wide), wide, dy.double())[0]
    torch.testing.assert_close(torch.autograd.grad(rope_2d(x, None, *tables, width)[0], x, dy)[0].double(), expected)


def test_lengths_stay_and_angles_are_relative(device, backend):
    cos, sin = rotary_table(40, 16, device=device)
    q, k = torch.randn(2, 1, 1, 1, 16, device=device).unbind(0)

    def score(i, j):
        turned = [rope(x, None, cos, sin, positions=torch.tensor([p], device=device))[0] for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 10), score(23, 30), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rope(q, None, cos, sin, positions=torch.tensor([33], device=device))[0].norm(), q.norm())


def test_wrong_inputs_are_refused(device, backend):
    cos, sin = rotary_table(4, 8, device=device)
    q = torch.randn(2, 4, 3, 8, device=device)
    for call, message in (
        (lambda: rope(q, None, cos, sin, layout="hsbd"), "layout 'hsbd'"),
        (lambda: rope(q[0], None, cos, sin, layout="thd"), "cu_seqlens goes with"),
        (lambda: rope(q, q[:, :2], cos, sin), "the same tokens"),
        (lambda: rope(q, None, cos[:2], sin[:2]), "hold 2 positions, the sequences have 4"),
        (lambda: rope(q[..., :2], None, cos, sin), "do not fit 8 rotated of 2 elements"),
        (lambda: rope(q, None, cos, sin, positions=torch.zeros(3)), "positions must be"),
        (lambda: rope_2d(q, None, cos, sin, cos, sin, 3), "in rows of 3"),
        (lambda: rotary_table(3, 5), "must be even"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert rope(q[:, :0], None, cos, sin)[0].shape == (2, 0, 3, 8)


def test_registered_compiled_and_repeatable(device, triton_backend):
    cos, sin = rotary_table(4, 8, device=device)
    q = torch.randn(2, 4, 3, 8, device=device, requires_grad=True)
    k = torch.randn(2, 4, 1, 8, device=device, requires_grad=True)
    torch.library.opcheck(rotary.rope_forward.operator, (q, k, cos, sin, None, None, None, None, 0, 8))

    def step(q, k):
        q, k = rope(q * 2, k, cos, sin)
        return (q * k).sum(-1)

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k), step(q, k)
    assert torch.equal(found, expected)
    for a, b in zip(*(torch.autograd.grad(y, (q, k), torch.ones_like(y)) for y in (found, expected)), strict=True):
        assert torch.equal(a, b)
