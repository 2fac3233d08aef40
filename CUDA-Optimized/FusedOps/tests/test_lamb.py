"""LAMB's one launch: the order of its two passes, tensors of many work items, what it leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fusedops
from fusedops.ops.multi_tensor_table import two_passes, work_items
from fusedops.optim import LAMB, lamb


@pytest.mark.parametrize("lag", [0, 3, 1 << 20])
def test_second_passes_follow_first_ones(lag):
    numels = [40, 0, 7, 160, 16, 16, 16]
    _, first_item = work_items(numels, np.zeros(len(numels), dtype=np.int64), 16)
    schedule = two_passes(first_item, lag).tolist()
    count = int(first_item[-1])
    assert sorted(schedule) == list(range(-count, count))
    assert [entry for entry in schedule if entry >= 0] == list(range(count))
    for begin, end in zip(first_item[:-1].tolist(), first_item[1:].tolist(), strict=True):
        own = [-1 - entry for entry in schedule if begin <= -1 - entry < end]
        assert own == list(range(begin, end))[::-1], "backwards: what was written last is read first"
        if begin < end:
            between = schedule[schedule.index(end - 1) + 1 : schedule.index(-end)]
            assert sum(entry >= 0 for entry in between) == min(lag, count - end)


def make(device, shapes, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(3)
    mine = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    return mine, LAMB(mine, lr=0.05, **options)


def steps(mine, optimizer, count, infinite=()):
    generator = torch.Generator().manual_seed(5)
    for step in range(count):
        for p in mine:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            if step in infinite:
                p.grad.view(-1)[:1] = float("inf")
        optimizer.step()
    return torch.cat([p.detach().flatten().float() for p in mine])


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("dtype, master", [(torch.float32, "none"), (torch.bfloat16, "remainder")])
def test_tensors_of_many_items(device, triton_backend, monkeypatch, decay, dtype, master):
    monkeypatch.setattr(lamb, "CHUNK", 64)
    monkeypatch.setattr(lamb, "LAG", 2)
    shapes, results = [(5,), (700,), (33, 9), (0,), (64,)], {}
    options = {"weight_decay": decay, "master_weights": master, "skip_nonfinite": True, "zero_grads": True}
    for backend in ("plain", "triton"):
        with fusedops.use(backend):
            mine, optimizer = make(device, shapes, dtype, **options)
            results[backend] = steps(mine, optimizer, 4, infinite=(2,))
            assert all(p.grad.abs().sum() == 0 for p in mine)
    assert [s["step"].item() for s in optimizer.state.values()] == [3.0] * len(shapes)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results["triton"], results["plain"], rtol=tolerance, atol=tolerance)
    bucket = optimizer._buckets[id(optimizer.param_groups[0])][1][0]
    assert bucket.table.num_items > 15 and bucket.workspace("counters", 1, torch.int32).count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("lag", [0, lamb.LAG, 1 << 30])
def test_many_programs_at_once(device, triton_backend, monkeypatch, lag):
    """Large tensors among small ones, so that programs wait for each other; the same bits in each run and order."""
    shapes = [(3000, 1000), (7,), (1000, 1000), (1,), *[(100, 50)] * 200, (2000, 3001)]
    monkeypatch.setattr(lamb, "LAG", lag)
    mine, optimizer = make(device, shapes, max_grad_norm=1.0)
    first = steps(mine, optimizer, 30)
    monkeypatch.setattr(lamb, "LAG", 1000)
    mine, optimizer = make(device, shapes, max_grad_norm=1.0)
    assert torch.equal(steps(mine, optimizer, 30), first)
    with fusedops.use("plain"):
        mine, optimizer = make(device, shapes, max_grad_norm=1.0)
        torch.testing.assert_close(steps(mine, optimizer, 30), first, rtol=1e-4, atol=1e-4)
