"""Optimizers over DTensors, as FSDP2 makes of parameters: the plain form, with norms over all shards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fusedops
from fusedops import optim
from fusedops.dispatch import backend_for

MAKERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, max_grad_norm=0.5),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, skip_nonfinite=True),
    "LAMB": lambda p: optim.LAMB(p, lr=0.1),
    "NovoGrad": lambda p: optim.NovoGrad(p, lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "LARC": lambda p: optim.LARC(optim.SGD(p, lr=0.1)),
}


def trained(make, place):
    """Weights after three steps; `place` makes of each tensor what the optimizer gets."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(place(torch.randn(s, generator=generator))) for s in ((6, 4), (5,), (1, 3))]
    optimizer = make(parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = place(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return [p.detach() for p in parameters]


def process(rank: int, folder: Path) -> None:
    """What one of the two processes does: the first leaves the weights in the folder."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name, make in MAKERS.items():
        weights = trained(make, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
        results[name] = [weight.full_tensor() for weight in weights]
    if rank == 0:
        torch.save(results, folder / "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_shards_are_trained_as_the_whole(tmp_path):
    workers = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [worker.wait(timeout=100) for worker in workers] == [0, 0]
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    with fusedops.use("plain"):
        for name, make in MAKERS.items():
            torch.testing.assert_close(found[name], trained(make, lambda tensor: tensor), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_kernels_are_not_launched(tmp_path, device, triton_backend):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        x = torch.randn(4, 8, device=device)
        shards = distribute_tensor(x, init_device_mesh(device.type, (1,)), [Replicate()])
        with pytest.raises(RuntimeError, match="fusedops.swiglu: the triton backend cannot run on .* a DTensor has no"):
            backend_for(shards, op="swiglu")
        with fusedops.use("auto"):
            y = fusedops.ops.swiglu(shards)
        torch.testing.assert_close(y.to_local(), fusedops.ops.swiglu(x), rtol=1e-5, atol=1e-5)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    process(int(sys.argv[1]), Path(sys.argv[2]))
