"""A DCGAN in mixed precision, in the manner of Apex's example: two networks, two optimizers, three losses.

    python examples/dcgan.py --epochs 1 --images 6000                      Fashion-MNIST; a minute on a CPU
    python examples/dcgan.py --opt-level O1 --output_dir runs/dcgan        sheets of pictures after every epoch
    torchrun --nproc_per_node 2 examples/dcgan.py                          two processes, two GPUs

Radford et al. 2016 (https://arxiv.org/abs/1511.06434) for pictures of 32 x 32. Every loss has a scale of its own
(`num_losses=3`); `--opt-level none` is autocast to bfloat16 without any. Optimizers are `fusedops.optim.Adam`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedops
from fusedops import amp


def generator(noise: int, width: int) -> nn.Sequential:
    """(N, noise, 1, 1) -> (N, 1, 32, 32), -1 to 1."""
    layers: list[nn.Module] = []
    channels = noise
    for index, filters in enumerate((width * 4, width * 2, width)):
        layers += [nn.ConvTranspose2d(channels, filters, 4, 2 if index else 1, 1 if index else 0, bias=False)]
        layers += [nn.BatchNorm2d(filters), nn.ReLU()]
        channels = filters
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 1, 4, 2, 1), nn.Tanh())


def discriminator(width: int) -> nn.Sequential:
    """(N, 1, 32, 32) -> (N,), how real in logits."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for factor in (1, 2):
        layers += [nn.Conv2d(width * factor, width * factor * 2, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width * factor * 2), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(width * 4, 1, 4), nn.Flatten(0))


def start(module: nn.Module) -> None:
    """Weights as the paper draws them: deviation 0.02."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def pictures(count: int) -> Tensor:
    """uint8 (N, 1, 32, 32): Fashion-MNIST's training set with a black rim."""
    from dlx import data
    from dlx.idx import read_idx

    images = read_idx(data.prepare("fashion-mnist") / "train-images-idx3-ubyte.gz")
    return F.pad(torch.from_numpy(images[: count or None].copy())[:, None], (2, 2, 2, 2))


def save_sheet(images: Tensor, path: Path, columns: int = 8) -> None:
    """A PNG with the pictures (N, 1, S, S), -1 to 1, in rows."""
    from PIL import Image

    tiles = ((images.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)[:, 0]
    rows = [torch.cat(list(tiles[i : i + columns]), 1) for i in range(0, len(tiles) // columns * columns, columns)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    Image.fromarray(torch.cat(rows).numpy()).save(partial, format="PNG")
    os.replace(partial, path)


def run(args: argparse.Namespace) -> dict[str, float]:
    """Train; returns the last epoch's mean losses."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    cuda = torch.cuda.is_available() and args.device != "cpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(args.seed)
    networks = [generator(args.noise, args.width).apply(start), discriminator(args.width).apply(start)]
    networks = [network.to(device) for network in networks]
    optimizers = [fusedops.optim.Adam(network.parameters(), lr=args.lr, betas=(0.5, 0.999)) for network in networks]
    if args.opt_level != "none":
        options = {"opt_level": args.opt_level, "num_losses": 3, "verbosity": int(rank == 0)}
        networks, optimizers = amp.initialize(networks, optimizers, **options)
    if size > 1:
        networks = [nn.parallel.DistributedDataParallel(network, broadcast_buffers=False) for network in networks]
    images = pictures(args.images)
    means = {}
    for epoch in range(args.epochs):
        order = torch.from_numpy(np.random.default_rng([args.seed, epoch]).permutation(len(images)))[rank::size]
        losses = [
            step(args, networks, optimizers, images[order[i : i + args.batch_size]].to(device))
            for i in range(0, len(images) // size - args.batch_size + 1, args.batch_size)
        ]
        if not losses:
            raise ValueError(f"{len(images)} pictures are too few for {size} x {args.batch_size} of a step")
        means = dict(zip(("discriminator", "generator"), torch.stack(losses).mean(0).tolist(), strict=True))
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}: " + ", ".join(f"{k} {v:.4f}" for k, v in means.items()), flush=True
            )
            sheet = sample(args, networks[0], device)
            save_sheet(sheet, Path(args.output_dir) / f"epoch_{epoch + 1:03d}.png")
    if size > 1:
        dist.barrier()  # a process that leaves early cuts the connections that others still use
        dist.destroy_process_group()
    return means


def step(
    args: argparse.Namespace, networks: list[nn.Module], optimizers: list[torch.optim.Optimizer], batch: Tensor
) -> Tensor:
    """One update of each network; the losses (discriminator, generator), on the device."""
    make, judge = networks
    real = batch.float() / 127.5 - 1
    with precision(args, real.device):
        fake = make(torch.randn(len(real), args.noise, 1, 1, device=real.device))

    optimizers[1].zero_grad(set_to_none=True)
    total = torch.zeros((), device=real.device)
    for number, (shown, truth) in enumerate(((real, 1.0), (fake.detach(), 0.0))):
        loss = verdict(args, judge, shown, truth)
        backward(args, loss, optimizers[1], number)
        total += loss.detach()
    optimizers[1].step()

    optimizers[0].zero_grad(set_to_none=True)
    loss = verdict(args, judge, fake, 1.0)
    backward(args, loss, optimizers[0], 2)
    optimizers[0].step()
    return torch.stack([total, loss.detach()])


def verdict(args: argparse.Namespace, judge: nn.Module, shown: Tensor, truth: float) -> Tensor:
    """How wrong the discriminator is if all that is shown were so true."""
    with precision(args, shown.device):
        logits = judge(shown)
    return F.binary_cross_entropy_with_logits(logits.float(), torch.full_like(logits, truth, dtype=torch.float32))


def backward(args: argparse.Namespace, loss: Tensor, optimizer: torch.optim.Optimizer, number: int) -> None:
    if args.opt_level == "none":
        loss.backward()
        return
    with amp.scale_loss(loss, optimizer, loss_id=number) as scaled:
        scaled.backward()


def precision(args: argparse.Namespace, device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=args.opt_level == "none")


@torch.no_grad()
def sample(args: argparse.Namespace, make: nn.Module, device: torch.device) -> Tensor:
    """Pictures of noise that is the same after every epoch."""
    noise = torch.randn(64, args.noise, 1, 1, generator=torch.Generator().manual_seed(args.seed)).to(device)
    make.eval()
    with precision(args, device):
        made = make(noise)
    make.train()
    return made


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=5)
    add("--batch-size", "-b", type=int, default=128, help="pictures per process (%(default)s)")
    add("--images", type=int, default=0, help="use only so many pictures (0: all)")
    add("--lr", type=float, default=2e-4)
    add("--noise", type=int, default=64, help="numbers that a picture is made of (%(default)s)")
    add("--width", type=int, default=32, help="channels of the widest maps (%(default)s)")
    add("--opt-level", choices=["none", "O0", "O1", "O2"], default="O1")
    add("--output_dir", default="runs/dcgan", help="where the sheets of pictures go (%(default)s)")
    add("--seed", type=int, default=0)
    add("--device", choices=["auto", "cpu"], default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse())
