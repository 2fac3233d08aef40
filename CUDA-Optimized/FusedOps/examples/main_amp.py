"""Image classification in mixed precision, in the manner of Apex's ImageNet example.

    python examples/main_amp.py --epochs 1 --images 20000                          Fashion-MNIST; a minute on a CPU
    python examples/main_amp.py --opt-level O2 --loss-scale dynamic
    torchrun --nproc_per_node 2 examples/main_amp.py --sync-bn                     two processes, two GPUs
    python examples/main_amp.py pictures/ --arch resnet50 -b 256 --opt-level O1    folders train/ and val/ by class

`--opt-level` goes through `fusedops.amp` as old scripts do; `--opt-level none` is what a new one writes: autocast to
bfloat16 and no scale of the loss. The optimizer is `fusedops.optim.SGD`, whose step is one kernel on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedops
from fusedops import amp

# Networks


class Block(nn.Module):
    """Two 3x3 convolutions (He et al. 2016), or 1x1, 3x3, 1x1 where `bottleneck`."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = width * 4 if bottleneck else width
        shapes = [(3, width, stride), (3, width, 1)]  # size, filters, stride
        if bottleneck:
            shapes = [(1, width, 1), (3, width, stride), (1, outputs, 1)]
        layers: list[nn.Module] = []
        channels = inputs
        for size, filters, step in shapes:
            convolution = nn.Conv2d(channels, filters, size, step, size // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(filters), nn.ReLU()]
            channels = filters
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(depths: list[int], width: int, bottleneck: bool, classes: int, small: bool) -> nn.Sequential:
    """(N, 3, S, S) -> (N, classes). `small`: pictures of about 32 pixels, which the stem does not shrink."""
    stem = [nn.Conv2d(3, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)]
    stem += [nn.BatchNorm2d(width), nn.ReLU(), *([] if small else [nn.MaxPool2d(3, 2, 1)])]
    blocks, channels = [], width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            block = Block(channels, width * 2**stage, 2 if stage and not index else 1, bottleneck)
            channels = width * 2**stage * (4 if bottleneck else 1)
            blocks.append(block)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


ARCHITECTURES = {
    "resnet8": ([1, 1, 1], 16, False, True),
    "resnet18": ([2, 2, 2, 2], 64, False, False),
    "resnet50": ([3, 4, 6, 3], 64, True, False),
}

# Data: uint8 pictures


class Pictures(torch.utils.data.Dataset):
    """A folder with one folder of pictures per class, random crop and flip for training, centre crop else."""

    def __init__(self, folder: Path, size: int, train: bool):
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        folders = [folder / name for name in self.classes]
        self.files = [(path, label) for label, place in enumerate(folders) for path in sorted(place.iterdir())]
        if not self.files:
            raise ValueError(f"{folder}: no pictures in folders named after their class")
        self.size, self.train = size, train

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.files[index]
        image = Image.open(path).convert("RGB")
        share = 0.875 if not self.train else float(torch.empty(1).uniform_(0.3, 1.0))
        side = max(1, int(min(image.size) * share))
        free = image.width - side, image.height - side
        left, top = (int(torch.randint(0, f + 1, ())) if self.train else f // 2 for f in free)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        if self.train and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()), label


def fashion_mnist(train: bool) -> torch.utils.data.TensorDataset:
    from dlx import data
    from dlx.idx import read_idx

    folder, prefix = data.prepare("fashion-mnist"), "train" if train else "t10k"
    images = torch.from_numpy(read_idx(folder / f"{prefix}-images-idx3-ubyte.gz").copy())
    labels = torch.from_numpy(read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz").astype(np.int64))
    return torch.utils.data.TensorDataset(images[:, None].expand(-1, 3, -1, -1), labels)


def loaders(args: argparse.Namespace, rank: int, size: int) -> tuple[list[torch.utils.data.DataLoader], int]:
    if args.data == "fashion-mnist":
        splits: list = [fashion_mnist(True), fashion_mnist(False)]
        classes = 10
    else:
        side = 32 if ARCHITECTURES[args.arch][3] else 224
        splits = [Pictures(Path(args.data) / name, side, name == "train") for name in ("train", "val")]
        classes = len(splits[0].classes)
    if args.images:
        splits = [torch.utils.data.Subset(split, range(min(args.images, len(split)))) for split in splits]
    made = []
    for train, split in zip((True, False), splits, strict=True):
        sampler = torch.utils.data.DistributedSampler(split, size, rank, shuffle=train, seed=args.seed, drop_last=train)
        options = {"sampler": sampler, "num_workers": args.workers, "drop_last": train}
        made.append(torch.utils.data.DataLoader(split, args.batch_size, **options))
    return made, classes


# Training


def run(args: argparse.Namespace) -> dict[str, float]:
    """Train and evaluate; returns the last accuracy in per cent and the training speed in images/s."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    cuda = torch.cuda.is_available() and args.device != "cpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = not args.deterministic
    if size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(args.seed)
    (train_loader, val_loader), classes = loaders(args, rank, size)
    depths, width, bottleneck, small = ARCHITECTURES[args.arch]
    model: nn.Module = resnet(depths, width, bottleneck, classes, small).to(device, memory_format=torch.channels_last)
    if args.sync_bn:
        model = fusedops.nn.convert_sync_batchnorm(model)
    rate = args.lr * args.batch_size * size / 256
    optimizer = fusedops.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=args.weight_decay)
    if args.opt_level != "none":
        options = {"keep_batchnorm_fp32": args.keep_batchnorm_fp32, "loss_scale": args.loss_scale}
        options = {name: value for name, value in options.items() if value is not None}
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=args.opt_level, verbosity=int(rank == 0), **options
        )
    steps = max(len(train_loader) * args.epochs, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / steps))
    first = 0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        if args.opt_level != "none":
            amp.load_state_dict(saved["amp"])
        first = saved["epoch"]
    forward = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    accuracy, speed = float("nan"), float("nan")
    for epoch in range(first, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        speed = train_epoch(args, epoch, forward, optimizer, schedule, train_loader, device, rank, size)
        accuracy = evaluate(args, forward, val_loader, device, size)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: top-1 {accuracy:.2f} %, {speed:,.0f} images/s", flush=True)
            if args.checkpoint:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                state |= {
                    "schedule": schedule.state_dict(),
                    "amp": amp.state_dict() if args.opt_level != "none" else {},
                }
                torch.save(state, args.checkpoint + ".partial")
                os.replace(args.checkpoint + ".partial", args.checkpoint)
    if size > 1:
        dist.barrier()  # a process that leaves early cuts the connections that others still use
        dist.destroy_process_group()
    return {"top1": accuracy, "images_per_second": speed}


def factor(progress: float) -> float:
    """Of the rate: linear warm-up in the first tenth, then down as a cosine. `progress` is 0 to 1."""
    return min(1.0, 0.05 + progress / 0.1) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def inputs(images: Tensor, device: torch.device) -> Tensor:
    images = images.to(device, non_blocking=True).float().sub_(114.0).div_(58.0)
    return images.contiguous(memory_format=torch.channels_last)


def native(args: argparse.Namespace, device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast for `--opt-level none`; with amp the model casts by itself."""
    enabled = args.opt_level == "none"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def train_epoch(
    args: argparse.Namespace,
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    loader: torch.utils.data.DataLoader,
    device: torch.device,
    rank: int,
    size: int,
) -> float:
    """Images per second over all processes."""
    model.train()
    started, seen = time.perf_counter(), 0
    for step, (images, labels) in enumerate(loader):
        with native(args, device):
            output = model(inputs(images, device))
        loss = fusedops.ops.cross_entropy(output, labels.to(device, non_blocking=True), label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        if args.opt_level == "none":
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        schedule.step()
        seen += len(images) * size
        if rank == 0 and step % args.print_freq == 0:
            print(f"epoch {epoch + 1} step {step + 1}/{len(loader)}: loss {loss.item():.4f}", flush=True)
    return seen / (time.perf_counter() - started)


@torch.inference_mode()
def evaluate(
    args: argparse.Namespace, model: nn.Module, loader: torch.utils.data.DataLoader, device: torch.device, size: int
) -> float:
    """Per cent right, over all processes; a picture that pads the last share counts again, as in Apex's example."""
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        with native(args, device):
            found = model(inputs(images, device)).argmax(1)
        counts += torch.stack([(found == labels.to(device)).sum(), torch.tensor(len(labels), device=device)])
    if size > 1:
        dist.all_reduce(counts)
    right, total = counts.tolist()
    return 100 * right / total


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", nargs="?", default="fashion-mnist", help="fashion-mnist (default), or a folder with train/ and val/")
    add("--arch", "-a", choices=sorted(ARCHITECTURES), default="resnet8")
    add("--epochs", type=int, default=2)
    add("--batch-size", "-b", type=int, default=128, help="pictures per process (%(default)s)")
    add("--lr", type=float, default=0.4, help="peak rate for 256 pictures a step (%(default)s)")
    add("--weight-decay", "--wd", type=float, default=1e-4)
    add("--opt-level", choices=["none", "O0", "O1", "O2", "O3"], default="O1")
    add("--keep-batchnorm-fp32", type=lambda text: text == "True", default=None, metavar="{True,False}")
    add("--loss-scale", default=None, help="a number or dynamic")
    add("--sync-bn", "--sync_bn", action="store_true", help="statistics of batch norms over all processes")
    add("--images", type=int, default=0, help="use only so many pictures of each split (0: all)")
    add("--workers", "-j", type=int, default=0)
    add("--print-freq", "-p", type=int, default=50)
    add("--checkpoint", default=None, help="write the state there after every epoch")
    add("--resume", default=None, help="go on from such a file")
    add("--deterministic", action="store_true", help="no search for the fastest convolutions")
    add("--seed", type=int, default=0)
    add("--device", choices=["auto", "cpu"], default="auto")
    args = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "print_freq"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


if __name__ == "__main__":
    run(parse())
