"""One process of the tests of ZeroAdamW: trains a little model, and writes parameters and state (see test_zero.py)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fusedops.distributed import ZeroAdamW

SHAPES = [(5, 7), (3,), (1300,), (1,)]


def gradient(shape: tuple[int, ...], step: int, rank: int, index: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 10 * index + rank))


def train(job: dict, rank: int, world: int, device: torch.device) -> None:
    dtype = getattr(torch, job["dtype"])
    generator = torch.Generator().manual_seed(rank)  # each process begins elsewhere: those of rank 0 count
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [torch.nn.Parameter(tensor.to(device, dtype)) for tensor in drawn]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    options = dict(job["options"])
    if "gradient_dtype" in options:
        options["gradient_dtype"] = getattr(torch, options["gradient_dtype"])
    saved = torch.load(job["weights"], weights_only=True) if job["weights"] else None
    if saved:
        for p, value in zip(parameters, saved["parameters"], strict=True):
            p.data.copy_(value)
    optimizer = ZeroAdamW(groups, lr=0.05, **options)
    if saved:
        optimizer.load_state_dict(saved["state"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if job["schedule"] else None
    skipped = []
    for step in range(*job["steps"]):
        optimizer.zero_grad()
        for index, p in enumerate(parameters):
            # six gradients are dealt out to the processes, so that their mean is the same in a world of 1, 2 or 3
            parts = [gradient(p.shape, step, r, index) for r in range(6)][rank::world]
            p.grad.copy_(torch.stack(parts).mean(0))
        bad = step == job["overflow"] and rank == world - 1
        if job["scaler"] is None and bad:
            parameters[0].grad[0, 0] = float("inf")
        if job["scaler"] is not None:  # as a GradScaler does it, and only one process sees the overflow
            for p in parameters:
                p.grad.mul_(job["scaler"])
            optimizer.grad_scale = torch.tensor(job["scaler"], device=device)
            optimizer.found_inf = torch.tensor(float(bad), device=device)
        optimizer.step()
        skipped.append(optimizer.skipped.item())
        if scheduler:
            scheduler.step()
    state = optimizer.state_dict()
    own = sum(v.numel() for s in optimizer.inner.state.values() for k, v in s.items() if k == "exp_avg")
    weights = [p.detach().cpu() for p in parameters]
    torch.save({"parameters": weights, "state": state, "own": own, "skipped": skipped}, f"{job['output']}.{rank}")


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(sys.argv[2]), given["world"]
    device = torch.device("cuda", rank) if given["cuda"] else torch.device("cpu")
    if given["cuda"]:
        torch.cuda.set_device(device)
    backend = "nccl" if given["cuda"] else "gloo"
    dist.init_process_group(backend, init_method=f"file://{given['rendezvous']}", rank=rank, world_size=world)
    for job in given["jobs"]:
        train(job, rank, world, device)
    dist.barrier()  # a process that leaves early cuts the connections that others still use
    if given["cuda"]:
        dist.destroy_process_group()
    else:
        # With gloo a process that is done aborts now and then while it ends ("terminate called without an active
        # exception"; cause not found). What was to be tested is on disk by now.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
