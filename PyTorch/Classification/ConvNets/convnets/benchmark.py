"""Measure training, inference and loader speed; side by side with a peer where one is named.

    ./dlx bench ConvNets -- --mode inference --arch resnet8_small --batch_sizes "[1, 64]" --device cpu
    ./dlx bench ConvNets -- --mode training --batch_sizes "[256]" --peers "[torchvision, torchvision-compiled]"
    ./dlx bench ConvNets --nproc gpu -- --mode training                    all GPUs of this machine
    ./dlx bench ConvNets -- --mode loader --data_dir pictures --batch_sizes "[256]"

Writes one JSON record; the README's tables are generated from the records in results/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dlx import bench, dist, inference, optim
from dlx import config as configs
from dlx.inputs import Normalize
from dlx.loading import Loader
from dlx.precision import DTYPES, autocast
from dlx.record import Record
from dlx.step import GraphedStep, wrap

from . import registry
from .options import CONFIGS, TASK, DataOptions
from .resnet import ResNet
from .step import TrainState, capture, train_step

PEERS = ("torchvision", "torchvision-compiled", "timm")


@dataclass
class BenchmarkConfig(DataOptions):
    """Throughput and latency. Everything is measured in this process, peers in turns with ours."""

    mode: Literal["training", "inference", "latency", "loader"] = configs.field("inference", help="what is timed")
    arch: str = configs.field("resnet50", help="a name of convnets.registry")
    batch_sizes: list[int] = configs.field([256], help="images per call", ge=1)
    peers: list[str] = configs.field([], help=f"measured side by side: {', '.join(PEERS)}")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("bf16", help="of the matrix products")
    engine: Literal["auto", "eager", "graph", "compile"] = configs.field("auto", help="how ours runs")
    warmup: int = configs.field(10, help="calls that do not count", ge=1)
    iterations: int = configs.field(30, help="timed calls per turn", ge=1)
    pairs: int = configs.field(5, help="turns of each program", ge=1)
    backends: list[str] = configs.field(
        ["pytorch", "dali-cpu", "dali-gpu"], help="loaders of mode loader", group="data"
    )
    output: str = configs.field("runs/benchmark.json", help="the record")


def _engine(config: BenchmarkConfig, device: torch.device, model: torch.nn.Module, processes: int = 1) -> str:
    if config.engine != "auto":
        return config.engine
    if device.type != "cuda" or processes > 1:
        return "eager"
    return "graph" if isinstance(model, ResNet) else "compile"


def training_step(config: BenchmarkConfig, world: dist.World, images: Tensor, labels: Tensor) -> Callable[[], Any]:
    """Our training step on a fixed batch; several processes share their gradients as `train` does."""
    device = world.device
    torch.manual_seed(config.seed)
    model = registry.build(config.arch).to(device, memory_format=torch.channels_last).train()
    optimizer = optim.build_optimizer(model, "sgd", lr=0.01, momentum=0.875, weight_decay=3e-5)
    engine = _engine(config, device, model, world.size)
    forward = wrap(model, world, engine == "compile")
    state = TrainState(model, optimizer, normalize=Normalize().to(device), forward=forward, precision=config.precision)
    batch = [(images, labels)]
    if engine != "graph":
        return lambda: train_step(state, batch)
    graphed = capture(state, batch)
    return lambda: graphed((batch,))


def peer_model(peer: str, arch: str) -> torch.nn.Module:
    """The same architecture from another library. ValueError says which library is missing."""
    name = peer.split("-")[0]
    if peer not in PEERS:
        raise ValueError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}")
    try:
        if name == "torchvision":
            import torchvision

            return torchvision.models.get_model(arch)
        import timm

        return timm.create_model(arch)
    except ImportError as error:
        raise ValueError(f"peer {peer} needs the package {name}: {error}") from error


def peer_training_step(
    config: BenchmarkConfig, peer: str, device: torch.device, images: Tensor, labels: Tensor
) -> Callable[[], Any]:
    """The step a careful user of the peer would write: channels_last, autocast, fused SGD, cuDNN's search."""
    torch.manual_seed(config.seed)
    model = peer_model(peer, config.arch).to(device, memory_format=torch.channels_last).train()
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.875, weight_decay=3e-5, **fused)
    forward = torch.compile(model) if peer.endswith("-compiled") else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(config.precision, device):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()

    return step


def inference_call(config: BenchmarkConfig, device: torch.device, images: Tensor) -> Callable[[], Any]:
    """Our optimised forward pass on a fixed batch."""
    torch.manual_seed(config.seed)
    model = inference.optimize(registry.build(config.arch), DTYPES[config.precision]).to(device)
    images = images.to(DTYPES[config.precision])
    engine = _engine(config, device, model)
    if engine == "compile":
        model = torch.compile(model)
    if device.type == "cuda" and engine != "eager":
        graphed = inference.GraphedModel(model, images)
        return lambda: graphed(images)

    def call() -> Tensor:
        with torch.inference_mode():
            return model(images)

    return call


def peer_inference_call(config: BenchmarkConfig, peer: str, device: torch.device, images: Tensor) -> Callable[[], Any]:
    """The peer's forward pass in the same precision (its weights cast, as is usual for inference)."""
    dtype = DTYPES[config.precision]
    model = peer_model(peer, config.arch).eval().to(device, dtype, memory_format=torch.channels_last)
    forward = torch.compile(model) if peer.endswith("-compiled") else model
    images = images.to(dtype)

    def call() -> Tensor:
        with torch.inference_mode():
            return forward(images)

    return call


def measure_model(config: BenchmarkConfig, batch: int, world: dist.World) -> list[dict[str, Any]]:
    """Rows for ours and every peer at one batch size per process; ratios are per turn, ours over the peer."""
    device = world.device
    size = config.image_size or registry.architecture(config.arch).image_size
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    if config.mode == "training":
        programs = {"ours": training_step(config, world, images, labels)}
        programs |= {peer: peer_training_step(config, peer, device, images, labels) for peer in config.peers}
    else:
        programs = {"ours": inference_call(config, device, images)}
        programs |= {peer: peer_inference_call(config, peer, device, images) for peer in config.peers}
    rows = bench.against_peers(
        programs,
        pairs=config.pairs,
        items=batch * world.size,
        unit="images/s",
        device=device,
        warmup=config.warmup,
        iterations=config.iterations,
        batch=batch,
        shape=list(images.shape),
        precision=config.precision,
        mode="latency" if config.mode == "latency" else "throughput",
    )
    return [{"arch": config.arch, "batch_size": batch, "processes": world.size} | row for row in rows]


def train_from(config: BenchmarkConfig, loader: Loader, device: torch.device) -> float:
    """Images per second of training fed by a loader."""
    torch.manual_seed(config.seed)
    model = registry.build(config.arch).to(device, memory_format=torch.channels_last).train()
    optimizer = optim.build_optimizer(model, "sgd", lr=0.01, momentum=0.875, weight_decay=3e-5)
    state = TrainState(model, optimizer, normalize=Normalize().to(device), precision=config.precision)
    graphed: GraphedStep | None = None
    use_graph = _engine(config, device, model) == "graph"

    def step(batch: tuple[Tensor, Tensor]) -> Any:
        nonlocal graphed
        batch = (batch[0], batch[1] % 1000)
        if use_graph and graphed is None:
            graphed = capture(state, [batch])
        return graphed(([batch],)) if graphed else train_step(state, [batch])

    return bench.fed(loader, step, device, warmup=config.warmup)


def measure_loaders(config: BenchmarkConfig, world: dist.World) -> list[dict[str, Any]]:
    """Each loader alone, then training fed by it, then training on synthetic pictures."""
    config.batch_size = config.batch_sizes[0]
    splits = config.open()
    size = config.image_size or registry.architecture(config.arch).image_size
    rows = []
    for backend in [*config.backends, "synthetic"]:
        config.data_backend = backend
        row: dict[str, Any] = {"loader": backend, "batch_size": config.batch_size, "workers": config.workers}
        loader = config.loader("train", splits, True, world, image_size=size)
        row["loader_images_per_second"], row["images"] = bench.drain(loader, world.device)
        loader.close()
        loader = config.loader("train", splits, True, world, image_size=size)
        row["training_images_per_second"] = train_from(config, loader, world.device)
        loader.close()
        rows.append(row)
        print(row, flush=True)
    synthetic = rows[-1]["training_images_per_second"]
    for row in rows:
        row["of_synthetic"] = row["training_images_per_second"] / synthetic
    return rows


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(BenchmarkConfig, args, configs_dir=CONFIGS, prog="benchmark")
    if config.warmup >= config.iterations:
        raise ValueError(f"warmup {config.warmup} must be less than iterations {config.iterations}")
    torch.backends.cudnn.benchmark = True
    with dist.init(config.device) as world:
        if config.mode != "training" or config.peers:
            world.require_alone("a benchmark of anything but our training")
        record = Record.start(TASK, "benchmark", configs.to_dict(config), seed=config.seed)
        if config.mode == "loader":
            rows = measure_loaders(config, world)
        else:
            rows = [row for batch in config.batch_sizes for row in measure_model(config, batch, world)]
        record.attach("rows", rows)
        record.finish()
        if world.is_main:
            path = Path(config.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            record.save(path)
            print(f"record: {path}")
    return record.fields


if __name__ == "__main__":
    main()
