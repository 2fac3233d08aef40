"""Every operator's value and gradient against float64, and steps of every optimizer; under a minute on a CPU.

./dlx quickstart FusedOps

On a CPU the Triton kernels run by Triton's interpreter where triton is installed, so that it is they that are checked;
elsewhere in their plain forms. Writes record.json and report.html.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedops
from dlx import config as configs
from dlx import report
from dlx.config import field
from dlx.record import Record
from fusedops import ops

CONFIGS = Path(__file__).parent.parent / "configs"
TASK = "CUDA-Optimized/FusedOps"
TOLERANCE = 2e-5  # of float32 against float64, by the largest value
OPTIMIZERS = {
    "Adam": {"lr": 1e-2},
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "LAMB": {"lr": 1e-2},
    "NovoGrad": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
}


@dataclass
class QuickstartConfig:
    """What the demonstration does."""

    seed: int = field(0, help="of the random inputs")
    steps: int = field(20, help="of every optimizer", ge=2)
    device: str = field("auto", help="cpu, cuda, or auto: a GPU where there is one")
    output_dir: str = field("runs/fusedops_quickstart", help="folder for record.json and report.html")


Check = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def checks(device: torch.device) -> Iterator[Check]:
    """(name, function of the inputs, float64 inputs that want a gradient), for every operator."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device)

    rows = torch.tensor([3, -100, 0, 7, 9, 1], device=device)
    table = ops.rotary_table(4, 8, device=device)
    lengths = torch.tensor([4, 3], device=device)
    labels = torch.tensor([[1, 2], [3, 0]], device=device)
    f, g = random(2, 4, 5), random(2, 3, 5)
    yield "layer_norm", lambda x, w, b: ops.layer_norm(x, 30, w, b), (random(6, 30), random(30), random(30))
    yield "rms_norm", lambda x, w: ops.rms_norm(x, 30, w, 1e-6), (random(6, 30), random(30))
    yield "add_rms_norm", lambda x, r: ops.add_rms_norm(x, r, 30, eps=1e-6), (random(6, 30), random(6, 30))
    yield "cross_entropy", lambda x: ops.cross_entropy(x, rows, label_smoothing=0.1, z_loss=1e-3), (random(6, 10),)
    yield "linear_cross_entropy", lambda x, w: ops.linear_cross_entropy(x, w, rows), (random(6, 4), random(10, 4))
    yield "scaled_softmax", lambda x: ops.scaled_softmax(x, 0.5, causal=True), (random(2, 2, 5, 7),)
    yield "rope", lambda q, k: ops.rope(q, k, *table), (random(2, 4, 3, 8), random(2, 4, 1, 8))
    yield "swiglu", lambda x: ops.swiglu(x), (random(5, 20),)
    yield "geglu", lambda a, b: ops.geglu(a, b), (random(5, 10), random(5, 10))
    picture = random(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    yield "group_norm", lambda x, w: ops.group_norm(x, 2, w, activation="silu"), (picture, random(8))
    yield "bias_activation", lambda x, b: ops.bias_activation(x, b), (random(6, 9), random(9))
    yield "focal_loss", lambda x: ops.focal_loss(x, rows.clamp(min=-2), 3.0), (random(6, 10),)
    yield "index_mul_2d", lambda a, b: ops.index_mul_2d(a, b, rows.clamp(min=0)), (random(10, 4), random(6, 4))
    yield "transducer_joint", lambda f, g: ops.transducer_joint(f, g, lengths, lengths - 1, relu=True), (f, g)
    lattice = random(2, 4, 3, 5)
    yield "transducer_loss", lambda x: ops.transducer_loss(x, labels, lengths, lengths - 2, 0), (lattice,)


def outputs_and_gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What the function gives, and the gradients of a fixed sum of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else [y for y in outputs if y is not None]
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape) + 0.1 for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


def error_of(function: Callable[..., Any], inputs: tuple[Tensor, ...], backend: str) -> float:
    """The largest deviation of float32 from the plain form in float64, as a share of the largest value."""
    with fusedops.use("plain"):
        exact = outputs_and_gradients(function, inputs)
    with fusedops.use(backend):
        found = outputs_and_gradients(function, tuple(x.float() for x in inputs))
    errors = [(a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9) for a, b in zip(found, exact, strict=True)]
    return float(torch.stack(errors).detach().max())


def train(name: str, steps: int, device: torch.device) -> list[float]:
    """Losses of a small network that learns a fixed function by the optimizer called `name`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator).to(device)
    y = torch.sin(x.sum(1, keepdim=True))
    model = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.MLP([8, 32, 1], activation="gelu_tanh")).to(device)
    optimizer = getattr(fusedops.optim, name)(model.parameters(), **OPTIMIZERS[name])
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def main(args: list[str] | None = None) -> Path:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(QuickstartConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    name = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    backend = "plain"
    if importlib.util.find_spec("triton") is not None:
        backend = "triton"
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet
    torch.manual_seed(config.seed)
    record = Record.start(task=TASK, verb="quickstart", config=configs.to_dict(config), seed=config.seed)
    print(f"operators on {device}, backend {backend}: the largest error against float64, of values and gradients")
    for operator, function, inputs in checks(device):
        error = error_of(function, inputs, backend)
        print(f"  {operator:24s} {error:.1e}")
        record.metric(f"error.{operator}", error, "", goal="MINIMIZE")
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{operator}: error {error:.1e} is above {TOLERANCE:.0e}")
    print(f"optimizers: the loss of a small network before and after {config.steps} steps")
    for optimizer in OPTIMIZERS:
        torch.manual_seed(config.seed)
        losses = train(optimizer, config.steps, device)
        print(f"  {optimizer:24s} {losses[0]:.4f} -> {losses[-1]:.4f}")
        for step, loss in enumerate(losses):
            record.curve(f"{optimizer}.loss", step, loss)
        if not losses[-1] < losses[0]:
            raise ArithmeticError(f"{optimizer}: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    record.finish().save(output)
    print(f"Report: {report.render(output)}")
    return output


if __name__ == "__main__":
    main()
