"""How many threads MXNet computes with: one a core."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MXNET_OMP_MAX_THREADS"  # read when MXNet is loaded; OMP_NUM_THREADS goes before it


def cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """The cores that this process may use; two hardware threads of one core count once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found = set()
    for cpu in cpus:
        try:
            found.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:  # not Linux, or hidden by a container
            found.add(str(cpu))
    return len(found)


def use_every_core() -> None:
    """To be called before MXNet is loaded: by itself it takes half of the CPUs, as if all had two hardware threads."""
    os.environ.setdefault(VARIABLE, str(cores()))
