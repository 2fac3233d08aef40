"""First losses of a training, stored to notice when its arithmetic changes.

They change only with data, model, loss or optimiser: regenerate them together with such a change and say in the commit
why. One thread, so that sums have one order.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import dist
from .files import atomic_write
from .record import hardware
from .trainer import Trainer

STEPS = 20
RTOL = 2e-3  # on other processors or versions, whose kernels round differently


def first_losses(config: Any, build: Callable[[Any, dist.World], Trainer], count: int = STEPS) -> list[float]:
    """The losses of the first steps, as `--log_every 1` logs them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with dist.init("cpu") as world:
            trainer = build(config, world)
            try:
                batches = itertools.islice(trainer.batches(0, 0), count)
                return [trainer.step(batch, 0, index).item() for index, batch in enumerate(batches)]
            finally:
                trainer.close()
    finally:
        torch.set_num_threads(threads)


def conditions() -> dict[str, str]:
    """What must be equal for the losses to be equal to the last bit."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.is_file() else []
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # Virtual machines shorten the name, so it alone does not tell which kernels the libraries choose.
    numbers = [values.get(key, "?") for key in ("cpu family", "model", "stepping")]
    return {
        "torch": torch.__version__,
        "cpu": f"{hardware()['cpu']} ({' '.join(numbers)})",
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def write(path: str | os.PathLike[str], losses: list[float]) -> None:
    """Store them with the conditions under which they are exact."""
    atomic_write(Path(path), json.dumps(conditions() | {"losses": losses}, indent=1) + "\n")
    print(f"{path}: {losses[0]:.6f} ... {losses[-1]:.6f}")


def difference(path: str | os.PathLike[str], found: list[float], rtol: float = RTOL) -> str:
    """What differs from the stored losses, '' if nothing: to the last bit under their conditions, else by ``rtol``."""
    stored = json.loads(Path(path).read_text())
    exact = all(stored.get(key) == value for key, value in conditions().items())
    expected = stored["losses"]
    if len(found) != len(expected):
        return f"{len(found)} losses, {len(expected)} stored"
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs if exact else not math.isclose(ours, theirs, rel_tol=rtol):
            kind = "exactly" if exact else f"within {rtol:g}"
            return f"loss {index} is {ours!r}, stored {theirs!r}, to be met {kind}"
    return ""
