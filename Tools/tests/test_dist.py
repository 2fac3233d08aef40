"""dlx.dist: one process without a launcher, two under torchrun, and exact arithmetic of batches and shards."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import dlx.dist as dist  # noqa: E402
from dlx.task import TORCHRUN  # noqa: E402


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_group():
    world = dist.init("cpu")
    assert (world.rank, world.size, world.backend, world.is_main) == (0, 1, None, True)
    value = torch.tensor([1.0])
    total = world.sum(value)
    assert total.item() == 1.0 and total is not value
    assert world.mean(2) == 2.0 and world.any(True) and not world.any(False) and world.gather("a") == ["a"]
    with world.main_first():
        world.barrier()
    world.close()
    assert not torch.distributed.is_initialized()


def test_missing_devices_and_half_an_environment(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dist.init().device.type == "cpu"
    with pytest.raises(ValueError, match="no CUDA device for 'cuda'"):
        dist.init("cuda")
    with pytest.raises(ValueError, match="device 'cuda:3' is not there: this machine shows 0"):
        dist.init("cuda:3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="RANK is set but WORLD_SIZE, LOCAL_RANK is not"):
        dist.init()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="2 processes need 2 CUDA devices, this machine shows 0"):
        dist.init("cuda")


PROGRAM = """
import torch, sys
import dlx.dist as dist
with dist.init("cpu") as world:
    assert (world.size, world.backend, world.local_size) == (2, "gloo", 2)
    original = torch.tensor([1.0, 2.0]) * (world.rank + 1)
    assert world.sum(original).tolist() == [3.0, 6.0] and original[0] == world.rank + 1
    assert world.mean(world.rank) == 0.5
    assert world.any(world.rank == 1) and not world.any(False)
    assert world.gather({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
    with world.main_first():
        open(sys.argv[1], "a").write(str(world.rank))
    mean = dist.Mean()
    if world.rank == 0:
        mean.add(torch.tensor(2.5), 4)
    else:
        mean.add(10.0, 2)
    assert mean.value(world) == 5.0
    assert dist.micro_batch_scales([4] if world.rank == 0 else [2], world) == ([8 / 6] if world.rank == 0 else [4 / 6])
    # DDP with these factors gives the gradient of the whole batch.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    items = torch.tensor([1.0, 2, 3, 4] if world.rank == 0 else [9.0, 11])[:, None]
    (model(items).mean() * dist.micro_batch_scales([len(items)], world)[0]).backward()
    assert abs(model.module.weight.grad.item() - 5.0) < 1e-6
    world.barrier()
    open(f"fine{world.rank}", "w").close()
"""


def test_two_processes_under_torchrun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = ["-m", *TORCHRUN, "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "program.py", "log"]
    path = os.pathsep.join([str(Path(dist.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "fine0").exists() and (tmp_path / "fine1").exists()
    assert (tmp_path / "log").read_text() == "01"


def test_processes_of_one_host_talk_over_loopback(monkeypatch):
    """The host's name may not resolve, and its other interfaces may be closed."""
    joined = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: joined.append(args))
    monkeypatch.setattr(dist.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "no-such-host"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    dist.init("cpu")  # LOCAL_WORLD_SIZE unknown: perhaps several hosts
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init("cpu")
    assert os.environ["MASTER_ADDR"] == "no-such-host" and "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init("cpu")
    assert (os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    dist.init("cpu")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0" and joined == [("gloo",)] * 4


def test_accumulation():
    assert dist.accumulation(256, 32, 2) == 4 and dist.accumulation(8, 8, 1) == 1
    with pytest.raises(ValueError, match="global_batch_size 100 is not a multiple of batch_size 32 x 2"):
        dist.accumulation(100, 32, 2)
    with pytest.raises(ValueError, match="not a multiple"):
        dist.accumulation(32, 32, 2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        dist.accumulation(32, 0, 2)


def test_ragged_accumulation_is_exact():
    first, second = [1.0, 2, 3, 4], [9.0, 11]
    scales = dist.micro_batch_scales([4, 2])
    assert sum(scale * np.mean(part) for scale, part in zip(scales, (first, second), strict=True)) == 5.0
    mean = dist.Mean()
    mean.add(torch.tensor(first).mean(), 4)
    mean.add(torch.tensor(second).mean(), 2)
    mean.add(float("nan"), 0)
    assert mean.value() == 5.0 and math.isnan(dist.Mean().value())
    with pytest.raises(ValueError, match="no items"):
        dist.micro_batch_scales([0, 0])


@pytest.mark.parametrize("length, size", [(10, 1), (10, 3), (2, 4), (0, 2)])
def test_shards_cover_all_once(length, size):
    parts = [list(dist.shard(length, rank, size)) for rank in range(size)]
    assert sorted(sum(parts, [])) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_train_order_is_the_same_for_any_number_of_processes():
    def steps(size, batch, start=0):
        orders = [dist.TrainOrder(24, rank=rank, size=size, seed=7) for rank in range(size)]
        for order in orders:
            order.set_epoch(2, start)
        lists = [list(order) for order in orders]
        assert [len(items) for items in lists] == [len(order) for order in orders]
        return [
            sorted(i for items in lists for i in items[step * batch : (step + 1) * batch])
            for step in range(len(lists[0]) // batch)
        ]

    assert steps(1, 8) == steps(2, 4) == steps(4, 2)
    assert steps(1, 8)[1:] == steps(2, 4, start=8)
    assert sorted(sum(steps(1, 8), [])) == list(range(24))
    order = dist.TrainOrder(24, seed=7)
    first = list(order)
    order.set_epoch(1)
    assert list(order) != first
    assert list(dist.TrainOrder(5, rank=1, size=2, shuffle=False)) == [1, 3]
    with pytest.raises(ValueError, match="start must be in"):
        order.set_epoch(0, 25)
    with pytest.raises(ValueError, match="1 item"):
        dist.TrainOrder(1, size=2)


def test_seeds():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    dist.seed_everything(3)
    first = draw()
    assert dist.seed_everything(3) == 3 and draw() == first
    assert dist.seed_everything(3, rank=1) != dist.seed_everything(4, rank=0)
    assert draw() != first
    with pytest.raises(ValueError, match="seed must be"):
        dist.seed_everything(-1)
    try:
        dist.seed_everything(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_runs_alone_says_so():
    alone = dist.World(0, 1, 0, 1, torch.device("cpu"), None)
    alone.require_alone("infer")
    with pytest.raises(ValueError, match="infer runs in one process, got 2"):
        dist.World(0, 2, 0, 2, torch.device("cpu"), None).require_alone("infer")
