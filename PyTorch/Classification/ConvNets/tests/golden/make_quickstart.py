"""The first losses of configs/quickstart.yaml on Fashion-MNIST, stored in quickstart.json.

    PYTHONPATH=../../../Tools:. python tests/golden/make_quickstart.py        (in the task's folder)

They change only with the arithmetic of data, model, loss or optimiser: regenerate them together with such a change, and
say in the commit why. One thread, so that sums have one order.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from convnets import train
from convnets.options import CONFIGS
from dlx import config as configs
from dlx import dist
from dlx.files import atomic_write
from dlx.record import hardware

STEPS = 20
FILE = Path(__file__).with_name("quickstart.json")


def first_losses(count: int = STEPS) -> list[float]:
    """The losses of the first steps, as `--log_every 1 --max_steps 20` logs them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        arguments = ["--config", "quickstart", "--max_steps", str(count), "--device", "cpu", "--engine", "eager"]
        config = configs.parse(train.TrainConfig, arguments, configs_dir=CONFIGS)
        with dist.init(config.device) as world:
            trainer = train.Trainer(config, world)
            batches = zip(range(count), trainer.batches(0, 0), strict=False)
            return [trainer.step(batch, 0, index).item() for index, batch in batches]
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


if __name__ == "__main__":
    content = {"config": "quickstart", "data": "fashion-mnist", **conditions(), "losses": first_losses()}
    atomic_write(FILE, json.dumps(content, indent=1) + "\n")
    print(f"{FILE}: {content['losses'][0]:.6f} ... {content['losses'][-1]:.6f}")
