"""One process or many: torchrun set-up, reductions, seeds, and the arithmetic of batches and shards.

    world = init()                          # the same line on one CPU and under torchrun on many GPUs
    seed_everything(config.seed, world.rank)
    steps = accumulation(config.global_batch_size, config.batch_size, world.size)

Without a launcher there is one process, no process group is made, and every reduction returns its argument.
"""

from __future__ import annotations

import datetime
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed

__all__ = ["Mean", "TrainOrder", "World", "accumulation", "init", "micro_batch_scales", "seed_everything", "shard"]


@dataclass(frozen=True)
class World:
    """This process among all. `backend` is None where there is one process and no group."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0

    def require_alone(self, what: str) -> None:
        """ValueError where several processes would do the same work."""
        if self.size > 1:
            raise ValueError(f"{what} runs in one process, got {self.size}: leave --nproc out")

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.backend == "nccl":
            torch.distributed.barrier(device_ids=[self.device.index])
        elif self.backend:
            torch.distributed.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, as a new tensor on the device of `tensor`; `tensor` keeps its value."""
        if not self.backend:
            return tensor.clone()
        total = tensor.detach().to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total.to(tensor.device)

    def mean(self, value: float) -> float:
        """The mean over all processes, each counted once. For batches of different sizes use `Mean`."""
        if not self.backend:
            return float(value)
        # MPS has no double, but no process group either, so float64 is safe here.
        return self.sum(torch.tensor(float(value), dtype=torch.float64, device=self.device)).item() / self.size

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any process. A signal reaches ranks at different steps: ask before stopping."""
        return self.mean(float(flag)) > 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in order of rank, on every process. For small Python objects."""
        if not self.backend:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on the others: one process prepares what all read."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    def close(self) -> None:
        """End the process group, if there is one. The World then acts as a single process no more."""
        if self.backend and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.barrier()  # a process that leaves early cuts the connections that others still use
        self.close()


def init(device: str = "auto", *, timeout_minutes: float = 10) -> World:
    """Join the processes that torchrun started (its RANK, WORLD_SIZE, LOCAL_RANK), or be the only one.

    `device`: auto (CUDA if there is one, else CPU), cpu, cuda, or cuda:N (single process only). Under torchrun each
    process takes the GPU of its local rank and talks over nccl; on CPU over gloo. ValueError if a device is missing.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = [name for name in needed if name in os.environ]
    if given and len(given) < len(needed):
        missing = ", ".join(name for name in needed if name not in os.environ)
        raise ValueError(f"{', '.join(given)} is set but {missing} is not: start several processes with torchrun")
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in zip(needed, "010", strict=True))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    chosen = _pick_device(device, local_rank, local_size)
    if size == 1:
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        return World(0, 1, 0, 1, chosen, None)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    options: dict[str, Any] = {"timeout": datetime.timedelta(minutes=timeout_minutes)}
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        options["device_id"] = chosen
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        _use_loopback()
    torch.distributed.init_process_group(backend, **options)
    return World(rank, size, local_rank, local_size, chosen, backend)


def _use_loopback() -> None:
    """All processes run here, so they need no host name (in a container it may not resolve) and no other interface."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _pick_device(device: str, local_rank: int, local_size: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        if local_size > 1:
            raise ValueError(f"device {device!r} names one GPU but {local_size} processes run here: give 'cuda'")
        if chosen.index >= count:
            raise ValueError(f"device {device!r} is not there: this machine shows {count} CUDA device(s)")
        return chosen
    if local_size > count:
        need = f"{local_size} processes need {local_size} CUDA devices"
        need = need if local_size > 1 else "no CUDA device for 'cuda'"
        raise ValueError(f"{need}, this machine shows {count}: start fewer processes or give --device cpu")
    return torch.device("cuda", local_rank)


def seed_everything(seed: int, rank: int = 0, deterministic: bool = False) -> int:
    """Seed python, numpy and torch; rank 0 gets `seed` itself, the others numbers derived from it. Returns the number.

    With `deterministic`, operations without a deterministic form raise, and cuDNN does not try out algorithms.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    # seed + rank would make rank 1 of one run equal to rank 0 of the run with the next seed.
    own = seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    return own


# ---------------------------------------------------------------------------------------------- batches and shards


def accumulation(global_batch_size: int, batch_size: int, world_size: int) -> int:
    """How many batches of `batch_size` each process adds up to make one step of `global_batch_size`."""
    sizes = {"global_batch_size": global_batch_size, "batch_size": batch_size, "world_size": world_size}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    steps, rest = divmod(global_batch_size, batch_size * world_size)
    if rest or not steps:
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of "
            f"batch_size {batch_size} x {world_size} process(es)"
        )
    return steps


def micro_batch_scales(counts: Sequence[int], world: World | None = None) -> list[float]:
    """Factors for the mean losses of micro-batches with `counts` items, so that the summed gradient is the exact mean.

    Counts (4, 2) give (4/6, 2/6): losses (1, 2, 3, 4) and (9, 11) make 5.0, where averaging the two means makes 6.25.
    With a world, `counts` are this process's and the factors also undo DDP's averaging over processes.
    """
    total = float(sum(counts))
    size = 1
    if world is not None and world.backend:
        size = world.size
        total = world.mean(total) * size
    if total <= 0:
        raise ValueError(f"micro-batches hold no items: {list(counts)}")
    return [count * size / total for count in counts]


class Mean:
    """A mean over items that come in batches of any size, exact over all processes. Never waits for the GPU to add."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._count = 0

    def add(self, value: torch.Tensor | float, count: int) -> None:
        """Add a batch of `count` items whose mean is `value`; a batch of none is left out, whatever its mean."""
        if count == 0:
            return
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value), dtype=torch.float64)
        part = value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64) * count
        self._total = part if self._total is None else self._total + part
        self._count += count

    def value(self, world: World | None = None) -> float:
        """The mean so far, over all processes of `world`; NaN if nothing was added."""
        total = 0.0 if self._total is None else float(self._total)
        count = float(self._count)
        if world is not None and world.backend:
            total, count = world.sum(torch.tensor([total, count], dtype=torch.float64)).tolist()
        return total / count if count else float("nan")


def shard(length: int, rank: int, size: int) -> range:
    """The indices of [0, length) that `rank` of `size` evaluates: together all, none twice, sizes almost equal."""
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    return range(rank, length, size)


class TrainOrder:
    """A sampler whose order depends only on (seed, epoch), and which can start in the middle of an epoch.

    Process `rank` takes every `size`-th index, so that a step of global batch G always sees the same G items for any
    number of processes. The few items at the end that do not fill all processes are left out of that epoch.
    `start` counts the items that all processes together have consumed; keep it in the checkpoint as the loader's
    position (count the batches trained on: a loader's workers read ahead).
    """

    def __init__(self, length: int, *, rank: int = 0, size: int = 1, seed: int = 0, shuffle: bool = True) -> None:
        if length < size:
            raise ValueError(f"{length} item(s) cannot be shared by {size} process(es)")
        shard(length, rank, size)
        self.length, self.rank, self.size, self.seed, self.shuffle = length, rank, size, seed, shuffle
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many items of it were consumed already (over all processes)."""
        if not 0 <= start <= self.length:
            raise ValueError(f"start must be in [0, {self.length}], got {start}")
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.Generator(np.random.PCG64([self.seed, self.epoch])).permutation(self.length)
        usable = self.length - self.length % self.size
        yield from order[self.start : usable][self.rank :: self.size].tolist()

    def __len__(self) -> int:
        usable = self.length - self.length % self.size
        return len(range(self.start + self.rank, usable, self.size))
