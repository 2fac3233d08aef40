"""Options that several verbs share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mxnet as mx

from dlx import config as configs

from . import fashion_mnist, registry
from .data import AUGMENTATIONS, BACKENDS, Dataset, Loader, build_loader, open_dataset, synthetic
from .workers import Workers

TASK = "MxNet/Classification/RN50v1.5"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
CHECKPOINT_HELP = "a run's folder, a checkpoint, or a .safetensors file (which needs arch)"


@dataclass
class DataOptions:
    """Which pictures, and how they are read."""

    data: str = configs.field("fashion-mnist", help="fashion-mnist or synthetic", group="data")
    data_dir: str | None = configs.field(
        None, help="folder of your own train.rec, val.rec (see prepare), instead of data", group="data"
    )
    data_backend: str = configs.field("mxnet", help="who decodes", choices=BACKENDS, group="data")
    image_size: int | None = configs.field(None, help="side in pixels; the architecture's own by default", ge=8)
    resize: int | None = configs.field(None, help="short side before the evaluation crop", ge=8, group="data")
    augmentation: str = configs.field("standard", help="of training", choices=AUGMENTATIONS, group="data")
    num_classes: int = configs.field(1000, help="of synthetic data", ge=2, group="data")
    num_samples: int = configs.field(12800, help="pictures of an epoch of synthetic data", ge=1, group="data")
    workers: int = configs.field(2, help="decoding threads of a worker", ge=1, group="data")
    batch_size: int = configs.field(64, help="images per worker", ge=1, group="data")
    seed: int = configs.field(1, help="of weights, order and augmentation", ge=0)
    device: str = configs.field("auto", help="auto, cpu or gpu (a worker takes the GPU of its local rank)")

    def open(self) -> Dataset:
        """Find and check the data; Fashion-MNIST is made where it is not there yet."""
        if self.data_dir is not None:
            return open_dataset(self.data_dir)
        if self.data == fashion_mnist.FASHION_MNIST:
            return fashion_mnist.prepare_fashion_mnist()
        if self.data == "synthetic":
            return synthetic(self.num_classes, self.num_samples)
        raise ValueError(f"data {self.data!r} is neither fashion-mnist nor synthetic; a folder goes into data_dir")

    def source(self) -> str:
        """What the data is called in logs and messages."""
        return self.data_dir or self.data

    def identity(self, dataset: Dataset) -> dict[str, str]:
        """The data's hash for the record, where it has one."""
        return {self.source(): dataset.sha256} if dataset.sha256 else {}

    def loader(self, dataset: Dataset, split: str, arch: str, train: bool, workers: Workers, **changed: Any) -> Loader:
        """The loader of a split for this worker."""
        options: dict[str, Any] = {
            "batch_size": self.batch_size, "image_size": self.image_size or registry.architecture(arch).image_size,
            "backend": self.data_backend, "augmentation": self.augmentation, "resize": self.resize, "seed": self.seed,
            "workers": self.workers, "rank": workers.rank, "num_workers": workers.size,
        }  # fmt: skip
        return build_loader(dataset, split, train=train, **options | changed)


@dataclass
class TrainConfig(DataOptions):
    """Train a classifier (train_val, train), measure it (val) or write its predictions (pred)."""

    mode: Literal["train_val", "train", "val", "pred"] = configs.field("train_val", help="what to do")
    arch: str = configs.field("resnet50", help="a name of rn50_mxnet.registry", choices=tuple(registry.ARCHITECTURES))
    checkpoint: str | None = configs.field(
        None, help=f"for val and pred, and to start training from: {CHECKPOINT_HELP}"
    )
    epochs: int = configs.field(90, help="passes over the training pictures", ge=1, group="training")
    max_steps: int | None = configs.field(None, help="stop after so many steps", ge=1, group="training")
    lr: float = configs.field(0.256, help="highest learning rate", gt=0, group="training")
    lr_batch_size: int | None = configs.field(
        256, help="the global batch that lr is meant for; others scale it; null: none do", ge=1, group="training"
    )
    lr_schedule: str = configs.field("cosine", help="after warm-up", choices=("cosine", "constant"), group="training")
    warmup_epochs: float = configs.field(8.0, help="of linear warm-up", ge=0, group="training")
    momentum: float = configs.field(0.875, help="of SGD", ge=0, lt=1, group="training")
    nesterov: bool = configs.field(False, help="Nesterov's momentum", group="training")
    weight_decay: float = configs.field(2**-15, help="not of norms and biases", ge=0, group="training")
    label_smoothing: float = configs.field(0.1, help="share spread over all classes", ge=0, lt=1, group="training")
    mixup: float = configs.field(0.0, help="alpha of mixup; 0 is none", ge=0, group="training")
    precision: Literal["fp32", "bf16", "fp16"] = configs.field(
        "fp32", help="bf16: MXNet's AMP; fp16: GPUs only", group="training"
    )
    fused: bool = configs.field(True, help="batch norm with its ReLU as one operator (on a CPU)", group="training")
    kvstore: str = configs.field("local", help="local, or dist_sync under runner", choices=("local", "dist_sync"))
    resume: Literal["auto", "none"] = configs.field(
        "auto", help="auto: go on from output_dir's last checkpoint; none: begin anew"
    )
    save_steps: int | None = configs.field(None, help="save every so many steps, besides every epoch", ge=1)
    log_every: int = configs.field(20, help="steps between lines of the log", ge=1)
    output_dir: str = configs.field("runs/train", help="where log, record and checkpoints go")


def context(device: str, local_rank: int = 0) -> mx.Context:
    """The device of a worker. ValueError for a GPU that this MXNet or machine does not have."""
    gpus = mx.context.num_gpus()
    if device == "auto":
        return mx.gpu(local_rank % gpus) if gpus else mx.cpu()
    if device == "cpu":
        return mx.cpu()
    if device != "gpu":
        raise ValueError(f"device {device!r} is none of auto, cpu, gpu")
    if local_rank >= gpus:
        built = mx.runtime.Features().is_enabled("CUDA")
        raise ValueError(
            f"device gpu: worker {local_rank} needs its own GPU and there are {gpus}"
            + ("" if built else "; this MXNet is built without CUDA (PyPI's mxnet is; see the README)")
        )
    return mx.gpu(local_rank)
