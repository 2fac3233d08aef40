"""Measure training, detection and loader speed; side by side with a peer where one is named.

    ./dlx bench SSD -- --mode inference --arch ssd300_small --batch_sizes "[1, 8]" --device cpu --precision fp32
    ./dlx bench SSD -- --mode training --batch_sizes "[128]" --peers "[plain, torchvision]"
    ./dlx bench SSD -- --mode stages --batch_sizes "[1, 64]"        forward, choice of candidates, suppression
    ./dlx bench SSD -- --mode loader --data stamp-scenes --batch_sizes "[128]"

Detection is from uint8 pictures on the device to suppressed boxes. Peer "plain" is the same network in eager PyTorch
without our kernels, "torchvision" its ssd300_vgg16 (another backbone of the same input). Writes one JSON record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlx import bench, dist, inference, optim
from dlx import config as configs
from dlx.inputs import Normalize
from dlx.loading import Loader
from dlx.norm import set_fused
from dlx.precision import DTYPES, autocast
from dlx.record import Record

from . import pretrained, registry
from .anchors import default_boxes
from .detect import Detect
from .loss import MultiboxLoss
from .options import CONFIGS, TASK, DataOptions
from .pictures import Batch
from .step import TrainState, capture, train_step
from .synthetic import random_objects

PEERS = ("plain", "torchvision")


@dataclass
class BenchmarkConfig(DataOptions):
    """Throughput and latency. Everything is measured in this process, peers in turns with ours."""

    mode: Literal["training", "inference", "latency", "stages", "loader"] = configs.field(
        "inference", help="what is timed"
    )
    arch: str = configs.field("ssd300_resnet50", help="a name of ssd.registry")
    checkpoint: str | None = configs.field(None, help="detect with these weights; else with fresh ones")
    num_classes: int = configs.field(80, help="of fresh weights, without the background", ge=1)
    batch_sizes: list[int] = configs.field([64], help="images per call", ge=1)
    peers: list[str] = configs.field([], help=f"measured side by side: {', '.join(PEERS)}")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = configs.field("bf16", help="of the matrix products")
    engine: Literal["auto", "eager", "graph", "compile"] = configs.field(
        "auto", help="auto: a CUDA graph on a GPU, else eager"
    )
    backends: list[str] = configs.field(
        ["pytorch", "dali-cpu", "dali-gpu"], help="loaders of mode loader", group="data"
    )
    warmup: int = configs.field(10, help="calls that do not count", ge=1)
    iterations: int = configs.field(30, help="timed calls per turn", ge=2)
    pairs: int = configs.field(3, help="turns of ours and peer", ge=1)
    output: str = configs.field("runs/benchmark.json", help="the record")


def _engine(config: BenchmarkConfig, device: torch.device) -> str:
    return config.engine if config.engine != "auto" else "graph" if device.type == "cuda" else "eager"


def _train_state(config: BenchmarkConfig, device: torch.device, engine: str, num_classes: int) -> TrainState:
    torch.manual_seed(config.seed)
    model = registry.build(config.arch, num_classes).to(device, memory_format=torch.channels_last).train()
    return TrainState(
        model,
        optim.build_optimizer(model, "sgd", lr=1e-3, momentum=0.9, weight_decay=5e-4),
        loss=MultiboxLoss(default_boxes(config.image_size)).to(device),
        normalize=Normalize().to(device),
        forward=torch.compile(model) if engine == "compile" else None,
        precision=config.precision,
    )


def training_step(config: BenchmarkConfig, device: torch.device, batch: Batch) -> Callable[[], Any]:
    """Our training step on a fixed batch."""
    engine = _engine(config, device)
    state = _train_state(config, device, engine, config.num_classes)
    if engine != "graph":
        return lambda: train_step(state, [batch])
    graphed = capture(state, [batch])
    return lambda: graphed([batch])


def _torchvision(config: BenchmarkConfig) -> nn.Module:
    try:
        import torchvision
    except ImportError as error:
        raise ValueError(f"peer torchvision needs the package torchvision: {error}") from error
    ssd = torchvision.models.detection.ssd300_vgg16
    return ssd(weights=None, weights_backbone=None, num_classes=config.num_classes + 1)


def peer_training_step(config: BenchmarkConfig, peer: str, device: torch.device, batch: Batch) -> Callable[[], Any]:
    """The step a careful user of the peer would write: channels_last, autocast, fused SGD."""
    if peer == "plain":
        state = _train_state(config, device, "eager", config.num_classes)
        set_fused(state.model, False)
        return lambda: train_step(state, [batch])
    torch.manual_seed(config.seed)
    model = _torchvision(config).to(device, memory_format=torch.channels_last).train()
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, **fused)
    side = batch.images.shape[-1]
    targets = [
        {"boxes": boxes[labels > 0] * side, "labels": labels[labels > 0]}
        for boxes, labels in zip(batch.boxes, batch.labels, strict=True)
    ]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(config.precision, device):
            losses = model(list(batch.images.float().div(255)), targets)
        sum(losses.values()).backward()
        optimizer.step()

    return step


class Pipeline(nn.Module):
    """uint8 N 3 S S -> suppressed detections, the network in ``dtype``."""

    def __init__(self, model: nn.Module, image_size: int, dtype: torch.dtype, **options: Any):
        super().__init__()
        self.normalize, self.model, self.dtype = Normalize(), model, dtype
        self.detect = Detect(default_boxes(image_size), **options)

    def prepare(self, images: Tensor) -> Tensor:
        return self.normalize(images).to(self.dtype).contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.detect(*self.model(self.prepare(images))))


def _trained(config: BenchmarkConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    if config.checkpoint:
        return pretrained.load(config.checkpoint).model
    return registry.build(config.arch, config.num_classes).eval()


def detection_call(config: BenchmarkConfig, device: torch.device, images: Tensor) -> Callable[[], Any]:
    """Our optimised pipeline on a fixed batch."""
    dtype = DTYPES[config.precision]
    pipeline = Pipeline(inference.optimize(_trained(config), dtype), images.shape[-1], dtype).to(device)
    engine = _engine(config, device)
    if engine == "graph":
        graphed = inference.GraphedModel(pipeline, images)
        return lambda: graphed(images)
    forward = torch.compile(pipeline) if engine == "compile" else pipeline
    return _without_gradients(lambda: forward(images))


def peer_detection_call(config: BenchmarkConfig, peer: str, device: torch.device, images: Tensor) -> Callable[[], Any]:
    """The peer's detections in the same precision."""
    if peer == "plain":
        dtype = DTYPES[config.precision]
        model = _trained(config).to(dtype=dtype, memory_format=torch.channels_last)
        pipeline = Pipeline(model, images.shape[-1], dtype).to(device)
        return _without_gradients(lambda: pipeline(images))
    model = _torchvision(config).eval().to(device, memory_format=torch.channels_last)

    def call() -> Any:
        with autocast(config.precision, device):
            return model(list(images.float().div(255)))

    return _without_gradients(call)


def _without_gradients(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.inference_mode():
            return call()

    return run


def _options(config: BenchmarkConfig, batch: int, device: torch.device, shape: list[int]) -> dict[str, Any]:
    return {
        "items": batch, "unit": "images/s", "device": device, "warmup": config.warmup, "batch": batch,
        "iterations": config.iterations, "shape": shape, "precision": config.precision, "pairs": config.pairs,
        "mode": "latency" if config.mode == "latency" else "throughput",
    }  # fmt: skip


def measure_model(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows for ours and every peer at one batch size; ratios are per turn, ours over the peer."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (batch, 3, config.image_size, config.image_size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)
    images = images.contiguous(memory_format=torch.channels_last)
    if config.mode == "training":
        objects = random_objects(batch, 8, config.num_classes, generator)
        made = Batch(images, *(tensor.to(device) for tensor in objects))
        programs = {"ours": training_step(config, device, made)}
        programs |= {peer: peer_training_step(config, peer, device, made) for peer in config.peers}
    else:
        programs = {"ours": detection_call(config, device, images)}
        programs |= {peer: peer_detection_call(config, peer, device, images) for peer in config.peers}
    rows = bench.against_peers(programs, **_options(config, batch, device, list(shape)))
    return [{"arch": config.arch, "batch_size": batch} | row for row in rows]


def measure_stages(config: BenchmarkConfig, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Time of each part of detection, and of suppression by the number of candidates; all as CUDA graphs on a GPU."""
    dtype = DTYPES[config.precision]
    generator = torch.Generator().manual_seed(config.seed)
    pipeline = Pipeline(inference.optimize(_trained(config), dtype), config.image_size, dtype).to(device)
    shape = (batch, 3, config.image_size, config.image_size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)
    with torch.inference_mode():
        prepared = pipeline.prepare(images)
        outputs = pipeline.model(prepared)
    stages: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "normalise": (pipeline.prepare, (images,)),
        "network": (pipeline.model, (prepared,)),
        "choice and suppression": (pipeline.detect, outputs),
    }
    anchors = default_boxes(config.image_size)
    for candidates in (128, 256, 512, 1024, 2048):
        detect = Detect(anchors, candidates=candidates, score_threshold=0.0).to(device)
        stages[f"the same, {candidates} candidates"] = (detect, outputs)
    rows = []
    for name, (call, inputs) in stages.items():
        if _engine(config, device) == "graph":
            call = inference.GraphedModel(call, *inputs)
        run = _without_gradients(functools.partial(call, *inputs))
        rows += bench.against_peers({name: run}, **_options(config, batch, device, list(shape)))
    return [{"arch": config.arch, "batch_size": batch} | row for row in rows]


def train_from(config: BenchmarkConfig, loader: Loader, device: torch.device) -> float:
    """Images per second of training fed by a loader."""
    engine = _engine(config, device)
    state = _train_state(config, device, engine, len(loader.classes))
    graphed: Any = None

    def step(batch: Batch) -> Any:
        nonlocal graphed
        if engine == "graph" and graphed is None:
            graphed = capture(state, [batch])
        return graphed([batch]) if graphed else train_step(state, [batch])

    return bench.fed(loader, step, device, warmup=config.warmup)


def measure_loaders(config: BenchmarkConfig, world: dist.World) -> list[dict[str, Any]]:
    """Each loader alone, then training fed by it, then training on one batch given again and again."""
    config.batch_size = config.batch_sizes[0]
    splits = config.open(num_classes=config.num_classes)
    rows = []
    for backend in [*config.backends, "synthetic"]:
        config.data_backend = backend
        row: dict[str, Any] = {"loader": backend, "batch_size": config.batch_size, "workers": config.workers}
        loader = config.loader("train", splits, True, world)
        row["loader_images_per_second"], row["images"] = bench.drain(loader, world.device)
        loader.close()
        loader = config.loader("train", splits, True, world)
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
    unknown = [peer for peer in config.peers if peer not in PEERS]
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}")
    torch.backends.cudnn.benchmark = True
    with dist.init(config.device) as world:
        record = Record.start(TASK, "benchmark", configs.to_dict(config), seed=config.seed)
        if config.mode == "loader":
            rows = measure_loaders(config, world)
        else:
            measure = measure_stages if config.mode == "stages" else measure_model
            rows = [row for batch in config.batch_sizes for row in measure(config, batch, world.device)]
        record.attach("rows", rows)
        record.finish()
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)
        print(f"record: {path}")
    return record.fields


if __name__ == "__main__":
    main()
