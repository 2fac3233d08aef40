"""Rows by an index times rows: against float64, twice differentiated."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.ops import index_mul_2d, indexing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_type", [torch.int64, torch.int32])
def test_against_float64(device, triton_backend, no_worse, dtype, index_type):
    for sources, rows, width in ((1, 1, 1), (5, 17, 3), (40, 9, 64), (3, 20, 130)):
        index = torch.randint(0, sources, (rows,), device=device, dtype=index_type)
        a, b, dy, da, db = (
            torch.randn(n, width, device=device).to(dtype) for n in (sources, rows, rows, sources, rows)
        )
        second = {}
        for name, tensors in (("exact", [t.double() for t in (a, b, dy, da, db)]), ("plain", None), ("triton", None)):
            a_, b_, dy_, da_, db_ = tensors or [t.clone() for t in (a, b, dy, da, db)]
            leaves = [t.requires_grad_() for t in (a_, b_, dy_)]
            with fusedops.use("plain" if name == "exact" else name):
                y = index_mul_2d(a_, b_, index)
                first = torch.autograd.grad(y, leaves[:2], dy_, create_graph=True)
                again = torch.autograd.grad(first, leaves, (da_, db_))
            second[name] = [y, *first, *again]
        for ours, plain, exact in zip(second["triton"], second["plain"], second["exact"], strict=True):
            no_worse(ours, plain, exact, scale=1)


def test_gradients_by_differences(device):
    a, b = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)
    index = torch.tensor([0, 3, 3, 1, 0, 3])
    assert torch.autograd.gradgradcheck(lambda a, b: index_mul_2d(a, b, index), (a, b.requires_grad_()))


def test_strides_nothing_and_wrong_inputs(device, backend):
    a, b = torch.randn(6, 5, device=device), torch.randn(3, 4, device=device)
    index = torch.tensor([2, 0, 2], device=device)
    torch.testing.assert_close(index_mul_2d(a[:, 1:], b, index), a[index, 1:] * b)
    torch.testing.assert_close(index_mul_2d(a.t()[:4, :4], b, index), a.t()[:4, :4][index] * b)
    assert index_mul_2d(a[:, :4], b[:0], index[:0]).shape == (0, 4)
    with pytest.raises(ValueError, match=r"not torch.float32 \(6, 5\), torch.float32 \(3, 4\)"):
        index_mul_2d(a, b, index)


def test_registered_compiled_and_repeatable(device, triton_backend):
    a, b = torch.randn(4, 3, device=device, requires_grad=True), torch.randn(50, 3, device=device, requires_grad=True)
    index = torch.randint(0, 4, (50,), device=device)
    torch.library.opcheck(indexing.pick.operator, (a, b, index))
    torch.library.opcheck(indexing.sums.operator, (b, b.detach(), index, 4))

    def step(a, b):
        return index_mul_2d(a * 2, b, index)

    found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b), step(a, b)
    runs = [torch.autograd.grad(y, (a, b), torch.ones_like(y)) for y in (found, expected, step(a, b))]
    assert torch.equal(found, expected)
    assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))
