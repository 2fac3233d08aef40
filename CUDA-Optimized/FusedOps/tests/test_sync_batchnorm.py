"""Batch norm over processes with batches of different sizes, against torch's over the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedops.nn import SyncBatchNorm, convert_sync_batchnorm

SPLIT = (0, 3, 3, 8)  # three processes have three samples, none and five


def whole_batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, 3, 2, generator=generator) * 2 + 5, torch.randn(8, 4, 3, 2, generator=generator)


def trained(module, x, dy):
    """Output, gradients and running statistics after one step."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad, module.weight.grad, module.bias.grad, module.running_mean, module.running_var


def process(rank: int, folder: Path) -> None:
    """What one of the three processes does; it leaves its results in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
    x, dy = (t[SPLIT[rank] : SPLIT[rank + 1]] for t in whole_batch())
    torch.save(list(trained(SyncBatchNorm(4), x, dy)), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_uneven_batches_are_one_batch(tmp_path):
    workers = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(3)]
    assert [worker.wait(timeout=100) for worker in workers] == [0, 0, 0]
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    expected = trained(torch.nn.BatchNorm2d(4), *whole_batch())
    close = {"atol": 1e-5, "rtol": 1e-5}
    for index in (0, 1):  # output, gradient of the input
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), expected[index], **close)
    for index in (2, 3):  # gradients of the weights: each process has those of its own samples
        torch.testing.assert_close(sum(part[index] for part in parts), expected[index], **close)
    for index in (4, 5):
        for part in parts:
            torch.testing.assert_close(part[index], expected[index], **close)


def test_one_process_is_torchs_batch_norm(device):
    for x_shape in ((6, 4), (6, 4, 5), (2, 4, 3, 3)):
        x = torch.randn(x_shape, device=device)
        module, reference = (
            SyncBatchNorm(4, momentum=None).to(device),
            torch.nn.BatchNorm1d(4, momentum=None).to(device),
        )
        if len(x_shape) == 4:
            reference = torch.nn.BatchNorm2d(4, momentum=None).to(device)
        module.load_state_dict(reference.state_dict())
        for _ in range(2):
            torch.testing.assert_close(module(x), reference(x))
        reference.load_state_dict(module.state_dict())
        torch.testing.assert_close(module.eval()(x), reference.eval()(x))
    x = torch.randn(5, 4, 2, 2, device=device)
    z = torch.randn_like(x)
    fused = SyncBatchNorm(4, fuse_relu=True).to(device)
    torch.testing.assert_close(fused(x, z), torch.relu(torch.nn.BatchNorm2d(4).to(device)(x) + z))
    half = SyncBatchNorm(4).to(device)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"expected \(N, 4, ...\), got \(2, 3\)"):
        fused(torch.zeros(2, 3, device=device))


def test_one_value_and_float64(device):
    module = SyncBatchNorm(4).to(device)
    with pytest.raises(ValueError, match=r"more than 1 value per channel when training, got input size \(1, 4\)"):
        module(torch.zeros(1, 4, device=device))
    assert module.eval()(torch.zeros(1, 4, device=device)).isfinite().all()
    wide, reference = SyncBatchNorm(4).double().to(device), torch.nn.BatchNorm1d(4).double().to(device)
    x = torch.randn(7, 4, device=device, dtype=torch.float64).requires_grad_()
    dy = torch.randn_like(x)
    results = [(y := m(x), *torch.autograd.grad(y, (x, *m.parameters()), dy)) for m in (wide, reference)]
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_conversion_keeps_tensors():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.ReLU()))
    norm = model[1][0]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted = convert_sync_batchnorm(model.eval())
    assert converted is model and isinstance(model[1][0], SyncBatchNorm) and model[1][0].weight is norm.weight
    assert not model[1][0].training and model.state_dict().keys() == state.keys()
    assert isinstance(convert_sync_batchnorm(torch.nn.BatchNorm1d(3, affine=False)), SyncBatchNorm)


if __name__ == "__main__":
    process(int(sys.argv[1]), Path(sys.argv[2]))
