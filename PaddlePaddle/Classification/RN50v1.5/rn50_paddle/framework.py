"""Paddle's switches: which intermediate representation a process has, which device, how many processes.

Paddle's 2:4 sparsity needs the old representation, which is chosen by an environment variable before Paddle is
imported. A process that has imported it otherwise cannot change: the verb then runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlx import config as configs
from dlx.record import Record

from .options import TASK

FLAG = "FLAGS_enable_pir_api"


def choose_old_ir() -> bool:
    """Make this process one of the old representation; False when Paddle is there already with the new one."""
    if "paddle" not in sys.modules:
        os.environ[FLAG] = "0"
        return True
    return has_old_ir()


def has_old_ir() -> bool:
    """Whether this process runs on the old representation."""
    import paddle

    return not paddle.get_flags([FLAG])[FLAG]


def run_with_old_ir(module: str, arguments: Sequence[str]) -> None:
    """Run a module in a process of its own with the old representation; SystemExit with its status if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=os.environ | {FLAG: "0"})
    if done.returncode:
        raise SystemExit(done.returncode)


def start_record(verb: str, config: Any, **fields: Any) -> Record:
    """A run's record, with the version of Paddle in it. `config`: the verb's options, with a seed."""
    import paddle

    record = Record.start(TASK, verb, configs.to_dict(config), seed=config.seed, **fields)
    record.fields["versions"]["paddlepaddle"] = paddle.__version__
    return record


@dataclass(frozen=True)
class World:
    """This process's place among those that `paddle.distributed.launch` started."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("gpu")

    def sum(self, values: Any) -> Any:
        """A tensor added up over the processes."""
        if self.size > 1:
            import paddle

            paddle.distributed.all_reduce(values)
        return values

    def any(self, condition: bool) -> bool:
        """Whether it holds on one process or more."""
        if self.size == 1:
            return condition
        import paddle

        return bool(self.sum(paddle.to_tensor([float(condition)])).item())


def join(device: str = "auto") -> World:
    """Choose the device and join the other processes: NCCL on GPUs, gloo on CPUs."""
    import paddle

    available = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if device == "gpu" and not available:
        raise ValueError("device gpu: this build of Paddle sees no GPU; use --device cpu")
    chosen = "gpu" if device == "gpu" or (device == "auto" and available) else "cpu"
    size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if chosen == "gpu" and size > 1:
        chosen = f"gpu:{os.environ.get('FLAGS_selected_gpus', '0').split(',')[0]}"
    paddle.set_device(chosen)
    if size > 1 and not paddle.distributed.is_initialized():
        paddle.distributed.init_parallel_env()
    return World(int(os.environ.get("PADDLE_TRAINER_ID", "0")), size, chosen)
